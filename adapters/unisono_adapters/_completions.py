"""Requests to `/v1/completions`, and conversion of the streams to chunks.

vLLM, SGLang and mlx-lm implement this OpenAI API. A stream is complete when it has sent both a finish reason and
`[DONE]`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import DecodeError, Meta, Struct
from msgspec.json import Decoder

from unisono.core.generation import (
    ENDOFTEXT,
    STOP_TOKENS,
    VOCABULARY,
    Chunk,
    CompletionJob,
    FinishReason,
    OutputForm,
    TokenLogprob,
)
from unisono.errors import BackendError, BackendProtocolError, BackendUnavailable, Symptom
from unisono.harmony.encoding import load_encoding
from unisono_adapters._constraints import bias
from unisono_adapters._events import count, decoded, generate, text_of, token_ids
from unisono_adapters._failures import FailureTable, IdsMissing, is_error
from unisono_adapters._http import BackendHttp
from unisono_adapters._scoring import to_logprob

# Finish reasons of vLLM, SGLang and mlx-lm. "abort" and "error" mean that the generation failed.
FINISHES: dict[str, FinishReason | type[BackendError]] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "repetition": FinishReason.LENGTH,
    "abort": BackendUnavailable,
    "error": BackendError,
}

# Field in which vLLM repeats the ids of the prompt, once per answer.
ECHO = b'"prompt_token_ids":['
# Only events of at least this number of bytes are searched for the field.
LONG_EVENT = 4096


def complete(
    wire: BackendHttp, body: bytes, job: CompletionJob, output: OutputForm, stop_field: str = "stop_reason"
) -> AsyncGenerator[Chunk]:
    """Send `body` to `/v1/completions` and yield chunks of ids or text, depending on `output`.

    `stop_field` is the name of the field in which the server reports the stop token that ended a choice. Raises
    BackendError or a subclass.
    """
    scored = job.prompt.tokens if job.prompt_logprobs else ()
    fold = CompletionFold(output, wire.failures, stop_field, has_logprobs=job.logprobs is not None, scored=scored)
    return generate(wire, "v1/completions", body, job, fold)


def id_request(model: str, job: CompletionJob) -> dict[str, object]:
    """Return the request body for servers that accept and return token ids."""
    return {
        "model": model,
        "prompt": list(job.prompt.tokens),
        "max_tokens": job.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling(job),
        "stop_token_ids": STOP_TOKENS,
        "return_token_ids": True,
    }


def sampling(job: CompletionJob) -> dict[str, object]:
    """Return the sampling fields of a request to `/v1/completions`.

    `seed` is left out if the job has no seed, and `logit_bias` if neither the client nor a constraint needs biases.
    """
    options = job.sampling
    fields: dict[str, object] = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "repetition_penalty": options.repetition_penalty,
    }
    if options.seed is not None:
        fields["seed"] = options.seed
    if biased := bias(job):
        fields["logit_bias"] = {str(token): amount for token, amount in biased.items()}
    return fields


class CompletionFold:
    """Converter from the events of a text completion to chunks.

    `done` becomes True when `feed` returns the last chunk, which has the finish reason. `scored` are the tokens of the
    prompt if the job requests log probabilities of the prompt, which then arrive at the beginning of the stream.
    Otherwise `scored` is empty.
    """

    __slots__ = (
        "_cached_tokens", "_failures", "_finish", "_has_text", "_last", "_logprobs", "_prompt_logprobs",
        "_prompt_tokens", "_scored", "_stop_field", "_stop_reason", "_takes_ids", "done",
    )  # fmt: skip

    def __init__(
        self,
        output: OutputForm,
        failures: FailureTable,
        stop_field: str = "stop_reason",
        *,
        has_logprobs: bool = False,
        scored: Sequence[int] = (),
    ) -> None:
        self._takes_ids = output is OutputForm.IDS
        self._failures = failures
        self._stop_field = stop_field
        self._finish: FinishReason | None = None
        self._stop_reason: int | None = None
        self._last: int | None = None
        self._has_text = False
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        # Log probabilities of the tokens of the current read; None if the job does not request log probabilities.
        self._logprobs: list[TokenLogprob | None] | None = [] if has_logprobs else None
        # Tokens of the prompt, until their log probabilities arrive. The log probabilities are returned with the
        # chunk of the read in which they arrive.
        self._scored = scored
        self._prompt_logprobs: list[TokenLogprob | None] = []
        self.done = False

    def feed(self, events: list[bytes]) -> Chunk | None:
        """Return the chunk for the events of one network read, or None if they contain no output.

        Raises BackendProtocolError if an event does not follow the protocol. If an event is an error object, raises
        the exception that the error object maps to.
        """
        tokens: list[int] = []
        if self._logprobs is not None:
            self._logprobs, self._prompt_logprobs = [], []
        elif self._finish is None and self._takes_ids:
            # Nearly all events are plain. For a plain event, the typed decoder takes 0.4 us; orjson and checks in
            # Python take 1.5 us.
            plain = _take_many(events, tokens) if len(events) >= MANY_EVENTS else 0
            try:
                for event in events[plain:]:
                    tokens += decode_plain_event(event).choices[0].token_ids
                    plain += 1
            except NOT_PLAIN:
                pass
            if tokens:
                self._last = tokens[-1]
            if plain == len(events):
                return Chunk(tokens=tokens) if tokens else None
            events = events[plain:]
        texts: list[str] = []
        for event in events:
            if event == b"[DONE]":
                self.done = True
                break
            self._add_event(decoded(without_echo(event)), tokens, texts)
            if self.done:
                break
        text = "".join(texts)
        if self.done:
            return self._last_chunk(tokens, text)
        if not (tokens or text or self._prompt_logprobs):
            return None
        return Chunk(tokens=tokens, text=text, logprobs=self._logprobs or (), prompt_logprobs=self._prompt_logprobs)

    @property
    def _has_output(self) -> bool:
        """True if the backend has sent a token, text or a finish reason."""
        return self._last is not None or self._has_text or self._finish is not None

    def _add_event(self, data: dict[str, Any], tokens: list[int], texts: list[str]) -> None:
        if is_error(data):
            raise self._failures.error_object(data, has_output=self._has_output)
        usage = data.get("usage")
        if isinstance(usage, dict):
            self._count(usage)
        choices = data.get("choices")
        if not isinstance(choices, list):
            raise BackendProtocolError("the backend sent an event without a list of `choices`")
        if self._finish is not None:
            # This is the event with the usage, or a different event after the finish reason. Only `[DONE]` follows the
            # usage, and a backend may delay `[DONE]`, so the answer ends with the usage.
            self.done = not choices and isinstance(usage, dict)
            return
        if not choices:
            return
        choice = choices[0]
        if not isinstance(choice, dict):
            raise BackendProtocolError("the backend sent a choice that is not an object")
        if self._takes_ids:
            self._add_ids(choice, tokens)
        else:
            texts.append(text_of(choice.get("text")))
            self._has_text = self._has_text or bool(texts[-1])
        finish = choice.get("finish_reason")
        if finish is not None:
            self._end(finish, choice.get(self._stop_field))

    def _add_ids(self, choice: dict[str, Any], tokens: list[int]) -> None:
        begin = self._add_prompt_logprobs(choice.get("logprobs")) if self._scored else 0
        ids = choice.get("token_ids")
        if ids is None:
            if choice.get("text"):
                raise IdsMissing("the backend sent text without token ids; its version may be too old")
            return
        if checked := token_ids(ids):
            tokens += checked
            self._last = checked[-1]
            if self._logprobs is not None:
                self._logprobs += logprobs_of(choice.get("logprobs"), checked, begin)

    def _add_prompt_logprobs(self, field: object) -> int:
        """Read the log probabilities of the prompt from the `logprobs` object of the first choice.

        Returns the number of entries in `logprobs` that belong to the prompt, or 0 if the choice has no `logprobs`.
        """
        if field is None:
            return 0
        values = field.get("token_logprobs") if isinstance(field, dict) else None
        # The first token of a prompt has no log probability. A list that begins with a number begins with the answer.
        if not isinstance(values, list) or len(values) < len(self._scored) or values[0] is not None:
            raise BackendProtocolError("the backend did not send the log probabilities of the prompt")
        self._prompt_logprobs = logprobs_of(field, self._scored)
        self._scored = ()
        return len(self._prompt_logprobs)

    def _end(self, finish: object, stop_reason: object) -> None:
        meaning = FINISHES.get(finish) if isinstance(finish, str) else None
        if meaning is None:
            raise BackendProtocolError("the backend sent an unknown finish reason")
        if not isinstance(meaning, FinishReason):
            raise meaning("the backend aborted its answer", symptom=Symptom.SERVER_ERROR)
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
            raise BackendProtocolError("the backend's stream ended without a finish reason")
        unseen = self._stop_reason if self._stop_reason != self._last else None
        return Chunk(
            tokens=tokens,
            text=text,
            finish=self._finish,
            stop_token=unseen if self._finish is FinishReason.STOP else None,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            logprobs=self._logprobs or (),
            prompt_logprobs=self._prompt_logprobs,
        )


def logprobs_of(field: object, tokens: Sequence[int], begin: int = 0) -> list[TokenLogprob | None]:
    """Return the log probability of each token, read from the field `logprobs` of a choice.

    `begin` is the index of the entry for the first of the tokens. The result has None for a token without a log
    probability. An alternative is left out unless its name is an id, such as `token_id:17`, or the text of exactly
    one token.
    """
    found = field if isinstance(field, dict) else {}
    values, tops = found.get("token_logprobs"), found.get("top_logprobs")
    entries: list[TokenLogprob | None] = []
    for position, token in enumerate(tokens, begin):
        value = values[position] if isinstance(values, list) and position < len(values) else None
        top = tops[position] if isinstance(tops, list) and position < len(tops) else None
        named = top.items() if isinstance(top, dict) else ()
        entries.append(to_logprob(token, value, ((_id_of(name), each) for name, each in named)))
    return entries


ID_PREFIX = "token_id:"
MAX_ID_DIGITS = 9


def _id_of(name: object) -> int | None:
    """Return the id of the token that `name` gives as an id or as text.

    Returns None if no single token has this name.
    """
    if not isinstance(name, str):
        return None
    if name.startswith(ID_PREFIX):
        number = name.removeprefix(ID_PREFIX)
        return int(number) if number.isdecimal() and len(number) <= MAX_ID_DIGITS else None
    ids = load_encoding().encode_marked(name)
    return ids[0] if len(ids) == 1 else None


TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=VOCABULARY)]


class PlainChoice(Struct, gc=False):
    """Choice that contains token ids and does not end the generation."""

    token_ids: list[TokenId]
    finish_reason: None


class PlainEvent(Struct, gc=False):
    """Event that contains token ids and no finish reason, usage or error.

    All other fields are ignored.
    """

    choices: tuple[PlainChoice]
    usage: None = None
    error: None = None
    object: Literal["text_completion"] = "text_completion"


# Exceptions of the decoder for an event that is not plain. Invalid UTF-8 in a string does not raise DecodeError.
NOT_PLAIN: Final = (DecodeError, RecursionError, UnicodeDecodeError)
decode_plain_event = Decoder(PlainEvent).decode
decode_plain_events = Decoder(list[PlainEvent]).decode
_choices = attrgetter("choices")
_token_ids = attrgetter("token_ids")
# From this number of events on, decoding the events as one array is faster than one by one.
MANY_EVENTS: Final = 4
# Number of events that end a stream: the finish reason, the usage and `[DONE]`.
END_EVENTS: Final = 3


def _take_many(events: list[bytes], tokens: list[int]) -> int:
    """Decode many events at once and add their ids to `tokens`.

    Returns the number of events that were decoded, counted from the first. It is 0 if one of the events is not plain.
    The last events of a stream are never decoded here.
    """
    many = events[:-END_EVENTS] if events[-1] == b"[DONE]" else events
    try:
        decoded = decode_plain_events(b"[%b]" % b",".join(many))
    except NOT_PLAIN:
        return 0
    # If an event consists of several objects with commas between them, the numbers differ.
    if len(decoded) != len(many):
        return 0
    choices = chain.from_iterable(map(_choices, decoded))
    tokens += chain.from_iterable(map(_token_ids, choices))
    return len(many)


def without_echo(event: bytes) -> bytes:
    """Return `event` without the ids of the prompt, which vLLM repeats in its first event.

    Parsing a hundred thousand unused numbers would take longer than all other work on that event. The event is
    returned unchanged if the field is not a flat list of numbers.
    """
    if len(event) < LONG_EVENT:
        return event
    # Quotes inside a JSON string are escaped, so these bytes are always the key and never the content of a string.
    begin = event.find(ECHO) + len(ECHO)
    if begin < len(ECHO):
        return event
    end = event.find(b"]", begin)
    if end < 0 or event.find(b"[", begin, end) >= 0 or event.find(b'"', begin, end) >= 0:
        return event
    return event[:begin] + event[end:]
