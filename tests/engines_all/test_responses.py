"""The Responses API in front of every engine: state, exact tokens and the background are the same whoever generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.gateway import Gateway, gateway
from tests.e2e.talks import a_listener_that_leaves_and_comes_back, begun_in_the_background, taken_over, three_turns
from tests.engines_all.conftest import PINNED
from tests.engines_all.engines import Running, idle_soon

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

TOKENS = 300


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_conversation_goes_on_from_the_tokens_the_engine_has(
    engine: Running, site: Gateway, stream: bool
) -> None:
    about = engine.engine
    await three_turns(
        site,
        stream=stream,
        block=about.block,
        caches_generated=about.caches_generated,
        shows_stop=about.shows_stop,
    )


async def test_a_listener_leaves_and_comes_back(site: Gateway) -> None:
    await a_listener_that_leaves_and_comes_back(site)


async def test_a_gateway_that_ends_leaves_its_responses_to_the_next(engine: Running, tmp_path: Path) -> None:
    store = {"url": f"sqlite:///{tmp_path}/state.db"}
    config = {"model_list": [engine.deployment()], "unisono": PINNED, "store": store}
    async with gateway(config) as one:
        response_id = await begun_in_the_background(one, TOKENS)
    async with gateway(config) as other:
        await taken_over(other, response_id, TOKENS, keeps_spaces=engine.engine.shows_stop)


async def test_calling_off_leaves_the_engine_idle(engine: Running, site: Gateway) -> None:
    response_id = await begun_in_the_background(site, 3000)
    assert await engine.busy()

    called_off = await site.post(f"/v1/responses/{response_id}/cancel", b"")

    assert (called_off.status, called_off.body["status"]) == (200, "cancelled")
    await idle_soon(engine)
