"""What a gateway and the engine process say to each other: one JSON object per line over a Unix-domain socket.

Both sides import this module and nothing of each other. A gateway sends Ask, Cancel, Tokenize and Count; the engine
sends Ready or Failed once per connection, then Output, Refused, Encoded and Counted by the `id` the gateway chose, and
Pulse while it works.
Ids are unique per connection, so several gateway processes can share one engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import orjson

from unisono.core.generation import AnyJson, Constraint, JsonSchema, OneOf, Sampling

LINE_LIMIT = 32 * 1024 * 1024
"""Bytes; the longest line is a prompt that fills the context, about a megabyte."""

Reason: TypeAlias = Literal["context", "rejected", "constraint", "overloaded", "failed"]


@dataclass(frozen=True, slots=True)
class GenerateCommand:
    """Generate. `salt` keeps prompts of different tenants apart in the prefix cache."""

    id: int
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling
    salt: str = ""
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget `id`, in whatever state it is; nothing more is said about it."""

    id: int


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Encode `texts` with the model folder's own tokenizer, special tokens spelled in them included."""

    id: int
    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Count:
    """Say what there is to do, for every gateway."""

    id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and has generated a token. `context` is its window, None when its config names none; with
    `guides`, it keeps to constraints. `pid` is the engine's."""

    context: int | None
    guides: bool = False
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The model cannot be used; the engine ends after saying so."""

    message: str


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """New ids of one request, the stop id included; `finish` is "stop" or "length" on the last. `cached` counts prompt
    tokens that were not computed again, on the first."""

    id: int
    tokens: Sequence[int]
    finish: str | None = None
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """Request `id` ends here."""

    id: int
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """Answers Tokenize: the ids of each text."""

    id: int
    ids: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class CountAnswer:
    """Answers Count: requests in the batch and behind it, and the tokens that those in the batch hold."""

    id: int
    running: int
    waiting: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """The generation thread is alive; at most one a second, only while it works."""


ToEngine: TypeAlias = GenerateCommand | Cancel | Tokenize | Count
ToGateway: TypeAlias = Ready | Failed | TokenOutput | RequestRefused | Encoded | CountAnswer | Pulse

_KINDS: dict[str, type[ToEngine | ToGateway]] = {
    kind.__name__.lower(): kind
    for kind in (
        GenerateCommand,
        Cancel,
        Tokenize,
        Count,
        Ready,
        Failed,
        TokenOutput,
        RequestRefused,
        Encoded,
        CountAnswer,
        Pulse,
    )
}


class WireError(Exception):
    """A line that is not a message."""


def to_line(message: ToEngine | ToGateway) -> bytes:
    # Field by field and not with dataclasses.asdict, which would copy a prompt id by id.
    body = {"kind": type(message).__name__.lower(), **{name: getattr(message, name) for name in message.__slots__}}
    if isinstance(message, GenerateCommand) and message.constraint is not None:
        body["constraint"] = [message.constraint.kind, message.constraint]
    return orjson.dumps(body, default=_plain, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} does not travel")


def from_line(line: bytes) -> ToEngine | ToGateway:
    """Raises WireError."""
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
        raise WireError(f"not a message: {line[:80]!r}") from error


def _constraint(told: Any) -> Constraint | None:
    if told is None:
        return None
    kind, fields = told
    if kind == OneOf.kind:
        return OneOf(tuple(fields["texts"]))
    return _JSON[kind](**fields)


_JSON: Mapping[str, type[JsonSchema | AnyJson]] = {JsonSchema.kind: JsonSchema, AnyJson.kind: AnyJson}
