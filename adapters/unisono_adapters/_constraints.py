"""Constraints for all backends: forbidden markers, shared notations, refusals.

A JSON grammar does not exclude control tokens: their spelling is text that a string may contain, so the grammar
allows the token itself. If the backend takes a bias, a prohibitive one forbids them. Stop tokens stay allowed,
since engines end on them only when the grammar is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

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
from unisono.core.tagged_unions import for_grammar
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendRejected,
    BackendTimeout,
    ConstraintRefused,
    Symptom,
)

# JSON schemas for which vLLM can limit white space.
#
# Its JSON grammars allow any amount of white space between tokens, and a model that does not want to continue fills
# its budget with it. Only a structural tag accepts a limit. But in a tag, keywords unknown to the grammar engine are
# silently ignored, while the ordinary way falls back to another engine. So a tag is used only for schemas whose
# keywords were verified to be enforced. Measured on vLLM 0.32 with xgrammar 0.2.8.

# Maximum run of white space in characters: a line break and a deep indentation.
MAX_WHITESPACE = 20

SUPPORTED_KEYWORDS = frozenset({
    "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "enum",
    "const", "anyOf", "$ref", "$defs", "definitions", "minimum", "maximum", "minLength", "maxLength", "title",
    "description", "default", "examples", "$schema", "$comment",
})  # fmt: skip

# Keywords whose values are schemas by name.
_NAMED = ("properties", "$defs", "definitions")
# Keywords whose value is one schema.
_ONE = ("items", "additionalProperties")
_SEVERAL = ("anyOf", "prefixItems")


def as_tag(schema: Mapping[str, object]) -> str | None:
    """Return the structural tag for an answer that follows the schema.

    None if only the ordinary way enforces all of it.
    """
    if not all(SUPPORTED_KEYWORDS.issuperset(each) for each in _schemas(schema)):
        return None
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}
    return orjson.dumps({"type": "structural_tag", "format": content}).decode()


def _schemas(schema: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield the schema and every schema in it."""
    waiting: list[object] = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping):
            continue
        yield each
        for keyword, value in each.items():
            if keyword in _NAMED and isinstance(value, Mapping):
                waiting += value.values()
            elif keyword in _ONE:
                waiting.append(value)
            elif keyword in _SEVERAL and isinstance(value, list | tuple):
                waiting += value


# Markers that belong to no body, and an end token that gpt-oss does not use.
FORBIDDEN = (CONSTRAIN, CHANNEL, START, END, MESSAGE, ENDOFTEXT)
# Bias that excludes a token.
NEVER = -100.0

# Schema of AnyJson for engines without a notation for it.
ANY_OBJECT: Mapping[str, object] = {"type": "object"}

_IN_A_REGEX = re.compile(r"([\\.^$*+?()\[\]{}|])")
_ESCAPED = r"\\\1"


def bias(job: CompletionJob) -> Mapping[int, float]:
    """Return the client's bias, plus the forbidden markers if there is a constraint."""
    if job.constraint is None:
        return job.sampling.logit_bias
    return {**job.sampling.logit_bias, **dict.fromkeys(FORBIDDEN, NEVER)}


def schema_of(constraint: JsonSchema | AnyJson) -> Mapping[str, object]:
    """Return the schema as a mapping for orjson."""
    match constraint:
        case JsonSchema(schema):
            return for_grammar(schema)
        case AnyJson():
            return ANY_OBJECT


def as_regex(texts: Sequence[str]) -> str:
    """Return a regular expression for one of the texts, in the common subset of all engines."""
    return "|".join(f"({_IN_A_REGEX.sub(_ESCAPED, text)})" for text in texts)


def as_lark(texts: Sequence[str]) -> str:
    """Return an llguidance grammar for one of the texts."""
    # Lark's literals are those of JSON.
    return "start: " + " | ".join(orjson.dumps(text).decode() for text in texts)


def refused_kind(constraint: Constraint) -> ConstraintRefused:
    """Return the error of an adapter that cannot enforce this kind of constraint."""
    return ConstraintRefused(f"this backend does not support constraints of type {constraint.kind}")


def refusal(job: CompletionJob, error: BackendError) -> BackendError:
    """Return the error for `job`, given an `error` before the first token."""
    if job.constraint is None or not _may_be_the_constraint(error):
        return error
    refused = ConstraintRefused(
        f"{error.message} (request with a constraint of type {job.constraint.kind})", symptom=error.symptom
    )
    refused.__cause__ = error.__cause__
    return refused


def _may_be_the_constraint(error: BackendError) -> bool:
    # Engines fail in many ways if they cannot compile a grammar: with a 400, a 500, or by dying. Repeating the
    # request without the constraint shows whether something else was wrong.
    if isinstance(error, BackendOverloaded | BackendTimeout):
        return False
    return isinstance(error, BackendRejected) or error.symptom in (Symptom.SERVER_ERROR, Symptom.DISCONNECTED)
