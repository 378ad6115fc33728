"""Removal of runs of blanks in JSON bodies, before and after parts of the body are emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.engine.planning import BACKENDS, CITY_FORM, FINAL, GUIDED, NAMED, PARIS, ask, turn
from tests.engine.scripted import IDS
from tests.harmony.recoveries import C, F
from unisono.core.events import Delta
from unisono.core.generation import Capabilities, FinishReason
from unisono.engine.request import GenerationRequest
from unisono.harmony.blanks import MAX_BLANKS

BLANKS = " \n\t " * 100
LONG_STRING = '{"city":"' + " " * 400 + '\\"' + " " * 400 + '"}'
FEW = '{"city":' + " " * MAX_BLANKS + '"Paris"}'
ANSWERED = FINAL + "It rains.<|return|>"

# Request, outputs of an unconstrained backend, and expected item. A constrained backend first generates
# a rejected answer.
CASES: dict[str, tuple[GenerationRequest, Sequence[str], F | C]] = {
    "blanks before a value": (turn(form=CITY_FORM), ['{"city":' + BLANKS, '"Paris"}<|return|>'], F(PARIS)),
    "blanks after the last bracket": (turn(form=CITY_FORM), [PARIS + BLANKS], F(PARIS)),
    "blanks at the beginning": (turn(form=CITY_FORM), [BLANKS, PARIS + "<|return|>"], F(PARIS)),
    "blanks and a whole answer in one chunk": (
        turn(form=CITY_FORM), ['{"city":' + BLANKS + '"London"}<|return|>', '"Paris"}<|return|>'], F(PARIS),
    ),
    "two runs of blanks": (turn(form=CITY_FORM), ['{"city"' + BLANKS, ":" + BLANKS, '"Paris"}<|return|>'], F(PARIS)),
    "blanks in a string": (turn(form=CITY_FORM), [LONG_STRING + "<|return|>"], F(LONG_STRING)),
    "few blanks": (turn(form=CITY_FORM), [FEW + "<|return|>"], F(FEW)),
    "blanks in a forced call": (turn(NAMED), ['{"city":' + BLANKS, '"Paris"}<|call|>'], C("get_weather", PARIS)),
    "blanks after a forced call": (turn(NAMED), [PARIS + BLANKS], C("get_weather", PARIS)),
}  # fmt: skip


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("capabilities", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("per_chunk", [1, 1000])
@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "whole"])
@pytest.mark.parametrize(("generation_request", "outputs", "expected"), CASES.values(), ids=CASES)
async def test_a_run_of_blanks_is_removed(
    generation_request: GenerationRequest,
    outputs: Sequence[str],
    expected: F | C,
    whole: bool,
    per_chunk: int,
    capabilities: Capabilities,
) -> None:
    forced = generation_request.answer.choice is not None
    steps = [ANSWERED, *outputs] if forced or capabilities.constrain else [FINAL + outputs[0], *outputs[1:]]
    outcome = await ask(
        steps,
        replace(generation_request, answer=replace(generation_request.answer, whole=whole)),
        capabilities,
        per_chunk=per_chunk,
    )
    [item] = outcome.items
    assert item == expected
    assert outcome.finished.reason is FinishReason.STOP
    assert outcome.report.unmet == ""
    assert ("repetition" in outcome.rules) is any(BLANKS in output for output in outputs)
    assert not any(" \n\t " * 2 in event.text for event in outcome.events if isinstance(event, Delta))
    assert outcome.finished.usage.completion_tokens >= len(outcome.jobs)


@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "whole"])
@pytest.mark.parametrize("capabilities", [IDS, GUIDED], ids=["unconstrained", "constrained"])
async def test_endless_blanks_end_the_answer(capabilities: Capabilities, whole: bool) -> None:
    first_output = ANSWERED if capabilities.constrain else FINAL + '{"city":' + BLANKS
    steps = [first_output, *['{"city":' + BLANKS] * bool(capabilities.constrain), *[BLANKS] * 40]
    outcome = await ask(steps, turn(form=CITY_FORM, whole=whole), capabilities, spare=True)
    assert len(outcome.jobs) <= 12
    assert outcome.finished.reason is FinishReason.LENGTH
    assert [item.text for item in outcome.items if isinstance(item, F)] in (['{"city":'], [""], [])


async def test_blanks_stay_where_repetition_is_allowed() -> None:
    text = '{"city":' + BLANKS + '"Paris"}'
    outcome = await ask([FINAL + text + "<|return|>"], turn(form=CITY_FORM, disabled_rules=frozenset({"repetition"})))
    assert outcome.items == (F(text),)


# Calls without `<|message|>`, and calls recognised by their body: the header is decided by the whole message.
WHOLE_CALLS = {
    "no message marker": "<|channel|>commentary to=functions.get_weather",
    "loose recipient": "<|channel|>commentary to: get_weather",
    "answer with a loose recipient": "<|channel|>final to:functions.get_weather<|message|>",
}


@pytest.mark.parametrize("header", WHOLE_CALLS.values(), ids=WHOLE_CALLS)
@pytest.mark.parametrize("per_chunk", [1, 1000])
async def test_a_call_that_arrives_whole_is_not_generated_again(header: str, per_chunk: int) -> None:
    body = '{"city":' + " " * (MAX_BLANKS + 6) + '"Paris"}'
    outcome = await ask([header + body + "<|call|>"], turn(), per_chunk=per_chunk)
    assert outcome.items == (C("get_weather", body),)
    assert "repetition" not in outcome.rules
