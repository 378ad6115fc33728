"""Request fields and malformed responses of each backend kind, for the contract tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from tests.fakes import inject_at
from unisono.errors import BackendError, BackendProtocolError, BackendUnavailable
from unisono_adapters._failures import IdsMissing

Broken = Mapping[str, tuple[Any, type[Exception]]]

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
NEUTRAL = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Dialect:
    """Protocol of a backend kind, as far as the contract tests need it.

    `spellings` maps our field names to those of the kind. `neutral` contains its values for a disabled sampler, if they
    differ. `options` is the request field that contains the sampling parameters. `broken` contains malformed events and
    the expected errors.
    """

    content_type: str
    frame: Callable[[bytes], bytes]
    # Events of a complete answer that consists of one text, or one token id. The first event contains it unescaped.
    ending: Callable[[str, int], list[bytes]]
    broken: Broken
    spellings: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, object] = field(default_factory=dict)
    options: str | None = None
    bias: Callable[[int, float], object] | None = lambda token, bias: {str(token): bias}
    # Fields of every request.
    required: Mapping[str, object] = field(default_factory=lambda: {"stream": True})
    # Bytes that are not an event.
    no_event: bytes = b": keepalive\n\n"

    def event(self, document: object) -> bytes:
        return self.frame(orjson.dumps(document))

    def value(self, body: dict[str, Any], name: str) -> Any:
        """Return the value of our field `name` in a request body; raise KeyError if it is missing."""
        return (body[self.options] if self.options else body)[self.spellings.get(name, name)]

    def off_value(self, name: str) -> object:
        return self.neutral.get(name, NEUTRAL[name])


def _data(document: bytes) -> bytes:
    return b"data: " + document + b"\n\n"


def _line(document: bytes) -> bytes:
    return document + b"\n"


def _choice(**choice: Any) -> bytes:
    return _data(orjson.dumps({"choices": [{"index": 0, "text": "", "token_ids": [], **choice}]}))


def _completion_ending(text: str, token: int) -> list[bytes]:
    return [_choice(text=text, token_ids=[token], finish_reason="stop"), b"data: [DONE]\n\n"]


COMPLETIONS: Broken = {
    "[DONE] without a finish reason": (inject_at(2, b"data: [DONE]\n\n"), BackendProtocolError),
    "no choices": (inject_at(2, b'data: {"hello": 1}\n\n'), BackendProtocolError),
    "choices of the wrong type": (inject_at(2, b'data: {"choices": {"0": 1}}\n\n'), BackendProtocolError),
    "choice of the wrong type": (inject_at(2, b'data: {"choices": [7]}\n\n'), BackendProtocolError),
    "unknown finish reason": (inject_at(2, _choice(finish_reason="bored")), BackendProtocolError),
    "finish reason of the wrong type": (inject_at(2, _choice(finish_reason=3)), BackendProtocolError),
    "aborted": (inject_at(2, _choice(finish_reason="abort")), BackendUnavailable),
    "failed": (inject_at(2, _choice(finish_reason="error")), BackendError),
    "10 MB event": (inject_at(2, (b"data: " + b"x" * 2**20 + b"\n") * 11), BackendProtocolError),
}

VLLM = Dialect(
    "text/event-stream",
    _data,
    _completion_ending,
    COMPLETIONS,
    required={"stream": True, "stream_options": {"include_usage": True}},
)
MLX = replace(VLLM, neutral={"repetition_penalty": 0.0})
SGLANG = Dialect(
    "text/event-stream", _data, _completion_ending, COMPLETIONS, neutral={"top_k": -1}, required=VLLM.required
)


def _llama(**fields: Any) -> bytes:
    return _data(orjson.dumps({"content": "", "tokens": [], "stop": False, **fields}))


LLAMACPP = Dialect(
    "text/event-stream",
    _data,
    lambda text, token: [_llama(content=text, tokens=[token]), _llama(stop=True, stop_type="eos")],
    {
        "[DONE] of another protocol": (inject_at(2, b"data: [DONE]\n\n"), BackendProtocolError),
        "no content": (inject_at(2, b'data: {"hello": 1}\n\n'), BackendProtocolError),
        "content of the wrong type": (inject_at(2, _llama(content=7)), BackendProtocolError),
        "tokens of the wrong type": (inject_at(2, _llama(tokens="7")), BackendProtocolError),
        "text without ids": (inject_at(2, _llama(content="x", tokens=None)), IdsMissing),
        "negative id": (inject_at(2, _llama(content="x", tokens=[-1])), BackendProtocolError),
        "stop without a reason": (inject_at(2, _llama(stop=True)), BackendProtocolError),
        "unknown reason": (inject_at(2, _llama(stop=True, stop_type="none")), BackendProtocolError),
        "reason of the wrong type": (inject_at(2, _llama(stop=True, stop_type=3)), BackendProtocolError),
    },
    {"repetition_penalty": "repeat_penalty", "max_tokens": "n_predict"},
    bias=lambda token, bias: [[token, bias]],
    required={"stream": True, "return_tokens": True, "cache_prompt": True},
)


def _ollama(**fields: Any) -> bytes:
    return _line(orjson.dumps({"model": "tiny", "response": "", "done": False, **fields}))


OLLAMA_BROKEN: Broken = {
    "server-sent event": (inject_at(2, b'data: {"response": ""}\n\n'), BackendProtocolError),
    "no response": (inject_at(2, b'{"hello": 1}\n'), BackendProtocolError),
    "response of the wrong type": (inject_at(2, _ollama(response=7)), BackendProtocolError),
    "done without a reason": (inject_at(2, _ollama(done=True, context=[])), BackendProtocolError),
    "unknown reason": (inject_at(2, _ollama(done=True, done_reason="bored", context=[])), BackendProtocolError),
    "reason of the wrong type": (inject_at(2, _ollama(done=True, done_reason=3, context=[])), BackendProtocolError),
    "error with a status": (inject_at(2, b'{"error": "boom", "status": 500}\n'), BackendError),
}
OLLAMA_SPELLINGS: dict[str, str] = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}

OLLAMA_RAW = Dialect(
    "application/x-ndjson",
    _line,
    lambda text, token: [_ollama(response=text), _ollama(done=True, done_reason="stop")],
    {
        **OLLAMA_BROKEN,
        "load only": (inject_at(2, _ollama(done=True, done_reason="load")), BackendError),
        "unloaded": (inject_at(2, _ollama(done=True, done_reason="unload")), BackendError),
    },
    OLLAMA_SPELLINGS,
    options="options",
    bias=None,
    required={"stream": True, "raw": True, "truncate": False, "shift": False},
    no_event=b"\n" * 20,
)


def template_dialect(context: Callable[[str], list[int]]) -> Dialect:
    """Dialect of Ollama's template route.

    `context` returns the ids of the prompt followed by a text.
    """
    last = {"done": True, "done_reason": "stop"}
    return Dialect(
        "application/x-ndjson",
        _line,
        lambda text, token: [_ollama(thinking=text), _ollama(**last, context=context(text))],
        {
            **OLLAMA_BROKEN,
            "no context": (inject_at(2, _ollama(**last)), IdsMissing),
            "context of the wrong type": (inject_at(2, _ollama(**last, context="1")), BackendProtocolError),
            "context of another prompt": (inject_at(2, _ollama(**last, context=[13225])), BackendProtocolError),
            "context without markers": (
                inject_at(2, _ollama(**last, context=[token for token in context("x") if token < 199998])),
                BackendProtocolError,
            ),
        },
        OLLAMA_SPELLINGS,
        options="options",
        bias=None,
        required={"stream": True, "template": "{{ .Prompt }}", "truncate": False, "shift": False},
        no_event=b"\n" * 20,
    )
