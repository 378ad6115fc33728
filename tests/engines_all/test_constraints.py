"""Every engine that can be constrained, at its adapter: what is written is what was allowed, to the stop token."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.engines.demo_prompts import ENCODING, greedy, prompt_for
from tests.engines_all.engines import Running
from tests.schemas.suite import closed
from unisono.core.generation import (
    CONSTRAINT_KINDS,
    END,
    FIRST_SPECIAL,
    STOP_TOKENS,
    AnyJson,
    Constraint,
    FinishReason,
    JsonSchema,
    OneOf,
    Sampling,
)
from unisono.core.ports import Backend
from unisono.errors import ConstraintRefused
from unisono.schemas import violation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("engine", ["vllm", "llamacpp", "mlx"], indirect=True),
]

FINAL = prompt_for("What is the weather in Paris?") + ENCODING.encode_marked("<|channel|>final<|message|>")
SHORT = {"type": "string", "maxLength": 10}


async def written(backend: Backend, constraint: Constraint, sampling: Sampling | None = None) -> str:
    """The text, which ends with a stop token and holds no other special one."""
    job = replace(greedy(FINAL, 300), constraint=constraint, sampling=sampling or Sampling(temperature=0))
    chunks = [chunk async for chunk in backend.complete(job)]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert chunks[-1].finish is FinishReason.STOP
    assert tokens[-1] in STOP_TOKENS
    assert all(token < FIRST_SPECIAL for token in tokens[:-1])
    return ENCODING.decode(tokens[:-1])


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": closed(city=SHORT, days={"type": "integer", "minimum": 1, "maximum": 9}),
    "nested": closed(a=closed(b=closed(c={"type": "boolean"}))),
    "enum and unicode": closed(città={"enum": ["日本", "🙂", 'a"b\\c\n']}),
    "anyOf": closed(item={"anyOf": [closed(kind={"const": "user"}, ok={"type": "boolean"}), {"type": "null"}]}),
    "by reference": {
        **closed(one={"$ref": "#/$defs/x"}, two={"$ref": "#/$defs/x"}),
        "$defs": {"x": closed(n={"enum": [1, 2]})},
    },
    "arrays": closed(xs={"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2}),
    "a pattern": closed(id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
async def test_what_is_written_is_what_the_schema_allows(backend: Backend, schema: dict[str, Any]) -> None:
    assert violation(schema, await written(backend, JsonSchema(schema))) is None


async def test_any_json_is_an_object(backend: Backend) -> None:
    assert isinstance(json.loads(await written(backend, AnyJson())), dict)


@pytest.mark.parametrize("text", ["get_weather", 'a.b-c\\d"(x)|[y]\n', "日本 é 🙂"], ids=ascii)
async def test_one_of_some_texts_is_one_of_them_to_the_letter(backend: Backend, text: str) -> None:
    assert await written(backend, OneOf((text,))) == text
    assert await written(backend, OneOf((text, "other"))) in (text, "other")


async def test_a_marker_is_not_written_even_where_the_model_wants_it(backend: Backend) -> None:
    eager = Sampling(temperature=0, logit_bias={END: 100.0})
    assert violation(SCHEMAS["flat"], await written(backend, JsonSchema(SCHEMAS["flat"]), eager)) is None


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "#/$defs/x"}], ids=["a type", "a reference"])
async def test_what_cannot_be_compiled_is_refused_and_the_engine_lives(
    backend: Backend, schema: dict[str, Any]
) -> None:
    with pytest.raises(ConstraintRefused):
        await written(backend, JsonSchema(schema))
    assert await written(backend, OneOf(("yes",))) == "yes"


async def test_what_it_claims_is_what_was_tried(engine: Running, backend: Backend) -> None:
    assert (await backend.probe()).capabilities.constrain == frozenset(CONSTRAINT_KINDS)
