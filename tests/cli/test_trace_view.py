"""Recordings in a terminal: tokens as escaped text, and repairs at their positions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
import pytest

from unisono.cli.trace_view import Painter, painted
from unisono.core.events import Repaired
from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted, StepDone
from unisono.engine.journal import STEP_ENDED, JournalEntry, TokenSource
from unisono.harmony.encoding import load_encoding
from unisono.observe.recording import dumped, to_document

ENCODING = load_encoding()
STARTED = GenerationStarted(
    "req_1", "ann", "", "chat", "gpt-oss", background=False, at=1_790_000_000.0, recorded_request={}
)

TEXTS: dict[str, tuple[Sequence[int | None], str]] = {
    "markers": (ENCODING.encode_marked("<|start|>user<|message|>Hi<|end|>"), "<|start|>user<|message|>Hi<|end|>\n"),
    "text that spells a marker": (ENCODING.encode_text("a <|call|> b"), "a \\<|call|> b"),
    "terminal escapes": (ENCODING.encode_text("\x1b]0;x\x07\r\x9b2J\u202e"), "\\x1b]0;x\\x07\\r\\x9b2J\\u202e"),
    "half a character": (ENCODING.encode_text("🦜")[:1], "\ufffd"),
    "omitted tokens": (
        [*ENCODING.encode_text("a"), None, None, *ENCODING.encode_text("b")],
        "a[2 tokens omitted]b",
    ),
    "invalid token ids": ([-1, 201_088, 2**40], "<|no token -1|><|no token 201088|><|no token 1099511627776|>"),
    "reserved token": ([200_013], "<|reserved_200013|>"),
}


@pytest.mark.parametrize(("tokens", "expected"), TEXTS.values(), ids=TEXTS)
def test_tokens_are_shown_as_escaped_text(tokens: Sequence[int | None], expected: str) -> None:
    assert click.unstyle(Painter(ENCODING).paint(tokens)) == expected


def test_each_channel_has_its_own_colour() -> None:
    headers = (
        "<|channel|>analysis",
        "<|channel|>commentary",
        "<|channel|>final",
        "<|channel|>commentary to=functions.f",
    )
    painter = Painter(ENCODING)
    bodies = [painter.paint(ENCODING.encode_marked(f"{header}<|message|>x<|end|>")) for header in headers]
    colours = [body.partition("<|message|>")[2].partition("x")[0] for body in bodies]
    assert len(set(colours)) == len(headers)


def rendered(journal: Sequence[int], repairs: Sequence[Repaired] = (), steps: Sequence[StepDone] = ()) -> str:
    done = GenerationDone(
        STARTED, 1.0, GenerationOutcome.COMPLETED, finish="stop", journal=journal, output=repairs, steps=steps
    )
    document: Any = json.loads(dumped(to_document(done, "test", 1 << 20)))
    return click.unstyle("\n".join(painted(document, ENCODING)))


def test_repairs_are_shown_at_their_positions_and_steps_in_order() -> None:
    first, second = ENCODING.encode_text("one two three"), ENCODING.encode_text("four five")
    journal = [TokenSource(guessed=True).mark, *first, STEP_ENDED, *JournalEntry({"left": 0}).numbers(), *second]
    repairs = [Repaired("missing-end", 2), Repaired("made-up\x1b", 4, dropped=3), Repaired("no-markup", 5)]
    output = rendered(journal, repairs)
    expected = [
        "--- step 0 -",
        "tokens derived from text",
        "one two",
        "^ missing-end: A message began before the previous message ended; the previous message was closed.",
        " three",
        "--- step 1 -",
        "is generated again",
        "four",
        "^ made-up\\x1b: Unknown rule in this version of the gateway. 3 characters were dropped.",
        " five",
        "^ no-markup",
    ]
    positions = [output.index(piece) for piece in expected]
    assert positions == sorted(positions)


JOURNAL_ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "prompt edit": (
        {"moved": ENCODING.encode_marked("<|start|>"), "kept": 4},
        "after 4 tokens of this step with:]\n<|start|>",
    ),
    "tool result": ({"ran": "call_1", "text": "42 \x1b\n!"}, "[result of call_1: 42 \\x1b\\n!]"),
    "long tool result": ({"ran": "call_1", "text": "x" * 5_000}, "xxx…]"),
    "unknown entry": ({"new": ["\x1b"]}, '{"new":["\\u001b"]}'),
    "invalid prompt edit": ({"moved": "x"}, '{"moved":"x"}'),
}


@pytest.mark.parametrize(("value", "expected"), JOURNAL_ENTRIES.values(), ids=JOURNAL_ENTRIES)
def test_actions_of_the_gateway_are_shown(value: dict[str, Any], expected: str) -> None:
    assert expected in rendered(JournalEntry(value).numbers())


def test_a_later_prompt_is_shown_from_its_first_difference() -> None:
    prompt = ENCODING.encode_marked("<|start|>user<|message|>Hi<|end|>")
    longer_prompt = [*prompt, *ENCODING.encode_text("and so on")]
    steps = [
        StepDone(0, "a", 0.0, 0.1, 0.2, len(prompt), 3, 1, failure="backend_error", prompt=prompt),
        StepDone(1, "b", 0.2, None, 0.4, len(longer_prompt), None, 0, "stop", prompt=longer_prompt),
    ]
    output = rendered([*ENCODING.encode_text("x"), STEP_ENDED], steps=steps)
    assert output.count("Hi") == 1
    assert f"prompt, after {len(prompt)} tokens of the previous prompt:\nand so on" in output
    assert f"a: {len(prompt)} tokens (3 cached), 1 generated" in output
    assert "no token" in output
