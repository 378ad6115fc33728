"""The OpenAI text-completion stream, as several engines speak it.

It has ended when it has said both why generation ended and `[DONE]`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from unisono.core.generation import ENDOFTEXT, STOP_TOKENS, Chunk, CompletionJob, FinishReason, OutputForm
from unisono.core.symptom import Symptom
from unisono.errors import BackendError, BackendProtocolError, BackendUnavailable
from unisono_adapters._constraints import bias
from unisono_adapters._events import count, decoded, generate, text_of, token_ids
from unisono_adapters._failures import FailureTable, IdsMissing, is_error
from unisono_adapters._http import BackendHttp

FINISHES: dict[str, FinishReason | type[BackendError]] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "repetition": FinishReason.LENGTH,
    "abort": BackendUnavailable,
    "error": BackendError,
}
"""Why generation ended, in the words of vLLM, SGLang and mlx-lm; the last two are failures."""

ECHO = b'"prompt_token_ids":['
"""Where vLLM repeats the prompt's ids, once per answer."""
LONG_EVENT = 4096
"""Bytes from which on an event is looked through for the echo."""


def complete(
    wire: BackendHttp, body: bytes, job: CompletionJob, output: OutputForm, stop_field: str = "stop_reason"
) -> AsyncGenerator[Chunk]:
    """Send `body` to `/v1/completions` and yield what comes back as ids or as text, by `output`. `stop_field` is where
    a choice names the token that ended it."""
    return generate(wire, "v1/completions", body, job, CompletionFold(output, wire.failures, stop_field))


def sampling(job: CompletionJob) -> dict[str, object]:
    """The sampling fields every engine of this family spells alike, each sent every time; seed and bias where set."""
    asked = job.sampling
    fields: dict[str, object] = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "min_p": asked.min_p,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repetition_penalty": asked.repetition_penalty,
    }
    if asked.seed is not None:
        fields["seed"] = asked.seed
    if biased := bias(job):
        fields["logit_bias"] = {str(token): amount for token, amount in biased.items()}
    return fields


class CompletionFold:
    """Events in, chunks out. `done` is set with the chunk that holds the finish."""

    __slots__ = (
        "_cached_tokens", "_failures", "_finish", "_last", "_output", "_prompt_tokens", "_stop_field", "_stop_reason",
        "done",
    )  # fmt: skip

    def __init__(self, output: OutputForm, failures: FailureTable, stop_field: str = "stop_reason") -> None:
        self._output = output
        self._failures = failures
        self._stop_field = stop_field
        self._finish: FinishReason | None = None
        self._stop_reason: int | None = None
        self._last: int | None = None
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self.done = False

    def feed(self, events: list[bytes]) -> Chunk | None:
        """The chunk for the events of one read; None when there is nothing to hand on yet. Raises BackendProtocolError
        for what is not this protocol, and what an error object means."""
        tokens: list[int] = []
        texts: list[str] = []
        for event in events:
            if event == b"[DONE]":
                self.done = True
                break
            self._take(decoded(without_echo(event)), tokens, texts)
        text = "".join(texts)
        if self.done:
            return self._last_chunk(tokens, text)
        return Chunk(tokens=tokens, text=text) if tokens or text else None

    def _take(self, data: dict[str, Any], tokens: list[int], texts: list[str]) -> None:
        if is_error(data):
            raise self._failures.error_object(data)
        usage = data.get("usage")
        if isinstance(usage, dict):
            self._count(usage)
        choices = data.get("choices")
        if not isinstance(choices, list):
            raise BackendProtocolError("the backend sent an event that is no completion")
        if not choices or self._finish is not None:
            # The usage event; or a generation that has ended and is being ended again.
            return
        choice = choices[0]
        if not isinstance(choice, dict):
            raise BackendProtocolError("the backend sent a choice that is no object")
        if self._output is OutputForm.IDS:
            self._take_ids(choice, tokens)
        else:
            texts.append(text_of(choice.get("text")))
        finish = choice.get("finish_reason")
        if finish is not None:
            self._end(finish, choice.get(self._stop_field))

    def _take_ids(self, choice: dict[str, Any], tokens: list[int]) -> None:
        ids = choice.get("token_ids")
        if ids is None:
            if choice.get("text"):
                raise IdsMissing("the backend sent text without token ids; its version may be too old")
            return
        if checked := token_ids(ids):
            tokens += checked
            self._last = checked[-1]

    def _end(self, finish: object, stop_reason: object) -> None:
        meaning = FINISHES.get(finish) if isinstance(finish, str) else None
        if meaning is None:
            raise BackendProtocolError("the backend ended for a reason nobody knows")
        if not isinstance(meaning, FinishReason):
            raise meaning("the backend gave up in the middle of its answer", symptom=Symptom.SERVER_ERROR)
        self._finish = meaning
        if type(stop_reason) is int and stop_reason in (*STOP_TOKENS, ENDOFTEXT):
            self._stop_reason = stop_reason

    def _count(self, usage: dict[str, Any]) -> None:
        self._prompt_tokens = count(usage.get("prompt_tokens"))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self._cached_tokens = count(details.get("cached_tokens"))

    def _last_chunk(self, tokens: list[int], text: str) -> Chunk:
        if self._finish is None:
            raise BackendProtocolError("the backend's stream ended without saying why")
        unseen = self._stop_reason if self._stop_reason != self._last else None
        return Chunk(
            tokens=tokens,
            text=text,
            finish=self._finish,
            stop_token=unseen if self._finish is FinishReason.STOP else None,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )


def without_echo(event: bytes) -> bytes:
    """`event` with the prompt's ids left out: building a hundred thousand numbers that nobody reads takes longer than
    all other work on the answer's first event. Anything but a flat list without strings stays as it is."""
    if len(event) < LONG_EVENT:
        return event
    # In JSON a quote inside a string is escaped, so these bytes are the key and never a text that spells it.
    begin = event.find(ECHO) + len(ECHO)
    if begin < len(ECHO):
        return event
    end = event.find(b"]", begin)
    if end < 0 or event.find(b"[", begin, end) >= 0 or event.find(b'"', begin, end) >= 0:
        return event
    return event[:begin] + event[end:]
