"""Blocklist hook: matches in input and output, actions, and options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    DeveloperMessage,
    Item,
    Phase,
    Preamble,
    ToolResult,
    UserMessage,
)
from unisono.core.events import Closed, Reasoning, Text, ToolCall
from unisono.core.generation import FinishReason, Sampling, Usage
from unisono.core.hooks import Answer, Request
from unisono.errors import ConfigError
from unisono.hooks.blocklist import Blocked, Blocklist

PATTERNS = {"word": "(?i)\\bplutonium\\b", "card": "[0-9]{4}( ?[0-9]{4}){3}"}
CARD = "4111 1111 1111 1111"


def request_of(*items: Item, instructions: str = "", prefill: str | None = None, surface: str = "chat") -> Request:
    conversation = Conversation(Preamble(instructions), items, prefill)
    return Request("r", "t", "", "m", surface, conversation, Sampling())


def answer(*items: Closed) -> Answer:
    return Answer(items, FinishReason.STOP, Usage())


REQUESTS: dict[str, tuple[Request, list[str]]] = {
    "nothing": (request_of(), []),
    "no match": (request_of(UserMessage("Hi, 411 111")), []),
    "user message": (request_of(UserMessage("Buy PLUTONIUM!")), ["word"]),
    "instructions": (request_of(UserMessage("Hi"), instructions=CARD), ["card"]),
    "developer message": (request_of(DeveloperMessage(CARD)), ["card"]),
    "assistant message of the history": (request_of(AssistantMessage("plutonium"), UserMessage("Go on")), ["word"]),
    "reasoning": (request_of(AssistantReasoning("plutonium")), ["word"]),
    "tool call": (request_of(AssistantCall("c", "f", f'{{"a":"{CARD}"}}')), ["card"]),
    "tool result": (request_of(ToolResult("c", "f", f"{CARD} and plutonium")), ["word", "card"]),
    "prefill": (request_of(UserMessage("Hi"), prefill="plutonium"), ["word"]),
    "two matches in two messages": (request_of(UserMessage(CARD), UserMessage("plutonium")), ["word", "card"]),
    "match next to a lone surrogate": (request_of(UserMessage("\ud800 plutonium")), ["word"]),
}


@pytest.mark.parametrize(("request_", "found"), REQUESTS.values(), ids=REQUESTS)
async def test_the_input_of_the_model_is_checked(request_: Request, found: list[str]) -> None:
    annotating = Blocklist({"patterns": PATTERNS, "action": "annotate"})
    changes = await annotating.before(request_)
    assert changes is not None
    assert changes.annotation == ({"input": found} if found else None)
    refusing = Blocklist({"patterns": PATTERNS})
    if not found:
        await refusing.before(request_)
        return
    with pytest.raises(Blocked, match=", ".join(found)) as refused:
        await refusing.before(request_)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "content_blocked", "messages")
    assert not any(pattern in str(refused.value) for pattern in PATTERNS.values())


ANSWERS: dict[str, tuple[Answer, list[str]]] = {
    "nothing": (answer(), []),
    "final text": (answer(Closed(Text(0, Phase.FINAL), "Plutonium.")), ["word"]),
    "reasoning": (answer(Closed(Reasoning(0), CARD), Closed(Text(1, Phase.FINAL), "No.")), ["card"]),
    "tool call": (answer(Closed(ToolCall(0, 0, "c", "f"), '{"a":"plutonium"}')), ["word"]),
}


@pytest.mark.parametrize(("output", "found"), ANSWERS.values(), ids=ANSWERS)
async def test_the_output_of_the_model_is_checked(output: Answer, found: list[str]) -> None:
    annotating = Blocklist({"patterns": PATTERNS, "action": "annotate"})
    assert await annotating.after(request_of(), output) == ({"output": found} if found else None)
    refusing = Blocklist({"patterns": PATTERNS, "action": "refuse"})
    if found:
        with pytest.raises(Blocked, match=", ".join(found)):
            await refusing.after(request_of(), output)
    else:
        assert await refusing.after(request_of(), output) is None


async def test_only_the_configured_direction_is_checked() -> None:
    request, output = request_of(UserMessage(CARD)), answer(Closed(Text(0, Phase.FINAL), CARD))
    input_only = Blocklist({"patterns": PATTERNS, "where": ["input"]})
    assert await input_only.after(request, output) is None
    with pytest.raises(Blocked):
        await input_only.before(request)
    output_only = Blocklist({"patterns": PATTERNS, "where": ["output"]})
    assert await output_only.before(request) is None
    with pytest.raises(Blocked):
        await output_only.after(request, output)


async def test_the_error_names_the_field_of_the_api() -> None:
    with pytest.raises(Blocked) as refused:
        await Blocklist({"patterns": PATTERNS}).before(request_of(UserMessage(CARD), surface="responses"))
    assert refused.value.param == "input"


async def test_matching_time_is_limited_for_any_text() -> None:
    evil = Blocklist({"patterns": {"evil": "(a+)+b", "nested": "((x|y)*z)*!"}, "action": "annotate"})
    changes = await evil.before(request_of(UserMessage("a" * 100_000), UserMessage("xyz" * 30_000)))
    assert changes is not None
    assert changes.annotation is None


NAMES = "such as {card: '[0-9]{16}'}"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no patterns": ({}, f"patterns: must map names to regular expressions, {NAMES}"),
    "patterns as a list": ({"patterns": ["a"]}, f"patterns: must map names to regular expressions, {NAMES}"),
    "empty pattern": ({"patterns": {"a": ""}}, "patterns.a: must be a regular expression"),
    "number as a pattern": ({"patterns": {"a": 1}}, "patterns.a: must be a regular expression"),
    "lookaround": ({"patterns": {"a": "(?=x)"}}, "patterns.a: it is not a supported regular expression"),
    "pattern too large": (
        {"patterns": {"a": "((x{900}){900}){900}"}},
        "patterns.a: it is too large once its repetitions, such as `{1,1000}`, are expanded",
    ),
    "unknown action": ({"patterns": PATTERNS, "action": "drop"}, "action: must be refuse or annotate"),
    "unknown direction": ({"patterns": PATTERNS, "where": ["in"]}, "where: must be a list of input or output, or both"),
    "empty list of directions": (
        {"patterns": PATTERNS, "where": []},
        "where: must be a list of input or output, or both",
    ),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_an_invalid_option_is_rejected_with_its_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Blocklist(options)
    assert str(error.value).startswith(message)


def test_the_documentation_lists_the_options() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    assert all(f"`{option}`" in page for option in ("patterns", "action", "where"))
