"""Presidio's guardrail against a scripted service: the texts of a request are checked at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from unisono.core.conversation import Conversation, Preamble, UserMessage
from unisono.core.generation import Sampling
from unisono.core.hooks import Request
from unisono.errors import Refused
from unisono.hooks.presidio import Presidio

Finding = dict[str, Any]


class Analyzer:
    """Analyzer that answers as soon as `at_once` requests are waiting, or all `total` have arrived."""

    def __init__(self, total: int, at_once: int, find: Callable[[str], list[Finding]]) -> None:
        self.total = total
        self.at_once = at_once
        self.find = find
        self.arrived = 0
        self.running = 0
        self.most = 0
        self._full = asyncio.Event()

    async def analyze(self, request: web.Request) -> web.Response:
        text = (await request.json())["text"]
        self.arrived += 1
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running == self.at_once or self.arrived == self.total:
            self._full.set()
        await self._full.wait()
        self.running -= 1
        return web.json_response(self.find(text))


@asynccontextmanager
async def guarded(analyzer: Analyzer, **options: Any) -> AsyncIterator[Presidio]:
    app = web.Application()
    app.router.add_post("/analyze", analyzer.analyze)
    async with TestServer(app) as server:
        hook = Presidio({"analyzer": str(server.make_url("/")), "entities": {"NAME": "BLOCK"}, **options})
        yield hook
        await hook.aclose()


def request_with(*texts: str, prefill: str | None = None, surface: str = "chat") -> Request:
    conversation = Conversation(Preamble(), tuple(map(UserMessage, texts)), prefill)
    return Request("r", "", "", "gpt-oss", surface, conversation, Sampling(), whole=True)


async def test_the_texts_of_a_request_are_checked_at_the_same_time_within_a_limit() -> None:
    texts = [f"text {number}" for number in range(100)]
    analyzer = Analyzer(len(texts), Presidio.CHECKS_AT_ONCE, lambda _: [])
    async with guarded(analyzer) as hook, asyncio.timeout(30):
        assert await hook.before(request_with(*texts)) is None
    assert (analyzer.arrived, analyzer.most) == (100, Presidio.CHECKS_AT_ONCE)


async def test_the_first_blocked_text_is_reported_and_no_check_is_left() -> None:
    analyzer = Analyzer(3, 3, lambda text: [{"entity_type": "NAME"}] if "Ann" in text else [])
    async with guarded(analyzer) as hook, asyncio.timeout(30):
        with pytest.raises(Refused, match="NAME") as raised:
            await hook.before(request_with("one", "Ann", "Ann too"))
        assert raised.value.param == "messages"
    assert not [task for task in asyncio.all_tasks() if "checked_item" in repr(task)]


@pytest.mark.parametrize(("surface", "field"), [("chat", "messages"), ("responses", "input"), ("messages", "messages")])
async def test_a_blocked_prefill_names_the_field_of_the_conversation(surface: str, field: str) -> None:
    analyzer = Analyzer(2, 1, lambda text: [{"entity_type": "NAME"}] if "Ann" in text else [])
    async with guarded(analyzer) as hook, asyncio.timeout(30):
        with pytest.raises(Refused) as raised:
            await hook.before(request_with("one", prefill="I am Ann", surface=surface))
        assert raised.value.param == field
