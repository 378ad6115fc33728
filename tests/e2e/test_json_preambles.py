"""Texts on the channel `commentary` in answers that must match a JSON schema, on every API, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.obeying import KINDS, START, SURFACES, THOUGHT, Desk, Outcome, desk
from tests.schemas.suite import closed

CITY = closed(city={"type": "string"})
PARIS, OSLO = '{"city":"Paris"}', '{"city":"Oslo"}'
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY, "strict": True}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NEXT = f"<|end|>{START}"
ANSWER = f"<|channel|>final<|message|>{PARIS}<|return|>"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def preamble(text: str) -> str:
    return f"<|channel|>commentary<|message|>{text}"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "vllm, unguided", "mlx_server"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
on_each = pytest.mark.parametrize("surface", SURFACES)
with_and_without_tools = pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])


async def ask(harness: Desk, surface: str, stream: bool, tools: Any) -> Outcome:
    fields = {"tools": tools} if tools else {}
    outcome: Outcome = await SURFACES[surface](harness, stream=stream, response_format=FORM, **fields)
    return outcome


def answer_of(outcome: Outcome, surface: str) -> str:
    """Return the text of the answer, without the preambles that are messages of their own in Responses."""
    if surface != "responses":
        return outcome.text
    items = [item for item in outcome.whole["output"] if item.get("phase") == "final_answer"]
    return "".join(part.get("text", "") for item in items for part in item["content"])


ANSWERED: dict[str, tuple[str, str]] = {
    # name: (output, answer)
    "a preamble and the answer": (THOUGHT + preamble("I look.") + NEXT + ANSWER, PARIS),
    "a preamble with the form and the answer": (preamble(OSLO) + NEXT + ANSWER, PARIS),
    "two preambles and the answer": (preamble(OSLO) + NEXT + preamble("I look.") + NEXT + ANSWER, PARIS),
    "a preamble, the answer and another text": (
        preamble("I look.")
        + NEXT
        + f"<|channel|>final<|message|>{PARIS}{NEXT}<|channel|>final<|message|>Bye.<|return|>",
        PARIS,
    ),
    "only a preamble with the form": (THOUGHT + preamble(OSLO) + "<|return|>", OSLO),
    "only preambles, the last one with the form": (preamble("I look.") + NEXT + preamble(OSLO) + "<|return|>", OSLO),
    "only a fenced preamble with the form": (preamble(f"```json\n{OSLO}\n```") + "<|return|>", OSLO),
    "only a preamble without the form": (preamble("I look.") + "<|return|>", PARIS),
}


@with_and_without_tools
@both_forms
@on_each
@pytest.mark.parametrize(("output", "answer"), ANSWERED.values(), ids=ANSWERED)
async def test_a_preamble_is_the_answer_only_if_no_answer_follows(
    harness: Desk, output: str, answer: str, surface: str, stream: bool, tools: Any
) -> None:
    harness.think(output, bodies=[PARIS])
    outcome = await ask(harness, surface, stream, tools)
    assert answer_of(outcome, surface) == answer
    assert (outcome.calls, outcome.refusal, outcome.unmet) == ([], "", "")


@with_and_without_tools
@both_forms
@on_each
async def test_an_answer_of_preambles_without_the_form_is_a_refusal(
    harness: Desk, surface: str, stream: bool, tools: Any
) -> None:
    model = harness.think(preamble("I look.") + "<|return|>", bodies=[preamble("I look.")])
    outcome = await ask(harness, surface, stream, tools)
    assert (answer_of(outcome, surface), outcome.calls) == ("", [])
    assert (outcome.refusal, outcome.unmet) == ("I look.", "The answer does not have the form that was asked for.")
    # The gateway opens the answer, and then generates it again like any invalid answer.
    assert len(model.asked) == 4


@with_and_without_tools
@pytest.mark.parametrize("surface", ["chat", "messages"])
async def test_a_preamble_is_a_part_of_the_reasoning(harness: Desk, surface: str, tools: Any) -> None:
    harness.think(THOUGHT + preamble("I look.") + NEXT + ANSWER, bodies=[PARIS])
    outcome = await ask(harness, surface, False, tools)
    whole = outcome.whole
    if surface == "chat":
        assert whole["choices"][0]["message"]["reasoning"] == "Hm.I look."
    else:
        assert [block["thinking"] for block in whole["content"] if block["type"] == "thinking"] == ["Hm.", "I look."]


@with_and_without_tools
@both_forms
async def test_a_preamble_is_a_message_of_its_own_in_responses(harness: Desk, stream: bool, tools: Any) -> None:
    harness.think(preamble("I look.") + NEXT + ANSWER, bodies=[PARIS])
    outcome = await ask(harness, "responses", stream, tools)
    texts = [(item["phase"], item["content"][0]["text"]) for item in outcome.whole["output"] if "phase" in item]
    assert texts == [("commentary", "I look."), ("final_answer", PARIS)]


@both_forms
@pytest.mark.parametrize("surface", ["chat", "messages"])
async def test_a_preamble_before_a_call_is_no_answer(harness: Desk, surface: str, stream: bool) -> None:
    call = f"<|channel|>commentary to=functions.get_weather<|message|>{PARIS}<|call|>"
    harness.think(preamble(OSLO) + NEXT + call)
    outcome = await ask(harness, surface, stream, [TOOL])
    assert (outcome.text, outcome.refusal, outcome.unmet) == ("", "", "")
    assert [name for name, _ in outcome.calls] == ["get_weather"]
