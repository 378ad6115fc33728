"""The Responses API with a real engine: mlx-lm in an engine process, with the demo model."""

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
async def test_conversation_reuses_the_cached_tokens_of_the_engine(site: Gateway, stream: bool) -> None:
    await three_turns(site, stream=stream)


@pytest.mark.slow
async def test_client_resumes_a_background_stream_after_a_disconnect(site: Gateway) -> None:
    await a_listener_that_leaves_and_comes_back(site)


@pytest.mark.slow
async def test_next_gateway_finishes_the_responses_of_a_stopped_one(tmp_path: Path) -> None:
    config = config_of("mlx/demo", unisono=PINNED, store={"url": f"sqlite:///{tmp_path}/state.db"})
    async with gateway(config) as first:
        response_id = await begun_in_the_background(first, TOKENS)
    async with gateway(config) as second:
        await taken_over(second, response_id, TOKENS)
