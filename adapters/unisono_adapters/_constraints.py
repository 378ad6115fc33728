"""Parts of constraints that several adapters use: forbidden markers, notations, and errors.

A JSON grammar does not exclude control tokens: a JSON string may contain the spelling of a control token as text, so
engines allow the token itself. If the backend accepts biases, the gateway forbids control tokens with a bias of -100.
Stop tokens stay allowed, because engines allow them only where the grammar is complete.
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

# Limit for white space in vLLM's JSON.
#
# vLLM's JSON grammars allow any amount of white space between JSON tokens. A model that does not want to continue can
# generate white space until its token limit. Only a structural tag accepts a limit for white space. But in a structural
# tag, vLLM silently ignores keywords that the grammar engine does not support; without the tag, it uses a different
# engine for them. So a tag is used only if all keywords of the schema are in `SUPPORTED_KEYWORDS`, which the engine was
# measured to enforce. Measured on vLLM 0.32 with xgrammar 0.2.8.

# Maximum number of consecutive white space characters: enough for a line break and a deep indentation.
MAX_WHITESPACE = 20

SUPPORTED_KEYWORDS = frozenset({
    "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "enum",
    "const", "anyOf", "$ref", "$defs", "definitions", "minimum", "maximum", "minLength", "maxLength", "title",
    "description", "default", "examples", "$schema", "$comment",
})  # fmt: skip

# Keywords whose value is an object that contains a schema under each name.
_NAMED = ("properties", "$defs", "definitions")
# Keywords whose value is one schema.
_ONE = ("items", "additionalProperties")
# Keywords whose value is a list of schemas.
_SEVERAL = ("anyOf", "prefixItems")


def as_tag(schema: Mapping[str, object]) -> str | None:
    """Return, as JSON, a structural tag that restricts an answer to the schema.

    Returns None if the schema has a keyword that a structural tag would not enforce.
    """
    if not all(SUPPORTED_KEYWORDS.issuperset(each) for each in _schemas(schema)):
        return None
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}
    return orjson.dumps({"type": "structural_tag", "format": content}).decode()


def _schemas(schema: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield the schema and all schemas nested in it."""
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


# Markers that never occur in the body of a message, and an end token that gpt-oss does not use.
FORBIDDEN = (CONSTRAIN, CHANNEL, START, END, MESSAGE, ENDOFTEXT)
# Bias that excludes a token.
NEVER = -100.0

# Schema for the constraint AnyJson, for engines that have no notation for "any JSON object".
ANY_OBJECT: Mapping[str, object] = {"type": "object"}

_IN_A_REGEX = re.compile(r"([\\.^$*+?()\[\]{}|])")
_ESCAPED = r"\\\1"


def bias(job: CompletionJob) -> Mapping[int, float]:
    """Return the biases for the request, by token id.

    These are the client's biases. If the job has a constraint, biases that forbid the control tokens are added.
    """
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
    """Return a regular expression that matches exactly the given texts.

    It uses only syntax that all engines support.
    """
    return "|".join(f"({_IN_A_REGEX.sub(_ESCAPED, text)})" for text in texts)


def as_lark(texts: Sequence[str]) -> str:
    """Return a grammar for llguidance that accepts exactly the given texts."""
    # Lark's string literals have the syntax of JSON strings.
    return "start: " + " | ".join(orjson.dumps(text).decode() for text in texts)


def refused_kind(constraint: Constraint) -> ConstraintRefused:
    """Return the exception for a kind of constraint that an adapter cannot enforce."""
    return ConstraintRefused(f"this backend does not support constraints of type {constraint.kind}")


def refusal(job: CompletionJob, error: BackendError) -> BackendError:
    """Return the exception to raise if `job` failed with `error` before its first token.

    If the constraint of the job may be the cause, returns ConstraintRefused; otherwise returns `error` unchanged.
    """
    if job.constraint is None or not _may_be_the_constraint(error):
        return error
    refused = ConstraintRefused(
        f"{error.message} (request with a constraint of type {job.constraint.kind})", symptom=error.symptom
    )
    refused.__cause__ = error.__cause__
    return refused


def _may_be_the_constraint(error: BackendError) -> bool:
    # An engine that cannot compile a grammar may return a 400 or a 500, or crash. The gateway repeats the request
    # without the constraint, which shows whether the constraint was the cause.
    if isinstance(error, BackendOverloaded | BackendTimeout):
        return False
    return isinstance(error, BackendRejected) or error.symptom in (Symptom.SERVER_ERROR, Symptom.DISCONNECTED)
