"""What the mlx backend generates under a constraint, with mlx-lm running the demo model, which knows of none."""

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
    AnyJson,
    CompletionJob,
    Constraint,
    FinishReason,
    JsonSchema,
    OneOf,
    Sampling,
)
from unisono.core.ports import Backend, BackendOptions
from unisono.errors import ConstraintRefused
from unisono.schemas import violation
from unisono_adapters.mlx.local import MlxLocalBackend

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

FINAL = prompt_for("What is the weather in Paris?") + ENCODING.encode_marked("<|channel|>final<|message|>")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[Backend]:
    backend = MlxLocalBackend(BackendOptions("mlx", "demo"))
    yield backend
    await backend.aclose()


def under(constraint: Constraint, seed: int | None = None, **asked: Any) -> CompletionJob:
    sampling = Sampling(temperature=0) if seed is None else Sampling(temperature=5.0, seed=seed)
    return replace(greedy(FINAL, 400), constraint=constraint, sampling=sampling, **asked)


async def written(backend: Backend, job: CompletionJob) -> str:
    """The text, which ends with a stop token and holds no other special one."""
    chunks = [chunk async for chunk in backend.complete(job)]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert chunks[-1].finish is FinishReason.STOP
    assert tokens[-1] in STOP_TOKENS
    assert all(token < FIRST_SPECIAL for token in tokens[:-1])
    return ENCODING.decode(tokens[:-1])


def bounded(schema: Any) -> Any:
    """The schema with an end in sight: a model this small never closes a string, a number or a list by itself."""
    if isinstance(schema, list):
        return [bounded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    ends: dict[str, Any] = {}
    types = schema.get("type", ())
    if "string" in types and "format" not in schema:
        ends["maxLength"] = schema.get("maxLength", 8)
    if "integer" in types:
        ends |= {"minimum": 0, "maximum": 99}
    if types == "array":
        ends["maxItems"] = schema.get("maxItems", 1)
    return {name: bounded(value) for name, value in schema.items()} | ends


LEFT_OUT = ("numbers", "formats", "recursive", "a list by reference")
"""Schemas the suite has for judges: llguidance takes no multiple of a fraction; the others need not come to an end."""
SCHEMAS = {name: bounded(case.schema) for name, case in SUITE.items() if case.strict and name not in LEFT_OUT} | {
    "a tree of two levels": {
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
async def test_what_is_written_is_what_the_schema_allows(backend: Backend, schema: dict[str, Any]) -> None:
    for seed in (None, 1):
        assert violation(schema, await written(backend, under(JsonSchema(schema), seed))) is None


@pytest.mark.slow
async def test_any_json_is_an_object(backend: Backend) -> None:
    assert isinstance(json.loads(await written(backend, under(AnyJson()))), dict)


TEXTS = ("get_weather", 'a.b-c\\d"(x)\n', "日本 é 🙂", "get_weather_now")


@pytest.mark.slow
async def test_one_of_some_texts_is_one_of_them_to_the_letter(backend: Backend) -> None:
    said = {await written(backend, under(OneOf(TEXTS), seed)) for seed in range(12)}
    assert said <= set(TEXTS)
    assert len(said) > 1
    for text in TEXTS:
        assert await written(backend, under(OneOf((text,)))) == text


async def test_a_bias_does_not_bring_back_what_the_constraint_rules_out(backend: Backend) -> None:
    (hello,) = ENCODING.encode_text("Hello")
    job = under(OneOf(("yes", "no")))
    biased = replace(job, sampling=Sampling(temperature=0, logit_bias={hello: 100.0}))
    assert await written(backend, biased) in ("yes", "no")


REFUSED: dict[str, Constraint] = {
    "an unknown type": JsonSchema({"type": "nonsense"}),
    "a reference to nothing": JsonSchema({"$ref": "#/$defs/x"}),
    "a reference to elsewhere": JsonSchema({"$ref": "http://127.0.0.1:9/x"}),
    "what the library does not know": JsonSchema({"type": "array", "uniqueItems": True}),
    "nothing that can be": JsonSchema({"enum": []}),
}


@pytest.mark.parametrize("constraint", REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_compiled_is_refused_and_hurts_nobody(backend: Backend, constraint: Constraint) -> None:
    user, expected = CHATS["pong"]
    neighbour = asyncio.create_task(written_free(backend, user))
    with pytest.raises(ConstraintRefused):
        await written(backend, under(constraint))
    assert await neighbour == expected


async def written_free(backend: Backend, user: str) -> str:
    tokens = [token async for chunk in backend.complete(greedy(prompt_for(user))) for token in chunk.tokens]
    return ENCODING.decode(tokens)


async def test_constrained_and_free_requests_share_a_batch(backend: Backend) -> None:
    users = list(CHATS.values())[:3]
    answers = await asyncio.gather(
        *(written_free(backend, user) for user, _ in users),
        *(written(backend, under(OneOf((text,)))) for text in TEXTS),
    )
    assert answers == [*(expected for _, expected in users), *TEXTS]


async def test_leaving_while_the_grammar_is_compiled_leaves_nothing_behind(backend: Backend) -> None:
    many = JsonSchema({"enum": [f"value {n}" * 20 for n in range(900)]})
    leaving = asyncio.create_task(written(backend, under(many)))
    await asyncio.sleep(0.001)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await written(backend, under(OneOf(("yes",)))) == "yes"


async def test_what_it_claims_is_what_was_tried(backend: Backend) -> None:
    assert (await backend.probe()).capabilities.constrain == frozenset(CONSTRAINT_KINDS)
