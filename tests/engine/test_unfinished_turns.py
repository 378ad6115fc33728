"""Turns that end after a preamble, and calls of tools that the request does not declare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.planning import (
    BACKENDS,
    CITY_FORM,
    ENCODING,
    FINAL,
    PARIS,
    PREAMBLE,
    WEATHER,
    WITHOUT_TOOLS,
    PlanOutcome,
    S,
    T,
    ask,
    turn,
)
from tests.engine.scripted import IDS, Runner, Scripted, Step
from tests.harmony.fold import items_of
from tests.harmony.recoveries import C, F, P, R
from unisono.core.events import Event
from unisono.core.generation import FinishReason
from unisono.engine.generation import CALL_AS_TEXT
from unisono.engine.request import AllowedTools
from unisono.errors import BackendUnavailable
from unisono.schemas import violation

DANGLING = "dangling-preamble"
UNDECLARED = "undeclared-tool"
LOOK = P("I look.")
CALL = C("get_weather", PARIS)
UNKNOWN = '<|channel|>commentary to=functions.print_tree <|constrain|>json<|message|>{"path":"."}<|call|>'
FOREIGN = '<|channel|>commentary to=repo_browser.print_tree <|constrain|>json<|message|>{"path":""}<|call|>'
NO_SUCH_TOOL = "There is no tool 'print_tree'. Call one of these instead, or answer without: get_weather, add, now."


@pytest.fixture(params=BACKENDS)
def capabilities(request: pytest.FixtureRequest) -> object:
    return BACKENDS[request.param]


PREAMBLES: dict[str, tuple[list[str], tuple[R | P | F | C, ...]]] = {
    "a call follows": ([T + S + PREAMBLE + "<|return|>", WEATHER + PARIS + "<|call|>"], (R("Hm."), LOOK, CALL)),
    "an answer follows": ([PREAMBLE + "<|end|>", FINAL + "Done.<|return|>"], (LOOK, F("Done."))),
    "a second preamble, then the opened answer": (
        [PREAMBLE + "<|return|>", PREAMBLE + "<|return|>", "Done.<|return|>"],
        (LOOK, LOOK, F("Done.")),
    ),
    "a preamble without its terminator": ([PREAMBLE, WEATHER + PARIS + "<|call|>"], (LOOK, CALL)),
}


@pytest.mark.parametrize(("outputs", "items"), PREAMBLES.values(), ids=PREAMBLES)
async def test_a_turn_that_ends_after_a_preamble_is_continued(
    outputs: list[str], items: tuple[R | P | F | C, ...], capabilities: object
) -> None:
    outcome = await ask(outputs, turn(), capabilities)  # type: ignore[arg-type]
    assert outcome.items == items
    assert DANGLING in outcome.rules
    assert outcome.report.recoveries.count(DANGLING) == 1
    assert outcome.suffixes[1].endswith(f"{PREAMBLE}<|end|>{S}")


async def test_the_prompt_of_the_opened_answer_contains_both_preambles() -> None:
    outcome = await ask([PREAMBLE + "<|return|>", PREAMBLE + "<|return|>", "Done.<|return|>"], turn())
    assert outcome.suffixes[2] == f"{PREAMBLE}<|end|>{S}{PREAMBLE}<|end|>{S}{FINAL}"


COMPLETE: dict[str, tuple[str, dict[str, object]]] = {
    "a request without tools": (PREAMBLE + "<|return|>", {"conversation": WITHOUT_TOOLS}),
    "a request that allows no calls": (PREAMBLE + "<|return|>", {"calls_allowed": False}),
    "the rule is disabled": (PREAMBLE + "<|return|>", {"disabled_rules": frozenset({DANGLING})}),
    "a call follows": (PREAMBLE + "<|end|>" + S + WEATHER + PARIS + "<|call|>", {}),
    "an answer precedes": (FINAL + "Yes.<|end|>" + S + PREAMBLE + "<|return|>", {}),
    "a stop string ends the preamble": (PREAMBLE + "<|return|>", {"stop": ("look",)}),
}


@pytest.mark.parametrize(("output", "fields"), COMPLETE.values(), ids=COMPLETE)
async def test_other_turns_are_not_continued(output: str, fields: dict[str, object]) -> None:
    outcome = await ask([output], turn(**fields))  # type: ignore[arg-type]
    assert DANGLING not in outcome.rules


async def test_a_turn_that_reached_the_token_limit_is_not_continued() -> None:
    outcome = await ask([PREAMBLE + "<|return|>"], turn(max_tokens=8))
    assert outcome.finished.reason is FinishReason.LENGTH
    assert outcome.items == (LOOK,)


@pytest.mark.parametrize("output", [UNKNOWN, FOREIGN], ids=["functions", "another namespace"])
async def test_a_call_of_an_undeclared_tool_is_regenerated(output: str, capabilities: object) -> None:
    outcome = await ask([T + S + output, WEATHER + PARIS + "<|call|>"], turn(), capabilities)  # type: ignore[arg-type]
    assert outcome.items == (R("Hm."), CALL)
    assert UNDECLARED in outcome.rules
    name = "repo_browser.print_tree" if output == FOREIGN else "print_tree"
    assert f"<|message|>{NO_SUCH_TOOL.replace('print_tree', name)}<|end|>{S}" in outcome.suffixes[1]


AGAIN: dict[str, tuple[str, str]] = {
    "functions": (UNKNOWN, 'print_tree({"path":"."})'),
    "another namespace": (FOREIGN, 'repo_browser.print_tree({"path":""})'),
}


@pytest.mark.parametrize("hold_calls", [True, False], ids=["complete calls", "streamed arguments"])
@pytest.mark.parametrize(("output", "text"), AGAIN.values(), ids=AGAIN)
async def test_a_repeated_call_of_an_undeclared_tool_becomes_text(
    output: str, text: str, hold_calls: bool, capabilities: object
) -> None:
    outcome = await ask([output, output], turn(hold_calls=hold_calls), capabilities)  # type: ignore[arg-type]
    assert outcome.items == (F(text),)
    assert outcome.finished.reason is FinishReason.STOP
    assert outcome.report.notes == [CALL_AS_TEXT]


async def test_a_required_form_is_generated_instead_of_the_call() -> None:
    outcome = await ask([UNKNOWN, UNKNOWN, PARIS + "<|return|>"], turn(form=CITY_FORM))
    assert outcome.items == (F(PARIS),)
    assert outcome.report.notes == []


def calls(outcome: PlanOutcome) -> list[str]:
    return [item.name for item in outcome.items if isinstance(item, C)]


async def test_a_request_without_tools_names_none() -> None:
    outcome = await ask([UNKNOWN, FINAL + "Done.<|return|>"], turn(conversation=WITHOUT_TOOLS))
    assert outcome.items == (F("Done."),)
    assert "There is no tool 'print_tree', and there are no other tools." in outcome.suffixes[1]


async def test_a_disabled_rule_lets_the_call_pass() -> None:
    outcome = await ask([UNKNOWN], turn(disabled_rules=frozenset({UNDECLARED})))
    assert calls(outcome) == ["print_tree"]
    assert UNDECLARED not in outcome.rules


async def test_an_allowed_list_names_the_declared_tools_too() -> None:
    request = turn(AllowedTools(frozenset({"get_weather"})))
    outcome = await ask([UNKNOWN, WEATHER + PARIS + "<|call|>"], request)
    assert calls(outcome) == ["get_weather"]


@pytest.mark.parametrize("text", ["I see.", "[1]", '"json"'])
async def test_text_for_an_unknown_recipient_stays_text(text: str) -> None:
    outcome = await ask([f"<|channel|>final to=someone<|message|>{text}<|return|>"], turn())
    assert outcome.items == (F(text),)
    assert outcome.rules == ("not-a-tool",)


async def test_every_portion_of_tokens_gives_the_same_events() -> None:
    outputs = [T + S + FOREIGN, PREAMBLE + "<|return|>", WEATHER + PARIS + "<|call|>"]
    request = replace(turn(), resumption=replace(turn().resumption, seed="resp_1"))
    outcomes = [await ask(outputs, request, IDS, per_chunk=size) for size in (1, 2, 5, 100)]
    assert len({outcome.items for outcome in outcomes}) == 1
    assert len({tuple(outcome.suffixes) for outcome in outcomes}) == 1
    assert len({tuple(outcome.report.journal) for outcome in outcomes}) == 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("output", [T.replace("<|end|>", "<|return|>"), PREAMBLE + "<|return|>"])
async def test_turn_that_no_backend_can_continue_ends_in_the_error(output: str) -> None:
    gone = BackendUnavailable("gone")
    runner = Runner(ENCODING, Scripted(ENCODING, [Step(output, failure=gone)]))
    events: list[Event] = []

    async def read() -> None:
        async for batch in runner.engine_with(violation).start(turn()):
            events.extend(batch)

    with pytest.raises(BackendUnavailable, match="gone"):
        await read()
    assert len(items_of(events)) == 1
