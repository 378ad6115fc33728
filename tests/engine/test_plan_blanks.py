"""Runs of blanks in JSON bodies: removed, whether or not a part of the body was shown already."""

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

# The turn, the outputs of an unguided backend, and the result. A guided one gets its own opening first.
CASES: dict[str, tuple[GenerationRequest, Sequence[str], F | C]] = {
    "blanks in front of a value": (turn(form=CITY_FORM), ['{"city":' + BLANKS, '"Paris"}<|return|>'], F(PARIS)),
    "blanks behind the last bracket": (turn(form=CITY_FORM), [PARIS + BLANKS], F(PARIS)),
    "blanks at the beginning": (turn(form=CITY_FORM), [BLANKS, PARIS + "<|return|>"], F(PARIS)),
    "blanks and a whole answer in one portion": (
        turn(form=CITY_FORM), ['{"city":' + BLANKS + '"London"}<|return|>', '"Paris"}<|return|>'], F(PARIS),
    ),
    "blanks twice": (turn(form=CITY_FORM), ['{"city"' + BLANKS, ":" + BLANKS, '"Paris"}<|return|>'], F(PARIS)),
    "blanks in a string": (turn(form=CITY_FORM), [LONG_STRING + "<|return|>"], F(LONG_STRING)),
    "few blanks": (turn(form=CITY_FORM), [FEW + "<|return|>"], F(FEW)),
    "blanks in a forced call": (turn(NAMED), ['{"city":' + BLANKS, '"Paris"}<|call|>'], C("get_weather", PARIS)),
    "blanks behind a forced call": (turn(NAMED), [PARIS + BLANKS], C("get_weather", PARIS)),
}  # fmt: skip


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("told", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("per_chunk", [1, 1000])
@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "whole"])
@pytest.mark.parametrize(("asked_turn", "outputs", "expected"), CASES.values(), ids=CASES)
async def test_a_run_of_blanks_is_removed(
    asked_turn: GenerationRequest,
    outputs: Sequence[str],
    expected: F | C,
    whole: bool,
    per_chunk: int,
    told: Capabilities,
) -> None:
    forced = asked_turn.choice is not None
    steps = [ANSWERED, *outputs] if forced or told.constrain else [FINAL + outputs[0], *outputs[1:]]
    asked = await ask(steps, replace(asked_turn, whole=whole), told, per_chunk=per_chunk)
    [item] = asked.items
    assert item == expected
    assert asked.finished.reason is FinishReason.STOP
    assert asked.report.unmet == ""
    assert ("repetition" in asked.rules) is any(BLANKS in output for output in outputs)
    assert not any(" \n\t " * 2 in event.text for event in asked.events if isinstance(event, Delta))
    assert asked.finished.usage.completion_tokens >= len(asked.jobs)


@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "whole"])
@pytest.mark.parametrize("told", [IDS, GUIDED], ids=["free", "guided"])
async def test_blanks_without_end_end_the_answer(told: Capabilities, whole: bool) -> None:
    begun = ANSWERED if told.constrain else FINAL + '{"city":' + BLANKS
    steps = [begun, *['{"city":' + BLANKS] * bool(told.constrain), *[BLANKS] * 40]
    asked = await ask(steps, turn(form=CITY_FORM, whole=whole), told, spare=True)
    assert len(asked.jobs) <= 12
    assert asked.finished.reason is FinishReason.LENGTH
    assert [item.text for item in asked.items if isinstance(item, F)] in (['{"city":'], [""], [])


async def test_blanks_stay_where_repetition_is_allowed() -> None:
    text = '{"city":' + BLANKS + '"Paris"}'
    asked = await ask([FINAL + text + "<|return|>"], turn(form=CITY_FORM, disabled_rules=frozenset({"repetition"})))
    assert asked.items == (F(text),)


# Calls without `<|message|>`, and calls that their body decides: the whole message is known before its header is.
WHOLE_CALLS = {
    "no message marker": "<|channel|>commentary to=functions.get_weather",
    "loose recipient": "<|channel|>commentary to: get_weather",
    "answer with a loose recipient": "<|channel|>final to:functions.get_weather<|message|>",
}


@pytest.mark.parametrize("header", WHOLE_CALLS.values(), ids=WHOLE_CALLS)
@pytest.mark.parametrize("per_chunk", [1, 1000])
async def test_a_call_that_arrives_whole_is_not_generated_again(header: str, per_chunk: int) -> None:
    body = '{"city":' + " " * (MAX_BLANKS + 6) + '"Paris"}'
    asked = await ask([header + body + "<|call|>"], turn(), per_chunk=per_chunk)
    assert asked.items == (C("get_weather", body),)
    assert "repetition" not in asked.rules
