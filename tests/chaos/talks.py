"""What is asked and what the model says to it, all of it drawn from a seed: whoever knows the name of a talk, the rig
or a backend in another process, knows every token of it."""

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
BYTES = {ENCODING.decode_bytes([token]): token for token in range(256)}
"""The token of every single byte."""

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
IDS_ONLY_TOPICS = ("literals", "bytes", "cut")
"""What only ids carry to another backend unchanged."""


@dataclass(frozen=True)
class Message:
    """One message of the model's: its header behind `<|start|>assistant`, its body, and the marker that ends it."""

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
    """Channel and recipient."""
    channel, to = re.search(r"<\|channel\|>(\w+)", header), re.search(r" to=([\w.]+)", header)
    return (channel[1] if channel else "", to[1] if to else "")


@dataclass(frozen=True)
class Talk:
    """`run` tells an undisturbed run of a talk (`c`) from a disturbed one (`x`)."""

    topic: str
    seed: int
    number: int
    run: str
    stages: tuple[tuple[Message, ...], ...] = field(default=(), compare=False)
    """What the model says: at the beginning, and behind each result of a tool."""

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
        """Of the client's own tools."""
        spoken = [one for stage in self.stages for one in stage if one.key[1].startswith("functions.")]
        return [(one.key[1].removeprefix("functions."), one.text) for one in spoken if "docs__" not in one.key[1]]

    @property
    def note(self) -> str:
        """What its hosted tool is told, which it writes down."""
        return f"noted-{self.seed}-{self.number}-{self.run}"

    @property
    def tokens(self) -> int:
        """How long the script is, for placing faults."""
        return sum(len(one.body) + 6 for stage in self.stages for one in stage)

    @property
    def max_tokens(self) -> int | None:
        return max(self.tokens // 2, 12) if self.topic == "cut" else None

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        """In the shape of the Responses API."""
        names = ("look", "count") if self.topic in CALLING else ()
        return [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in names]


@cache
def talk(topic: str, seed: int, number: int, run: str) -> Talk:
    """The talk of a name."""
    drawn = Random(f"{topic} {seed} {number}")
    bare = Talk(topic, seed, number, run)
    thought = Message("<|channel|>analysis<|message|>", _body(drawn, topic, 3 if topic == "short" else 14), "<|end|>")
    said = Message("<|channel|>final<|message|>", _body(drawn, topic, 4 if topic == "short" else 24), "<|return|>")
    if topic == "schema":
        body = ENCODING.encode_text(json.dumps({"city": _text(drawn, topic, 8), "days": drawn.choices(range(99), k=6)}))
        said = Message("<|channel|>final<|message|>", tuple(body), "<|return|>")
    if topic == "hosted":
        first = (thought, _call("docs__echo", {"text": bare.note}))
        second = Message("<|channel|>analysis<|message|>", _body(drawn, topic, 6), "<|end|>")
        return _with(bare, (first, (second, said)))
    if topic in CALLING:
        arguments = {"at": _text(drawn, "wonders", 12), "n": drawn.randrange(1000), "deep": {"of": [1, None, True]}}
        return _with(bare, ((thought, _call("look", arguments)),))
    return _with(bare, ((thought, said),))


def talk_in(prompt: str) -> Talk | None:
    """The last one that a prompt names."""
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
    # As no tokenizer would cut it: single bytes here and there, in the middle of characters too.
    pieces: list[int] = []
    for token in tokens:
        one = ENCODING.decode_bytes([token])
        pieces += [BYTES[one[at : at + 1]] for at in range(len(one))] if drawn.random() < 0.3 else [token]
    return tuple(pieces)


def _text(drawn: Random, topic: str, words: int) -> str:
    said = drawn.choices(WORDS, k=words)
    for kind, more in (("wonders", WONDERS), ("bytes", WONDERS), ("cut", WONDERS), ("literals", LITERALS)):
        if topic == kind:
            for _ in range(max(words // 3, 1)):
                said.insert(drawn.randrange(1, len(said)), drawn.choice(more))
    return " ".join(said)
