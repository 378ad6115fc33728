"""The wires a contender may speak: how a request is worded, and which reader its answer needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import orjson

from bench import vllm_wire
from bench.http_client import message
from bench.material import Material
from bench.readers import (
    ChatReader,
    MessagesReader,
    Reader,
    ResponseReader,
    ResponsesReader,
    VllmReader,
    WholeReader,
)

NORMAL_PROMPT = 40
"""Words of an ordinary question; the chat wire adds the instructions below."""
TURN_WORDS = 250
"""Words of each message of a longer conversation."""
INSTRUCTIONS = (
    "You are the assistant of a harbour office. Answer plainly, keep to what you know, name the source of every "
    "figure, and when a question has more than one reading, say which one you took."
)


@dataclass(frozen=True, slots=True)
class Question:
    """What a client asks: `words` new words drawn by `seed`, after a conversation of `history` words drawn by
    `history_seed`."""

    seed: int
    words: int = NORMAL_PROMPT
    history: int = 0
    history_seed: int = 0
    more: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the request's body, whatever wire they belong to."""


def _vllm_body(stuff: Material, question: Question) -> dict[str, object]:
    past, _ = stuff.prompt(question.history, question.history_seed)
    prompt, _ = stuff.prompt(question.words, question.seed)
    return {
        "model": vllm_wire.MODEL,
        "prompt": past + prompt,
        "stop_token_ids": [200002, 200012],
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def _chat_body(stuff: Material, question: Question) -> dict[str, object]:
    messages = [{"role": "system", "content": INSTRUCTIONS}]
    for turn in range(question.history // (2 * TURN_WORDS)):
        for role in ("user", "assistant"):
            seed = hash((question.history_seed, turn, role == "user"))
            messages.append({"role": role, "content": stuff.prompt(TURN_WORDS, seed)[1]})
    messages.append({"role": "user", "content": stuff.prompt(question.words, question.seed)[1]})
    return {"model": vllm_wire.MODEL, "messages": messages}


def _responses_body(stuff: Material, question: Question) -> dict[str, object]:
    chat = _chat_body(stuff, question)
    messages = chat.pop("messages")
    assert isinstance(messages, list)
    return {**chat, "instructions": messages[0]["content"], "input": messages[1:]}


def _messages_body(stuff: Material, question: Question) -> dict[str, object]:
    chat = _chat_body(stuff, question)
    messages = chat.pop("messages")
    assert isinstance(messages, list)
    thinking = {"type": "adaptive", "display": "summarized"}
    return {**chat, "system": messages[0]["content"], "messages": messages[1:], "thinking": thinking}


@dataclass(frozen=True, slots=True)
class Wire:
    """`limit` names the field for the most tokens of an answer, `streamed` are those of a request for a stream."""

    path: str
    to_body: Callable[[Material, Question], dict[str, object]]
    streams: Callable[[], Reader]
    whole: Callable[[], Reader] = WholeReader
    limit: str = "max_tokens"
    streamed: Mapping[str, object] = field(
        default_factory=lambda: {"stream": True, "stream_options": {"include_usage": True}}
    )


_RESPONSES = Wire(
    "/v1/responses", _responses_body, ResponsesReader, ResponseReader, "max_output_tokens", {"stream": True}
)
WIRES: dict[str, Wire] = {
    "vllm": Wire("/v1/completions", _vllm_body, VllmReader),
    "chat": Wire("/v1/chat/completions", _chat_body, ChatReader),
    "messages": Wire("/v1/messages", _messages_body, MessagesReader, streamed={"stream": True}),
    "responses": _RESPONSES,
    "responses, not kept": replace(
        _RESPONSES, to_body=lambda stuff, question: {**_responses_body(stuff, question), "store": False}
    ),
}


def request(wire: str, stuff: Material, question: Question, *, tokens: int, stream: bool, key: str = "") -> bytes:
    """One request for an answer of `tokens` tokens, as bytes, with `key` for those who ask for one."""
    spoken = WIRES[wire]
    body = {**spoken.to_body(stuff, question), spoken.limit: tokens, "temperature": 1.0, **question.more}
    if stream:
        body |= spoken.streamed
    return message(spoken.path, orjson.dumps(body), key=key)


def reader(wire: str, *, stream: bool) -> Reader:
    return WIRES[wire].streams() if stream else WIRES[wire].whole()
