"""What a constraint means for any backend that takes one: the markers that must not be written, the notations that
several engines share, and when a failure is a refusal of the constraint.

A grammar for JSON does not keep control tokens out: spelled out they are text that a string may hold, and so the token
itself is allowed there. Where the backend takes a bias, one that no model overcomes forbids them. The stop tokens stay:
engines end on them only where the grammar is complete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import orjson

from unisono.core.generation import (
    CHANNEL,
    CONSTRAIN,
    END,
    ENDOFTEXT,
    MESSAGE,
    START,
    AnyJson,
    CompletionJob,
    Constraint,
    JsonSchema,
)
from unisono.core.symptom import Symptom
from unisono.core.tagged_unions import for_grammar
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendRejected,
    BackendTimeout,
    ConstraintRefused,
)

FORBIDDEN = (CONSTRAIN, CHANNEL, START, END, MESSAGE, ENDOFTEXT)
"""Markers that are no part of any body, and an end that is none of gpt-oss's own."""
NEVER = -100.0
"""The bias that rules a token out."""

ANY_OBJECT: Mapping[str, object] = {"type": "object"}
"""AnyJson, for engines that have no word of its own for it."""

_IN_A_REGEX = re.compile(r"([\\.^$*+?()\[\]{}|])")
_ESCAPED = r"\\\1"
_IN_A_LITERAL: Mapping[str, str] = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def bias(job: CompletionJob) -> Mapping[int, float]:
    """What is asked for by the client, and under a constraint that no marker is written."""
    if job.constraint is None:
        return job.sampling.logit_bias
    return {**job.sampling.logit_bias, **dict.fromkeys(FORBIDDEN, NEVER)}


def schema_of(constraint: JsonSchema | AnyJson) -> Mapping[str, object]:
    """The schema as orjson takes it."""
    match constraint:
        case JsonSchema(schema):
            return for_grammar(schema)
        case AnyJson():
            return ANY_OBJECT


def as_regex(texts: Sequence[str]) -> str:
    """One of the texts, in the notation that every engine's regular expressions share."""
    return "|".join(f"({_IN_A_REGEX.sub(_ESCAPED, text)})" for text in texts)


def as_gbnf(texts: Sequence[str]) -> str:
    """One of the texts, as a grammar for llama.cpp."""
    return "root ::= " + " | ".join(f'"{"".join(map(_literal, text))}"' for text in texts)


def _literal(character: str) -> str:
    if character in _IN_A_LITERAL:
        return _IN_A_LITERAL[character]
    return character if character >= " " else f"\\x{ord(character):02x}"


def as_lark(texts: Sequence[str]) -> str:
    """One of the texts, as a grammar for llguidance."""
    # Lark's literals are those of JSON.
    return "start: " + " | ".join(orjson.dumps(text).decode() for text in texts)


def refused_kind(constraint: Constraint) -> ConstraintRefused:
    """What an adapter raises that cannot keep to this kind, and so was not to be asked."""
    return ConstraintRefused(f"this backend cannot constrain generation to a {constraint.kind}")


def refusal(job: CompletionJob, error: BackendError) -> BackendError:
    """What `error`, which came before the first token, means for `job`."""
    if job.constraint is None or not _may_be_the_constraint(error):
        return error
    refused = ConstraintRefused(
        f"{error.message} (it was constrained to a {job.constraint.kind})", symptom=error.symptom
    )
    refused.__cause__ = error.__cause__
    return refused


def _may_be_the_constraint(error: BackendError) -> bool:
    # Engines fail in many ways when they cannot compile what they were given: with a 400, a 500, or by dying. If
    # something else was wrong, the same request without the constraint shows that.
    if isinstance(error, BackendOverloaded | BackendTimeout):
        return False
    return isinstance(error, BackendRejected) or error.symptom in (Symptom.SERVER_ERROR, Symptom.DISCONNECTED)
