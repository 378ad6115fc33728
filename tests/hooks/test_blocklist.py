"""The hook for words that must not pass: what it finds, what it does then, and which options it takes."""

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


def asked(*items: Item, instructions: str = "", prefill: str | None = None, surface: str = "chat") -> Request:
    conversation = Conversation(Preamble(instructions), items, prefill)
    return Request("r", "t", "", "m", surface, conversation, Sampling())


def answer(*items: Closed) -> Answer:
    return Answer(items, FinishReason.STOP, Usage())


READ: dict[str, tuple[Request, list[str]]] = {
    "nothing": (asked(), []),
    "something else": (asked(UserMessage("Hi, 411 111")), []),
    "the user": (asked(UserMessage("Buy PLUTONIUM!")), ["word"]),
    "the instructions": (asked(UserMessage("Hi"), instructions=CARD), ["card"]),
    "a developer": (asked(DeveloperMessage(CARD)), ["card"]),
    "the model, as the client tells it": (asked(AssistantMessage("plutonium"), UserMessage("Go on")), ["word"]),
    "thoughts": (asked(AssistantReasoning("plutonium")), ["word"]),
    "a call": (asked(AssistantCall("c", "f", f'{{"a":"{CARD}"}}')), ["card"]),
    "a result": (asked(ToolResult("c", "f", f"{CARD} and plutonium")), ["word", "card"]),
    "the beginning of the answer": (asked(UserMessage("Hi"), prefill="plutonium"), ["word"]),
    "two in two places": (asked(UserMessage(CARD), UserMessage("plutonium")), ["word", "card"]),
    "beside half a character": (asked(UserMessage("\ud800 plutonium")), ["word"]),
}


@pytest.mark.parametrize(("request_", "found"), READ.values(), ids=READ)
async def test_what_the_model_would_read_is_looked_at(request_: Request, found: list[str]) -> None:
    noting = Blocklist({"patterns": PATTERNS, "action": "annotate"})
    changes = await noting.before(request_)
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


WROTE: dict[str, tuple[Answer, list[str]]] = {
    "nothing": (answer(), []),
    "an answer": (answer(Closed(Text(0, Phase.FINAL), "Plutonium.")), ["word"]),
    "thoughts": (answer(Closed(Reasoning(0), CARD), Closed(Text(1, Phase.FINAL), "No.")), ["card"]),
    "a call": (answer(Closed(ToolCall(0, 0, "c", "f"), '{"a":"plutonium"}')), ["word"]),
}


@pytest.mark.parametrize(("wrote", "found"), WROTE.values(), ids=WROTE)
async def test_what_the_model_wrote_is_looked_at(wrote: Answer, found: list[str]) -> None:
    noting = Blocklist({"patterns": PATTERNS, "action": "annotate"})
    assert await noting.after(asked(), wrote) == ({"output": found} if found else None)
    refusing = Blocklist({"patterns": PATTERNS, "action": "refuse"})
    if found:
        with pytest.raises(Blocked, match=", ".join(found)):
            await refusing.after(asked(), wrote)
    else:
        assert await refusing.after(asked(), wrote) is None


async def test_it_looks_where_it_is_told_to() -> None:
    asks, says = asked(UserMessage(CARD)), answer(Closed(Text(0, Phase.FINAL), CARD))
    reading = Blocklist({"patterns": PATTERNS, "where": ["input"]})
    assert await reading.after(asks, says) is None
    with pytest.raises(Blocked):
        await reading.before(asks)
    writing = Blocklist({"patterns": PATTERNS, "where": ["output"]})
    assert await writing.before(asks) is None
    with pytest.raises(Blocked):
        await writing.after(asks, says)


async def test_each_surface_is_told_its_own_field() -> None:
    with pytest.raises(Blocked) as refused:
        await Blocklist({"patterns": PATTERNS}).before(asked(UserMessage(CARD), surface="responses"))
    assert refused.value.param == "input"


async def test_no_text_makes_it_slow() -> None:
    evil = Blocklist({"patterns": {"evil": "(a+)+b", "nested": "((x|y)*z)*!"}, "action": "annotate"})
    changes = await evil.before(asked(UserMessage("a" * 100_000), UserMessage("xyz" * 30_000)))
    assert changes is not None
    assert changes.annotation is None


NAMES = "such as {card: '[0-9]{16}'}"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no patterns": ({}, f"patterns: must map names to regular expressions, {NAMES}"),
    "a list": ({"patterns": ["a"]}, f"patterns: must map names to regular expressions, {NAMES}"),
    "an empty one": ({"patterns": {"a": ""}}, "patterns.a: must be a regular expression"),
    "a number": ({"patterns": {"a": 1}}, "patterns.a: must be a regular expression"),
    "looking around": ({"patterns": {"a": "(?=x)"}}, "patterns.a: it is not a supported regular expression"),
    "far too large": (
        {"patterns": {"a": "((x{900}){900}){900}"}},
        "patterns.a: it is too large once its repetitions are expanded",
    ),
    "another action": ({"patterns": PATTERNS, "action": "drop"}, "action: must be refuse or annotate"),
    "another place": ({"patterns": PATTERNS, "where": ["in"]}, "where: must be input or output"),
    "no place": ({"patterns": PATTERNS, "where": []}, "where: must be a list of input or output, or both"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_options_it_cannot_use_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Blocklist(options)
    assert str(refused.value).startswith(message)


def test_it_says_in_the_documentation_what_it_takes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    assert all(f"`{option}`" in page for option in ("patterns", "action", "where"))
