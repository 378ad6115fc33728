"""Schemas with the maximum number of levels, on every API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.obeying import KINDS, SURFACES, Desk, answers, desk
from tests.schemas.suite import closed
from unisono.harmony.declaration_limits import MAX_DEPTH
from unisono.schemas.check_schema import MAX_LEVELS

pytestmark = pytest.mark.asyncio(loop_scope="module")

Schema = dict[str, Any]


def of_objects(levels: int) -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(levels - 1):
        schema = closed(a=schema)
    return schema


def of_lists(levels: int) -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(levels - 2):
        schema = {"type": "array", "items": schema}
    return closed(a=schema)


def of_unions(levels: int) -> Schema:
    schema: Schema = {"type": "string"}
    for level in range(levels - 1):
        schema = closed(a=schema) if level % 2 else {"anyOf": [schema, {"type": "null"}]}
    return schema if levels % 2 else closed(a=schema["anyOf"][0])


SHAPES: dict[str, Callable[[int], Schema]] = {"objects": of_objects, "lists": of_lists, "unions": of_unions}
on_each = pytest.mark.parametrize("ask", SURFACES.values(), ids=SURFACES)
of_each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[Desk]:
    async with desk(KINDS["vllm"]) as running:
        yield running


@on_each
@of_each_shape
async def test_the_schema_of_an_answer_may_have_all_levels(
    harness: Desk, ask: Any, shape: Callable[[int], Schema]
) -> None:
    harness.think(answers("no"), bodies=["{}"])
    schema = {"name": "deep", "schema": shape(MAX_LEVELS), "strict": True}
    outcome = await ask(harness, stream=False, response_format={"type": "json_schema", "json_schema": schema})
    assert outcome.unmet


@on_each
async def test_the_error_for_a_deeper_schema_of_a_tool_names_the_limit(harness: Desk, ask: Any) -> None:
    harness.think(answers("Done."))
    for levels in (MAX_DEPTH + 1, MAX_DEPTH + 2):
        tool = {"name": "f", "parameters": of_objects(levels), "strict": True}
        asking = ask(harness, stream=False, tools=[{"type": "function", "function": tool}])
        if levels == MAX_DEPTH + 1:
            assert (await asking).text == "Done."
        else:
            with pytest.raises(AssertionError, match=f"more than {MAX_DEPTH} levels"):
                await asking
