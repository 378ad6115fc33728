"""Streams of images: events are relayed unchanged, and their usage is charged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.gateway import Gateway
from tests.e2e.keyed import bearing, keyed
from tests.fakes import Refusal, Reset
from tests.fakes.openai_modes import FakeModes
from tests.passthrough.test_other_modes import model
from tests.passthrough.test_passing_chat import served
from tests.passthrough.test_passing_counted import used_by
from tests.passthrough.test_speech import ends_at

MODE = "image_generation"
BODY = {"model": "other", "prompt": "a cat", "stream": True, "partial_images": 2}


@asynccontextmanager
async def painting(running: Gateway, key: str = "", **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    headers = bearing(key) if key else {}
    url = f"{running.url}/v1/images/generations"
    async with running.session.post(url, json={**BODY, **fields}, headers=headers) as response:
        yield response


async def test_events_are_relayed_unchanged() -> None:
    async with FakeModes() as fake, served(model(fake.url, MODE)) as running:
        async with running.session.post(f"{fake.url}/v1/images/generations", json=BODY) as direct:
            expected = await direct.read()
        async with painting(running) as response:
            assert response.headers["content-type"] == "text/event-stream"
            assert await response.read() == expected
    assert fake.requests[-1].json == {**BODY, "model": "bge"}
    assert expected.count(b"event: image_generation.partial_image") == 2


async def test_another_deployment_answers_before_the_first_event() -> None:
    async with FakeModes(Refusal(500, b"{}")) as broken, FakeModes() as works:
        entries = model(broken.url, MODE, order=0), model(works.url, MODE, order=1)
        async with served(*entries) as running, painting(running) as response:
            assert response.status == 200
            assert b"image_generation.completed" in await response.read()


async def test_a_stream_that_breaks_off_does_not_look_complete() -> None:
    async with (
        FakeModes(faults=[ends_at(1, Reset())]) as fake,
        served(model(fake.url, MODE)) as running,
        painting(running) as response,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_usage_of_the_last_event_is_charged(tmp_path: Path) -> None:
    async with FakeModes() as fake, keyed({"model_list": [model(fake.url, MODE)]}, tmp_path) as (running, keys):
        record, key = await keys.issue()
        async with painting(running, key) as response:
            await response.read()
        used = await used_by(running, record.tenant, record.id)
    assert (used.requests, used.input, used.output) == (1, 3, 40)
