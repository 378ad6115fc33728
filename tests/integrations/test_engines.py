"""Engines without a gateway: one per backend, on a separate event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from unisono.api.collected_answer import collect_run
from unisono.core.conversation import Conversation, Preamble, UserMessage
from unisono.engine.request import GenerationRequest, GenerationService
from unisono.errors import ConfigError
from unisono.integrations.engines import Engines, Site, Where

DEMO = Where("replay/demo")
CONVERSATION = Conversation(Preamble(), (UserMessage("Hi"),))


async def answer_text(turns: GenerationService, model: str) -> str:
    result = await collect_run(turns.start(GenerationRequest(model, CONVERSATION)))
    return result.items[-1].text


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def test_an_engine_is_built_once_for_each_backend(site: Site) -> None:
    async def engine(where: Where) -> GenerationService:
        async with site.engines.at(where) as turns:
            assert await answer_text(turns, where.model)
            return turns

    engines = [site.loop.run(engine(where)).result(30) for where in (DEMO, DEMO, Where("replay/demo", api_key="other"))]
    assert engines[0] is engines[1]
    assert engines[1] is not engines[2]


def test_requests_from_any_event_loop_are_answered(site: Site) -> None:
    async def request_demo() -> str:
        async with site.engines.at(DEMO) as turns:
            return await answer_text(turns, DEMO.model)

    async def request_from_other_loop() -> str:
        return await asyncio.wrap_future(site.loop.run(request_demo()))

    answers = {
        site.loop.run(request_demo()).result(30),
        asyncio.run(request_from_other_loop()),
        asyncio.run(request_from_other_loop()),
    }
    assert len(answers) == 1


def test_a_closed_site_can_be_used_again(site: Site) -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "unisono"]

    async def request_demo() -> str:
        async with site.engines.at(DEMO) as turns:
            return await answer_text(turns, DEMO.model)

    before = len(threads())
    site.close()
    assert len(threads()) == before
    for _ in range(2):
        assert site.loop.run(request_demo()).result(30)
        assert len(threads()) == before + 1
        site.close()
        site.close()
        assert len(threads()) == before


async def test_idle_engines_are_closed_above_the_maximum() -> None:
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
        async with engines.at(wheres[3]) as reused:
            assert reused is last
        async with engines.at(wheres[1]) as reopened:
            assert await answer_text(reopened, "replay/demo")
    await engines.aclose()


async def test_an_unknown_backend_is_rejected_each_time() -> None:
    engines = Engines()
    for _ in range(2):
        with pytest.raises(ConfigError):
            async with engines.at(Where("nothing/gpt-oss")):
                pass
    await engines.aclose()


def test_the_api_key_is_not_in_the_repr() -> None:
    assert "secret" not in repr(Where("vllm/gpt-oss", api_key="secret"))
