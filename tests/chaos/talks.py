"""Requests and scripted model output, derived from a seed.

The name of a talk determines every token of it, also for a backend in another process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
# Token of every single byte.
BYTES = {ENCODING.decode_bytes([token]): token for token in range(256)}

NAME = re.compile(r"#(\w+)-(\d+)-(\d+)-([a-z])")
WORDS = [
    "the",
    "sky",
    "over",
    "a",
    "river",
    "was",
    "grey",
    "and",
    "nobody",
    "in",
    "town",
    "had",
    "seen",
    "such",
    "rain",
    "before",
    "it",
    "came",
    "down",
    "from",
    "north",
    "hills",
]
WONDERS = (
    "🌧️",
    "👩‍👩‍👧‍👦",
    "日本語の文",
    "naïve",
    "e\u0301",
    "Ω≈ç√",
    "🏳️‍🌈",
    "\u00a0",
    "данные",
    "\n\n- ",
    "\t",
    "🇩🇪",
    '"',
    "\\n",
)
LITERALS = ("<|end|>", "<|start|>assistant", "<|message|>", "<|call|>", "<|channel|>analysis")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
    "required": ["city", "days"],
    "additionalProperties": False,
}

CALLING = ("call", "named", "required")
TOPICS = ("plain", "wonders", *CALLING, "schema", "hosted", "follows", "short")
# Topics that only token ids carry to another backend unchanged.
IDS_ONLY_TOPICS = ("literals", "bytes", "cut")


@dataclass(frozen=True)
class Message:
    """One message of the model: header after `<|start|>assistant`, body and end marker."""

    header: str
    body: tuple[int, ...]
    stop: str

    @property
    def key(self) -> tuple[str, str]:
        return key_of(self.header)

    @property
    def text(self) -> str:
        return ENCODING.decode(self.body)


def key_of(header: str) -> tuple[str, str]:
    """Return the channel and the recipient."""
    channel, to = re.search(r"<\|channel\|>(\w+)", header), re.search(r" to=([\w.]+)", header)
    return (channel[1] if channel else "", to[1] if to else "")


@dataclass(frozen=True)
class Talk:
    """One scripted conversation.

    `run` is `c` for an undisturbed run and `x` for a disturbed run.
    """

    topic: str
    seed: int
    number: int
    run: str
    # Messages of the model: the first ones, and those after each tool result.
    stages: tuple[tuple[Message, ...], ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        return f"#{self.topic}-{self.seed}-{self.number}-{self.run}"

    @property
    def reasoning(self) -> str:
        return "".join(one.text for stage in self.stages for one in stage if one.key[0] == "analysis")

    @property
    def text(self) -> str:
        return "".join(one.text for stage in self.stages for one in stage if one.key[0] == "final")

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Calls of the client's own tools."""
        messages = [one for stage in self.stages for one in stage if one.key[1].startswith("functions.")]
        return [(one.key[1].removeprefix("functions."), one.text) for one in messages if "docs__" not in one.key[1]]

    @property
    def note(self) -> str:
        """Text that its server tool receives and records."""
        return f"noted-{self.seed}-{self.number}-{self.run}"

    @property
    def tokens(self) -> int:
        """Approximate length of the script in tokens, for placing faults."""
        return sum(len(one.body) + 6 for stage in self.stages for one in stage)

    @property
    def max_tokens(self) -> int | None:
        return max(self.tokens // 2, 12) if self.topic == "cut" else None

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        """Tools in the format of the Responses API."""
        names = ("look", "count") if self.topic in CALLING else ()
        return [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in names]


@cache
def talk(topic: str, seed: int, number: int, run: str) -> Talk:
    """Return the talk of a name."""
    drawn = Random(f"{topic} {seed} {number}")
    bare = Talk(topic, seed, number, run)
    reasoning = Message("<|channel|>analysis<|message|>", _body(drawn, topic, 3 if topic == "short" else 14), "<|end|>")
    answer = Message("<|channel|>final<|message|>", _body(drawn, topic, 4 if topic == "short" else 24), "<|return|>")
    if topic == "schema":
        body = ENCODING.encode_text(json.dumps({"city": _text(drawn, topic, 8), "days": drawn.choices(range(99), k=6)}))
        answer = Message("<|channel|>final<|message|>", tuple(body), "<|return|>")
    if topic == "hosted":
        first = (reasoning, _call("docs__echo", {"text": bare.note}))
        second = Message("<|channel|>analysis<|message|>", _body(drawn, topic, 6), "<|end|>")
        return _with(bare, (first, (second, answer)))
    if topic in CALLING:
        arguments = {"at": _text(drawn, "wonders", 12), "n": drawn.randrange(1000), "deep": {"of": [1, None, True]}}
        return _with(bare, ((reasoning, _call("look", arguments)),))
    return _with(bare, ((reasoning, answer),))


def talk_in(prompt: str) -> Talk | None:
    """Return the talk that a prompt names last, or None."""
    named = NAME.findall(prompt)
    if not named:
        return None
    topic, seed, number, run = named[-1]
    return talk(topic, int(seed), int(number), run)


def _with(bare: Talk, stages: tuple[tuple[Message, ...], ...]) -> Talk:
    return Talk(bare.topic, bare.seed, bare.number, bare.run, stages)


def _call(name: str, arguments: Mapping[str, Any]) -> Message:
    body = ENCODING.encode_text(json.dumps(arguments, ensure_ascii=False, separators=(",", ":")))
    return Message(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", tuple(body), "<|call|>")


def _body(drawn: Random, topic: str, words: int) -> tuple[int, ...]:
    tokens = ENCODING.encode_text(_text(drawn, topic, words))
    if topic not in ("bytes", "cut"):
        return tuple(tokens)
    # Unlike a tokenizer, spell some tokens as single bytes, also inside of characters.
    pieces: list[int] = []
    for token in tokens:
        one = ENCODING.decode_bytes([token])
        pieces += [BYTES[one[at : at + 1]] for at in range(len(one))] if drawn.random() < 0.3 else [token]
    return tuple(pieces)


def _text(drawn: Random, topic: str, words: int) -> str:
    chosen = drawn.choices(WORDS, k=words)
    for kind, more in (("wonders", WONDERS), ("bytes", WONDERS), ("cut", WONDERS), ("literals", LITERALS)):
        if topic == kind:
            for _ in range(max(words // 3, 1)):
                chosen.insert(drawn.randrange(1, len(chosen)), drawn.choice(more))
    return " ".join(chosen)
