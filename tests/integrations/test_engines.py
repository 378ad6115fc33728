"""Engines outside of a gateway: one for each backend, on a loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from unisono.core.conversation import Conversation, Preamble, UserMessage
from unisono.engine.collect import collect_run
from unisono.engine.request import GenerationRequest, GenerationService
from unisono.errors import ConfigError
from unisono.integrations.engines import Engines, Site, Where

DEMO = Where("replay/demo")
ASKED = Conversation(Preamble(), (UserMessage("Hi"),))


async def said(turns: GenerationService, model: str) -> str:
    result = await collect_run(turns.start(GenerationRequest(model, ASKED)))
    return result.items[-1].text


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def test_an_engine_is_built_once_for_each_backend(site: Site) -> None:
    async def engine(where: Where) -> GenerationService:
        async with site.engines.at(where) as turns:
            assert await said(turns, where.model)
            return turns

    kept = [site.loop.run(engine(where)).result(30) for where in (DEMO, DEMO, Where("replay/demo", api_key="other"))]
    assert kept[0] is kept[1]
    assert kept[1] is not kept[2]


def test_who_waits_on_any_loop_or_on_none_is_answered(site: Site) -> None:
    async def asked() -> str:
        async with site.engines.at(DEMO) as turns:
            return await said(turns, DEMO.model)

    async def elsewhere() -> str:
        return await asyncio.wrap_future(site.loop.run(asked()))

    answers = {site.loop.run(asked()).result(30), asyncio.run(elsewhere()), asyncio.run(elsewhere())}
    assert len(answers) == 1


def test_a_site_that_was_closed_begins_anew(site: Site) -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "unisono"]

    async def asked() -> str:
        async with site.engines.at(DEMO) as turns:
            return await said(turns, DEMO.model)

    before = len(threads())
    site.close()
    assert len(threads()) == before
    for _ in range(2):
        assert site.loop.run(asked()).result(30)
        assert len(threads()) == before + 1
        site.close()
        site.close()
        assert len(threads()) == before


async def test_those_that_nobody_asks_for_are_closed_where_there_are_too_many() -> None:
    engines = Engines(most=2)
    wheres = [Where("replay/demo", api_key=str(number)) for number in range(4)]
    async with engines.at(wheres[0]) as busy:
        for where in wheres[1:]:
            async with engines.at(where):
                pass
        async with engines.at(wheres[0]) as again:
            assert again is busy
        async with engines.at(wheres[3]) as last:
            pass
        async with engines.at(wheres[3]) as kept:
            assert kept is last
        async with engines.at(wheres[1]) as anew:
            assert await said(anew, "replay/demo")
    await engines.aclose()


async def test_a_backend_nobody_knows_is_refused_and_not_kept() -> None:
    engines = Engines()
    for _ in range(2):
        with pytest.raises(ConfigError):
            async with engines.at(Where("nothing/gpt-oss")):
                pass
    await engines.aclose()


def test_a_key_is_shown_to_nobody() -> None:
    assert "secret" not in repr(Where("vllm/gpt-oss", api_key="secret"))
