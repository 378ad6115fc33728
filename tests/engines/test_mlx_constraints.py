"""Tests of constrained generation with the mlx backend and the demo model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from tests.engines.demo_prompts import CHATS, ENCODING, greedy, prompt_for
from tests.schemas.suite import SUITE, closed
from unisono.core.generation import (
    CONSTRAINT_KINDS,
    FIRST_SPECIAL,
    STOP_TOKENS,
    TEXT_KINDS,
    AnyJson,
    CompletionJob,
    Constraint,
    FinishReason,
    JsonSchema,
    Lark,
    OneOf,
    Regex,
    Sampling,
)
from unisono.core.ports import Backend, BackendOptions
from unisono.errors import ConstraintRefused
from unisono.schemas import violation
from unisono_adapters.mlx.mlx_backend import MlxLocalBackend

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

FINAL = prompt_for("What is the weather in Paris?") + ENCODING.encode_marked("<|channel|>final<|message|>")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[Backend]:
    backend = MlxLocalBackend(BackendOptions("mlx", "demo"))
    yield backend
    await backend.aclose()


def constrained_job(constraint: Constraint, seed: int | None = None, **fields: Any) -> CompletionJob:
    sampling = Sampling(temperature=0) if seed is None else Sampling(temperature=5.0, seed=seed)
    return replace(greedy(FINAL, 400), constraint=constraint, sampling=sampling, **fields)


async def generate(backend: Backend, job: CompletionJob) -> str:
    """Return the generated text.

    It must end with a stop token and contain no other special token.
    """
    chunks = [chunk async for chunk in backend.complete(job)]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert chunks[-1].finish is FinishReason.STOP
    assert tokens[-1] in STOP_TOKENS
    assert all(token < FIRST_SPECIAL for token in tokens[:-1])
    return ENCODING.decode(tokens[:-1])


def bounded(schema: Any) -> Any:
    """Add limits to a schema.

    The demo model never closes a string, number or list by itself.
    """
    if isinstance(schema, list):
        return [bounded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    limits: dict[str, Any] = {}
    types = schema.get("type", ())
    if "string" in types and "format" not in schema:
        limits["maxLength"] = schema.get("maxLength", 8)
    if "integer" in types:
        limits |= {"minimum": 0, "maximum": 99}
    if types == "array":
        limits["maxItems"] = schema.get("maxItems", 1)
    return {name: bounded(value) for name, value in schema.items()} | limits


# Schemas that are left out: llguidance does not support multiples of fractions, and output for the others may be
# endless.
EXCLUDED = ("numbers", "formats", "recursive", "a list by reference")
SCHEMAS = {name: bounded(case.schema) for name, case in SUITE.items() if case.strict and name not in EXCLUDED} | {
    "tree of two levels": {
        "$defs": {
            "leaf": {
                "type": "object",
                "properties": {"n": {"enum": [1]}},
                "required": ["n"],
                "additionalProperties": False,
            }
        },
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"const": 0}]}},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
    "formats": closed(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    "numbers": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 7, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
async def test_output_matches_the_schema(backend: Backend, schema: dict[str, Any]) -> None:
    for seed in (None, 1):
        assert violation(schema, await generate(backend, constrained_job(JsonSchema(schema), seed))) is None


@pytest.mark.slow
async def test_any_json_constraint_generates_an_object(backend: Backend) -> None:
    assert isinstance(json.loads(await generate(backend, constrained_job(AnyJson()))), dict)


TEXTS = ("get_weather", 'a.b-c\\d"(x)\n', "日本 é 🙂", "get_weather_now")


@pytest.mark.slow
async def test_choice_constraint_generates_one_of_the_texts(backend: Backend) -> None:
    outputs = {await generate(backend, constrained_job(OneOf(TEXTS), seed)) for seed in range(12)}
    assert outputs <= set(TEXTS)
    assert len(outputs) > 1
    for text in TEXTS:
        assert await generate(backend, constrained_job(OneOf((text,)))) == text


@pytest.mark.slow
async def test_bias_does_not_override_the_constraint(backend: Backend) -> None:
    (hello,) = ENCODING.encode_text("Hello")
    job = constrained_job(OneOf(("yes", "no")))
    biased = replace(job, sampling=Sampling(temperature=0, logit_bias={hello: 100.0}))
    assert await generate(backend, biased) in ("yes", "no")


REFUSED: dict[str, Constraint] = {
    "unknown type": JsonSchema({"type": "nonsense"}),
    "unresolved reference": JsonSchema({"$ref": "#/$defs/x"}),
    "external reference": JsonSchema({"$ref": "http://127.0.0.1:9/x"}),
    "unsupported keyword": JsonSchema({"type": "array", "uniqueItems": True}),
    "empty enum": JsonSchema({"enum": []}),
}


@pytest.mark.slow
@pytest.mark.parametrize("constraint", REFUSED.values(), ids=REFUSED)
async def test_uncompilable_constraint_is_refused_without_affecting_others(
    backend: Backend, constraint: Constraint
) -> None:
    user, expected = CHATS["pong"]
    other_request = asyncio.create_task(generate_unconstrained(backend, user))
    with pytest.raises(ConstraintRefused):
        await generate(backend, constrained_job(constraint))
    assert await other_request == expected


async def generate_unconstrained(backend: Backend, user: str) -> str:
    tokens = [token async for chunk in backend.complete(greedy(prompt_for(user))) for token in chunk.tokens]
    return ENCODING.decode(tokens)


@pytest.mark.slow
async def test_constrained_and_unconstrained_requests_share_a_batch(backend: Backend) -> None:
    users = list(CHATS.values())[:3]
    answers = await asyncio.gather(
        *(generate_unconstrained(backend, user) for user, _ in users),
        *(generate(backend, constrained_job(OneOf((text,)))) for text in TEXTS),
    )
    assert answers == [*(expected for _, expected in users), *TEXTS]


@pytest.mark.slow
async def test_cancelling_during_grammar_compilation_leaves_the_engine_usable(backend: Backend) -> None:
    large_schema = JsonSchema({"enum": [f"value {n}" * 20 for n in range(900)]})
    request = asyncio.create_task(generate(backend, constrained_job(large_schema)))
    await asyncio.sleep(0.001)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert await generate(backend, constrained_job(OneOf(("yes",)))) == "yes"


@pytest.mark.slow
@pytest.mark.parametrize("constraint", [Regex("yes"), Lark('start: "yes"')], ids=["regex", "lark"])
async def test_a_text_matches_its_grammar(backend: Backend, constraint: Regex | Lark) -> None:
    assert await generate(backend, constrained_job(constraint)) == "yes"


@pytest.mark.slow
async def test_probe_claims_every_tested_constraint_kind(backend: Backend) -> None:
    assert (await backend.probe()).capabilities.constrain == frozenset((*CONSTRAINT_KINDS, *TEXT_KINDS))
