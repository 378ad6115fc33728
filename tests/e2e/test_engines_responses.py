"""The Responses API in front of a real engine: mlx-lm in a process of our own, with the demo model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.gateway import Gateway, config_of, gateway
from tests.e2e.talks import a_listener_that_leaves_and_comes_back, begun_in_the_background, taken_over, three_turns
from tests.e2e.test_engines import PINNED

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TOKENS = 150


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Gateway]:
    async with gateway(config_of("mlx/demo", unisono=PINNED)) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_conversation_goes_on_from_the_tokens_the_engine_has(site: Gateway, stream: bool) -> None:
    await three_turns(site, stream=stream)


@pytest.mark.slow
async def test_a_listener_leaves_and_comes_back(site: Gateway) -> None:
    await a_listener_that_leaves_and_comes_back(site)


@pytest.mark.slow
async def test_a_gateway_that_ends_leaves_its_responses_to_the_next(tmp_path: Path) -> None:
    config = config_of("mlx/demo", unisono=PINNED, store={"url": f"sqlite:///{tmp_path}/state.db"})
    async with gateway(config) as one:
        response_id = await begun_in_the_background(one, TOKENS)
    async with gateway(config) as other:
        await taken_over(other, response_id, TOKENS)
