"""Recordings on a terminal: tokens as text that steers nothing, and every repair at its place."""

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
BEGAN = GenerationStarted(
    "req_1", "ann", "", "chat", "gpt-oss", background=False, at=1_790_000_000.0, recorded_request={}
)

TEXTS: dict[str, tuple[Sequence[int | None], str]] = {
    "markers": (ENCODING.encode_marked("<|start|>user<|message|>Hi<|end|>"), "<|start|>user<|message|>Hi<|end|>\n"),
    "text that spells one": (ENCODING.encode_text("a <|call|> b"), "a \\<|call|> b"),
    "what steers a terminal": (ENCODING.encode_text("\x1b]0;x\x07\r\x9b2J\u202e"), "\\x1b]0;x\\x07\\r\\x9b2J\\u202e"),
    "half a character": (ENCODING.encode_text("🦜")[:1], "\ufffd"),
    "what is left out": (
        [*ENCODING.encode_text("a"), None, None, *ENCODING.encode_text("b")],
        "a[2 tokens omitted]b",
    ),
    "no tokens": ([-1, 201_088, 2**40], "<|no token -1|><|no token 201088|><|no token 1099511627776|>"),
    "a reserved one": ([200_013], "<|reserved_200013|>"),
}


@pytest.mark.parametrize(("tokens", "shown"), TEXTS.values(), ids=TEXTS)
def test_tokens_are_shown_as_text_that_steers_nothing(tokens: Sequence[int | None], shown: str) -> None:
    assert click.unstyle(Painter(ENCODING).paint(tokens)) == shown


def test_each_channel_has_a_colour_of_its_own() -> None:
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


def lines(journal: Sequence[int], repairs: Sequence[Repaired] = (), steps: Sequence[StepDone] = ()) -> str:
    done = GenerationDone(
        BEGAN, 1.0, GenerationOutcome.COMPLETED, finish="stop", journal=journal, output=repairs, steps=steps
    )
    document: Any = json.loads(dumped(to_document(done, "test", 1 << 20)))
    return click.unstyle("\n".join(painted(document, ENCODING)))


def test_repairs_stand_where_they_were_decided_and_steps_behind_each_other() -> None:
    first, second = ENCODING.encode_text("one two three"), ENCODING.encode_text("four five")
    journal = [TokenSource(guessed=True).mark, *first, STEP_ENDED, *JournalEntry({"left": 0}).numbers(), *second]
    repairs = [Repaired("missing-end", 2), Repaired("made-up\x1b", 4, dropped=3), Repaired("no-markup", 5)]
    shown = lines(journal, repairs)
    order = [
        "--- step 0 -",
        "tokens derived from text",
        "one two",
        "^ missing-end: A message began inside another; the first was closed.",
        " three",
        "--- step 1 -",
        "is generated again",
        "four",
        "^ made-up\\x1b: Unknown rule in this version of the gateway. 3 characters were dropped.",
        " five",
        "^ no-markup",
    ]
    places = [shown.index(piece) for piece in order]
    assert places == sorted(places)


NOTES: dict[str, tuple[dict[str, Any], str]] = {
    "a move": (
        {"moved": ENCODING.encode_marked("<|start|>"), "kept": 4},
        "after 4 tokens of this step with:]\n<|start|>",
    ),
    "a result": ({"ran": "call_1", "text": "42 \x1b\n!"}, "[result of call_1: 42 \\x1b\\n!]"),
    "a long one": ({"ran": "call_1", "text": "x" * 5_000}, "xxx…]"),
    "one that nobody knows": ({"new": ["\x1b"]}, '{"new":["\\u001b"]}'),
    "a move that is none": ({"moved": "x"}, '{"moved":"x"}'),
}


@pytest.mark.parametrize(("value", "shown"), NOTES.values(), ids=NOTES)
def test_what_the_gateway_did_itself_is_told(value: dict[str, Any], shown: str) -> None:
    assert shown in lines(JournalEntry(value).numbers())


def test_a_later_prompt_is_shown_from_where_it_differs() -> None:
    prompt = ENCODING.encode_marked("<|start|>user<|message|>Hi<|end|>")
    more = [*prompt, *ENCODING.encode_text("and so on")]
    steps = [
        StepDone(0, "a", 0.0, 0.1, 0.2, len(prompt), 3, 1, failure="backend_error", prompt=prompt),
        StepDone(1, "b", 0.2, None, 0.4, len(more), None, 0, "stop", prompt=more),
    ]
    shown = lines([*ENCODING.encode_text("x"), STEP_ENDED], steps=steps)
    assert shown.count("Hi") == 1
    assert f"prompt, after {len(prompt)} tokens of the previous prompt:\nand so on" in shown
    assert f"a: {len(prompt)} tokens (3 cached), 1 generated" in shown
    assert "no token" in shown
