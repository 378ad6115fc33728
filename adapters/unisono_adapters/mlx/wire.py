"""Protocol between gateway and engine process, and orders between the engine's threads.

The protocol has one JSON object per line over a Unix socket. Both sides import this module, and neither imports modules
of the other side. A gateway sends GenerateCommand, Cancel, Tokenize and Count. The engine sends Ready or Failed once
per connection. After Ready, it answers each command with messages that have the `id` of the command: PromptLogprobs,
TokenOutput, RequestRefused, Encoded or CountAnswer. While the engine generates, it also sends Pulse. An `id` is unique
on its connection, so several gateway processes can share one engine.

The socket thread of the engine gives the generation thread a Submit or a Withdraw. This module does not import mlx. So
the socket thread can still run, and report the error, if mlx cannot be imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import orjson

from unisono.core.frozen import dataclass
from unisono.core.generation import AnyJson, Constraint, Gbnf, JsonSchema, Lark, OneOf, Regex, Sampling

if TYPE_CHECKING:
    from unisono_adapters.mlx.guides import Guide


# Maximum length of a line in bytes. The line for a prompt that fills the context has about a megabyte.
LINE_LIMIT = 32 * 1024 * 1024

Reason: TypeAlias = Literal["context", "rejected", "constraint", "overloaded", "failed"]


@dataclass(frozen=True, slots=True)
class GenerateCommand:
    """Command to generate an answer to a prompt.

    Only requests with the same `salt` share cached prefixes, which separates tenants. `logprobs` is the number of
    alternatives to report for each token; None requests no log probabilities at all. With `prompt_logprobs`, the
    engine reports the log probabilities of the prompt's tokens before the first output.
    """

    id: int
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling
    salt: str = ""
    constraint: Constraint | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Command to cancel the request `id`, whether it is waiting or running.

    The engine sends no further messages about the request, except those already on their way.
    """

    id: int


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Command to encode `texts` with the model's own tokenizer.

    Spelled-out markers become special tokens.
    """

    id: int
    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Count:
    """Command to report the load of the engine, including the requests of all other gateways."""

    id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Message that the model is loaded and has generated a first token.

    `context` is the context window of the model in tokens, or None if the model's config does not state it. `guides`
    is True if the engine can enforce constraints. `pid` is the process id of the engine.
    """

    context: int | None
    guides: bool = False
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """Message that the model cannot be used; the engine exits after sending it."""

    message: str


# Log probability of a token, and the most likely tokens at its position as (id, log probability).
Logprob: TypeAlias = tuple[float, Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of some tokens of a prompt.

    The first message begins with the second token of the prompt, because the first has no log probability. For a
    long prompt, the engine sends several messages, each of which continues where the previous one ended.
    """

    id: int
    logprobs: Sequence[Logprob]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """New token ids of one request, including the stop token.

    `finish` is "stop" or "length" in the last message, and None before. `cached` is the number of prompt tokens that
    were read from the prefix cache; only the first message has it. `logprobs` has an entry for each token if the
    command requests log probabilities.
    """

    id: int
    tokens: Sequence[int]
    finish: str | None = None
    cached: int | None = None
    logprobs: Sequence[Logprob] | None = None


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """Message that the request `id` was refused or has failed.

    It is the last message about the request.
    """

    id: int
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """Answer to Tokenize: the token ids of each text."""

    id: int
    ids: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class CountAnswer:
    """Answer to Count: the load of the engine.

    It has the numbers of running requests, of waiting requests, and of the tokens of the running requests.
    """

    id: int
    running: int
    waiting: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """Message that the generation thread is working, sent at most once per second."""


ToEngine: TypeAlias = GenerateCommand | Cancel | Tokenize | Count
ToGateway: TypeAlias = Ready | Failed | PromptLogprobs | TokenOutput | RequestRefused | Encoded | CountAnswer | Pulse

_KINDS: dict[str, type[ToEngine | ToGateway]] = {
    kind.__name__.lower(): kind
    for kind in (
        GenerateCommand,
        Cancel,
        Tokenize,
        Count,
        Ready,
        Failed,
        PromptLogprobs,
        TokenOutput,
        RequestRefused,
        Encoded,
        CountAnswer,
        Pulse,
    )
}


class WireError(Exception):
    """Line that is not a valid message, or a message that the receiver does not accept."""


def to_line(message: ToEngine | ToGateway) -> bytes:
    # Field by field, because dataclasses.asdict would copy a prompt id by id.
    body = {"kind": type(message).__name__.lower(), **{name: getattr(message, name) for name in message.__slots__}}
    if isinstance(message, GenerateCommand) and message.constraint is not None:
        body["constraint"] = [message.constraint.kind, message.constraint]
    return orjson.dumps(body, default=_plain, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def from_line(line: bytes) -> ToEngine | ToGateway:
    """Parse a line. Raises WireError if it is not a valid message."""
    try:
        body = orjson.loads(line)
        kind = _KINDS[body.pop("kind")]
        if kind is GenerateCommand:
            sampling = body.pop("sampling")
            bias = {int(token): float(value) for token, value in sampling.pop("logit_bias").items()}
            constraint = _constraint(body.pop("constraint"))
            return GenerateCommand(**body, sampling=Sampling(**sampling, logit_bias=bias), constraint=constraint)
        return kind(**body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WireError(f"the other side sent a line that is not a valid message: {line[:80]!r}") from error


def _constraint(value: Any) -> Constraint | None:
    if value is None:
        return None
    kind, fields = value
    if kind == OneOf.kind:
        return OneOf(tuple(fields["texts"]))
    return _OTHERS[kind](**fields)


_OTHERS: Mapping[str, type[JsonSchema | AnyJson | Regex | Gbnf | Lark]] = {
    kind.kind: kind for kind in (JsonSchema, AnyJson, Regex, Gbnf, Lark)
}


EVERYONE = -1

# Message with the number of the connection to send it on, or EVERYONE for all connections.
Addressed: TypeAlias = tuple[int, ToGateway]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of the engine.

    At most `batch` requests run at the same time, and at most `waiting` more are queued. `prefill_chunk` is the maximum
    number of prompt tokens that one step reads. It limits the duration of a step, and therefore the time until a
    cancelled request leaves the batch. A `prefix_cache_bytes` of 0 turns the prefix cache off.
    """

    batch: int = 32
    waiting: int = 256
    prefill_chunk: int = 512
    prefix_cache_bytes: int = 2 * 1024**3
    prefix_cache_entries: int = 64


@dataclass(frozen=True, slots=True)
class Submit:
    """Order to add a request to the batch.

    `guide` enforces the constraint of the request; it is None if the request has no constraint.
    """

    connection: int
    command: GenerateCommand
    guide: Guide | None = None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Order to cancel the request `id` of a connection, or all its requests if `id` is None."""

    connection: int
    id: int | None = None


Command: TypeAlias = Submit | Withdraw
