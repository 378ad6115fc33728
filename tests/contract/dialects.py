"""How each backend kind spells what the contract is about: what it is asked, and what breaks in its answers."""

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
    """`spellings` are the names this kind has for ours; `neutral` its words for a sampler that is off, where they
    differ; `options` where in the body sampling stands. `broken` are events it must not believe."""

    content_type: str
    frame: Callable[[bytes], bytes]
    ending: Callable[[str, int], list[bytes]]
    """Events of a whole answer of one text, or one id: it stands in the first of them, not escaped."""
    broken: Broken
    spellings: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, object] = field(default_factory=dict)
    options: str | None = None
    bias: Callable[[int, float], object] | None = lambda token, bias: {str(token): bias}
    whole: Mapping[str, object] = field(default_factory=lambda: {"stream": True})
    """What every request holds."""
    nothing: bytes = b": keepalive\n\n"
    """Bytes that are no event."""

    def event(self, document: object) -> bytes:
        return self.frame(orjson.dumps(document))

    def asked(self, body: dict[str, Any], name: str) -> Any:
        """What a request asks under our name for it; raises KeyError where it does not."""
        return (body[self.options] if self.options else body)[self.spellings.get(name, name)]

    def off(self, name: str) -> object:
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
    "done without a finish": (inject_at(2, b"data: [DONE]\n\n"), BackendProtocolError),
    "no choices": (inject_at(2, b'data: {"hello": 1}\n\n'), BackendProtocolError),
    "choices of another type": (inject_at(2, b'data: {"choices": {"0": 1}}\n\n'), BackendProtocolError),
    "a choice of another type": (inject_at(2, b'data: {"choices": [7]}\n\n'), BackendProtocolError),
    "an unknown finish": (inject_at(2, _choice(finish_reason="bored")), BackendProtocolError),
    "a finish of another type": (inject_at(2, _choice(finish_reason=3)), BackendProtocolError),
    "aborted": (inject_at(2, _choice(finish_reason="abort")), BackendUnavailable),
    "failed": (inject_at(2, _choice(finish_reason="error")), BackendError),
    "an event of 10 MB": (inject_at(2, (b"data: " + b"x" * 2**20 + b"\n") * 11), BackendProtocolError),
}

VLLM = Dialect(
    "text/event-stream",
    _data,
    _completion_ending,
    COMPLETIONS,
    whole={"stream": True, "stream_options": {"include_usage": True}},
)
MLX = replace(VLLM, neutral={"repetition_penalty": 0.0})
SGLANG = Dialect("text/event-stream", _data, _completion_ending, COMPLETIONS, neutral={"top_k": -1}, whole=VLLM.whole)


def _llama(**fields: Any) -> bytes:
    return _data(orjson.dumps({"content": "", "tokens": [], "stop": False, **fields}))


LLAMACPP = Dialect(
    "text/event-stream",
    _data,
    lambda text, token: [_llama(content=text, tokens=[token]), _llama(stop=True, stop_type="eos")],
    {
        "done of another dialect": (inject_at(2, b"data: [DONE]\n\n"), BackendProtocolError),
        "no content": (inject_at(2, b'data: {"hello": 1}\n\n'), BackendProtocolError),
        "content of another type": (inject_at(2, _llama(content=7)), BackendProtocolError),
        "tokens of another type": (inject_at(2, _llama(tokens="7")), BackendProtocolError),
        "text without ids": (inject_at(2, _llama(content="x", tokens=None)), IdsMissing),
        "an id beyond the vocabulary": (inject_at(2, _llama(content="x", tokens=[201088])), BackendProtocolError),
        "an end without a reason": (inject_at(2, _llama(stop=True)), BackendProtocolError),
        "an unknown reason": (inject_at(2, _llama(stop=True, stop_type="none")), BackendProtocolError),
        "a reason of another type": (inject_at(2, _llama(stop=True, stop_type=3)), BackendProtocolError),
    },
    {"repetition_penalty": "repeat_penalty", "max_tokens": "n_predict"},
    bias=lambda token, bias: [[token, bias]],
    whole={"stream": True, "return_tokens": True, "cache_prompt": True},
)


def _ollama(**fields: Any) -> bytes:
    return _line(orjson.dumps({"model": "tiny", "response": "", "done": False, **fields}))


OLLAMA_BROKEN: Broken = {
    "an event stream": (inject_at(2, b'data: {"response": ""}\n\n'), BackendProtocolError),
    "no response": (inject_at(2, b'{"hello": 1}\n'), BackendProtocolError),
    "a response of another type": (inject_at(2, _ollama(response=7)), BackendProtocolError),
    "done without a reason": (inject_at(2, _ollama(done=True, context=[])), BackendProtocolError),
    "an unknown reason": (inject_at(2, _ollama(done=True, done_reason="bored", context=[])), BackendProtocolError),
    "a reason of another type": (inject_at(2, _ollama(done=True, done_reason=3, context=[])), BackendProtocolError),
    "an error with its status": (inject_at(2, b'{"error": "boom", "status": 500}\n'), BackendError),
}
OLLAMA_WORDS: dict[str, str] = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}

OLLAMA_RAW = Dialect(
    "application/x-ndjson",
    _line,
    lambda text, token: [_ollama(response=text), _ollama(done=True, done_reason="stop")],
    {
        **OLLAMA_BROKEN,
        "loaded and nothing more": (inject_at(2, _ollama(done=True, done_reason="load")), BackendError),
        "unloaded": (inject_at(2, _ollama(done=True, done_reason="unload")), BackendError),
    },
    OLLAMA_WORDS,
    options="options",
    bias=None,
    whole={"stream": True, "raw": True, "truncate": False, "shift": False},
    nothing=b"\n" * 20,
)


def template_dialect(context: Callable[[str], list[int]]) -> Dialect:
    """`context` are the ids of the prompt and a text behind it."""
    last = {"done": True, "done_reason": "stop"}
    return Dialect(
        "application/x-ndjson",
        _line,
        lambda text, token: [_ollama(thinking=text), _ollama(**last, context=context(text))],
        {
            **OLLAMA_BROKEN,
            "no context": (inject_at(2, _ollama(**last)), IdsMissing),
            "a context of another type": (inject_at(2, _ollama(**last, context="1")), BackendProtocolError),
            "another prompt's context": (inject_at(2, _ollama(**last, context=[13225])), BackendProtocolError),
            "a prompt's context without its markers": (
                inject_at(2, _ollama(**last, context=[token for token in context("x") if token < 199998])),
                BackendProtocolError,
            ),
        },
        OLLAMA_WORDS,
        options="options",
        bias=None,
        whole={"stream": True, "template": "{{ .Prompt }}", "truncate": False, "shift": False},
        nothing=b"\n" * 20,
    )
