"""Wires of the contenders: how to write a request, and which reader its answer needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import orjson

from bench import vllm_wire
from bench.http_client import message
from bench.prose import Corpus
from bench.readers import (
    BodyReader,
    ChatReader,
    MessageStreamReader,
    Reader,
    ResponseBodyReader,
    ResponseStreamReader,
    VllmReader,
)

# Words of a question. The chat wire adds the instructions below.
QUESTION_WORDS = 40
# Words of each message of a longer conversation.
MESSAGE_WORDS = 250
INSTRUCTIONS = (
    "You are the assistant of a harbour office. Answer plainly, keep to what you know, name the source of every "
    "figure, and when a question has more than one reading, say which one you took."
)


@dataclass(frozen=True, slots=True)
class Question:
    """Question of `words` words, selected by `seed`, after a conversation of `history` words.

    `history_seed` selects the conversation.
    """

    seed: int
    words: int = QUESTION_WORDS
    history: int = 0
    history_seed: int = 0
    # Additional fields of the request body, for any wire.
    extra_fields: Mapping[str, object] = field(default_factory=dict)


def _vllm_body(corpus: Corpus, question: Question) -> dict[str, object]:
    history, _ = corpus.prompt(question.history, question.history_seed)
    prompt, _ = corpus.prompt(question.words, question.seed)
    return {
        "model": vllm_wire.MODEL,
        "prompt": history + prompt,
        "stop_token_ids": [200002, 200012],
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def _chat_body(corpus: Corpus, question: Question) -> dict[str, object]:
    messages = [{"role": "system", "content": INSTRUCTIONS}]
    for turn in range(question.history // (2 * MESSAGE_WORDS)):
        for role in ("user", "assistant"):
            seed = hash((question.history_seed, turn, role == "user"))
            messages.append({"role": role, "content": corpus.prompt(MESSAGE_WORDS, seed)[1]})
    messages.append({"role": "user", "content": corpus.prompt(question.words, question.seed)[1]})
    return {"model": vllm_wire.MODEL, "messages": messages}


def _responses_body(corpus: Corpus, question: Question) -> dict[str, object]:
    chat = _chat_body(corpus, question)
    messages = chat.pop("messages")
    assert isinstance(messages, list)
    return {**chat, "instructions": messages[0]["content"], "input": messages[1:]}


def _messages_body(corpus: Corpus, question: Question) -> dict[str, object]:
    chat = _chat_body(corpus, question)
    messages = chat.pop("messages")
    assert isinstance(messages, list)
    thinking = {"type": "adaptive", "display": "summarized"}
    return {**chat, "system": messages[0]["content"], "messages": messages[1:], "thinking": thinking}


@dataclass(frozen=True, slots=True)
class ClientWire:
    """Path, bodies and readers of one API.

    `limit_field` is the field for the maximum length of an answer. `stream_fields` are added to a request for a stream.
    """

    path: str
    to_body: Callable[[Corpus, Question], dict[str, object]]
    stream_reader: Callable[[], Reader]
    whole_reader: Callable[[], Reader] = BodyReader
    limit_field: str = "max_tokens"
    stream_fields: Mapping[str, object] = field(
        default_factory=lambda: {"stream": True, "stream_options": {"include_usage": True}}
    )


_RESPONSES = ClientWire(
    "/v1/responses", _responses_body, ResponseStreamReader, ResponseBodyReader, "max_output_tokens", {"stream": True}
)
WIRES: dict[str, ClientWire] = {
    "vllm": ClientWire("/v1/completions", _vllm_body, VllmReader),
    "chat": ClientWire("/v1/chat/completions", _chat_body, ChatReader),
    "messages": ClientWire("/v1/messages", _messages_body, MessageStreamReader, stream_fields={"stream": True}),
    "responses": _RESPONSES,
    "responses, not stored": replace(
        _RESPONSES, to_body=lambda corpus, question: {**_responses_body(corpus, question), "store": False}
    ),
}


def request(wire: str, corpus: Corpus, question: Question, *, tokens: int, stream: bool, key: str = "") -> bytes:
    """Return the bytes of a request for an answer of `tokens` tokens.

    `key` is the bearer token, if there is one.
    """
    spec = WIRES[wire]
    body = {**spec.to_body(corpus, question), spec.limit_field: tokens, "temperature": 1.0, **question.extra_fields}
    if stream:
        body |= spec.stream_fields
    return message(spec.path, orjson.dumps(body), key=key)


def reader(wire: str, *, stream: bool) -> Reader:
    return WIRES[wire].stream_reader() if stream else WIRES[wire].whole_reader()
