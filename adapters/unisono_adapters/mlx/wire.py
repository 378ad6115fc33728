"""Protocol between gateway and engine process: one JSON object per line over a Unix socket.

Both sides import this module and nothing of each other. A gateway sends GenerateCommand, Cancel, Tokenize and
Count. The engine sends Ready or Failed once per connection, then PromptLogprobs, TokenOutput, RequestRefused, Encoded
and CountAnswer with the gateway's `id`, and Pulse while it works. Ids are unique per connection, so several gateway
processes can share one engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import orjson

from unisono.core.frozen import dataclass
from unisono.core.generation import AnyJson, Constraint, Gbnf, JsonSchema, Lark, OneOf, Regex, Sampling

# Maximum line length in bytes; a prompt that fills the context has about a megabyte.
LINE_LIMIT = 32 * 1024 * 1024

Reason: TypeAlias = Literal["context", "rejected", "constraint", "overloaded", "failed"]


@dataclass(frozen=True, slots=True)
class GenerateCommand:
    """Command to generate. `salt` separates the prompts of tenants in the prefix cache.

    `logprobs` is the number of alternatives to report for each token; None for no log probabilities. With
    `prompt_logprobs`, those of the prompt's tokens precede the output.
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
    """Command to forget `id` in any state; no further message about it follows."""

    id: int


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Command to encode `texts` with the model's own tokenizer, parsing special tokens."""

    id: int
    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Count:
    """Command to report the load from all gateways."""

    id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Message that the model is loaded and has generated a token.

    `context` is its window, None if its config has none. `guides` is True if it supports constraints. `pid` is
    the engine's.
    """

    context: int | None
    guides: bool = False
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """Message that the model cannot be used; the engine then ends."""

    message: str


# Log probability of a token, and those of the most likely ones at its place by id.
Logprob: TypeAlias = tuple[float, Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of the next tokens of a prompt, from its second one on.

    A long prompt has several of these messages.
    """

    id: int
    logprobs: Sequence[Logprob]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """New ids of one request, including the stop id.

    `finish` is "stop" or "length" on the last message. `cached` counts reused prompt tokens, on the first
    message. `logprobs` has the log probability of each token and its alternatives, if the command asks for them.
    """

    id: int
    tokens: Sequence[int]
    finish: str | None = None
    cached: int | None = None
    logprobs: Sequence[Logprob] | None = None


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """Final message of the failed request `id`."""

    id: int
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """Answer to Tokenize: the ids of each text."""

    id: int
    ids: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class CountAnswer:
    """Answer to Count: running and waiting requests, and the tokens of the running ones."""

    id: int
    running: int
    waiting: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """Sign of life of the working generation thread, at most once per second."""


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
    """Line that is not a valid message."""


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
