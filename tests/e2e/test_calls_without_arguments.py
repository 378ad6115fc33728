"""Calls whose body is empty or blank: clients parse the arguments, so each API emits an empty object."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.obeying import KINDS, SURFACES, Desk, calls, desk
from tests.schemas.suite import closed

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
STRICT = {"type": "function", "function": {"name": "look", "parameters": closed(at={"type": "string"}), "strict": True}}
both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
on_each = pytest.mark.parametrize("ask", SURFACES.values(), ids=SURFACES)
blank = pytest.mark.parametrize("body", ["", " ", "\n"], ids=["empty", "a blank", "a line break"])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm, unguided", "mlx_server"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def early() -> AsyncIterator[Desk]:
    """Gateway that streams arguments as they arrive."""
    async with desk(KINDS["vllm, unguided"], stream_tool_arguments=True) as running:
        yield running


@both_forms
@on_each
@blank
async def test_a_blank_call_has_an_empty_object(harness: Desk, ask: Any, stream: bool, body: str) -> None:
    model = harness.think(calls("look", body))
    outcome = await ask(harness, stream=stream, tools=[LOOK])
    assert outcome.calls == [("look", "{}")]
    assert outcome.unmet == ""
    assert len(model.asked) == 1


@both_forms
@on_each
@blank
async def test_blanks_that_were_streamed_are_followed_by_an_object(
    early: Desk, ask: Any, stream: bool, body: str
) -> None:
    early.think(calls("look", body))
    outcome = await ask(early, stream=stream, tools=[LOOK])
    assert [(name, arguments.strip()) for name, arguments in outcome.calls] == [("look", "{}")]


@both_forms
@on_each
async def test_a_blank_call_of_a_strict_tool_violates_the_schema(harness: Desk, ask: Any, stream: bool) -> None:
    harness.think(calls("look", ""), bodies=["", ""])
    outcome = await ask(harness, stream=stream, tools=[STRICT])
    assert outcome.calls == [("look", "{}")]
    assert outcome.unmet
