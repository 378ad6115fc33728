"""The Responses API with every engine: state, exact tokens and background responses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.gateway import Gateway, gateway
from tests.e2e.talks import a_listener_that_leaves_and_comes_back, begun_in_the_background, taken_over, three_turns
from tests.engines_all.conftest import PINNED
from tests.engines_all.engines import Running, wait_until_idle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

TOKENS = 300


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_conversation_continues_from_cached_tokens(engine: Running, site: Gateway, stream: bool) -> None:
    properties = engine.engine
    await three_turns(
        site,
        stream=stream,
        block=properties.block,
        caches_generated=properties.caches_generated,
        shows_stop=properties.shows_stop,
    )


async def test_a_client_disconnects_and_resumes_the_stream(site: Gateway) -> None:
    await a_listener_that_leaves_and_comes_back(site)


async def test_another_gateway_takes_over_a_background_response(engine: Running, tmp_path: Path) -> None:
    store = {"url": f"sqlite:///{tmp_path}/state.db"}
    config = {"model_list": [engine.deployment()], "unisono": PINNED, "store": store}
    async with gateway(config) as first:
        response_id = await begun_in_the_background(first, TOKENS)
    async with gateway(config) as second:
        await taken_over(second, response_id, TOKENS, keeps_spaces=engine.engine.shows_stop)


async def test_cancelling_a_response_leaves_the_engine_idle(engine: Running, site: Gateway) -> None:
    response_id = await begun_in_the_background(site, 3000)
    assert await engine.busy()

    cancelled = await site.post(f"/v1/responses/{response_id}/cancel", b"")

    assert (cancelled.status, cancelled.body["status"]) == (200, "cancelled")
    await wait_until_idle(engine)
