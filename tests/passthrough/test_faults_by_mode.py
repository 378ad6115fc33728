"""Faults of servers on every API of models that generate no text; other models keep answering."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import Answer, Gateway
from tests.fakes import Refusal, Reset, Stall, Step
from tests.fakes.openai_modes import FakeModes
from tests.passthrough.test_other_modes import CASES, Case, model
from tests.passthrough.test_passing_chat import served
from tests.passthrough.test_transcriptions import USUAL, form

pytestmark = pytest.mark.asyncio(loop_scope="module")

APIS = {
    **CASES,
    "speech": Case("/v1/audio/speech", "audio_speech", {"input": "Hi", "voice": "a"}, "input", Any),
    "transcriptions": Case("/v1/audio/transcriptions", "audio_transcription", {}, "file", Any),
}
MODES = sorted({case.mode for case in APIS.values()})


@dataclass(frozen=True)
class Cut:
    """Answer that ends the connection, or never comes."""

    step: Step

    def steps(self) -> list[Step]:
        return [self.step]


FAULTS: dict[str, tuple[Any, set[int], str]] = {
    "server error": (Refusal(500, b"trace at /home/somebody"), {502}, "backend_error"),
    "reset": (Cut(Reset()), {502, 503}, "backend_"),
    "slow": (Cut(Stall()), {504}, "backend_timeout"),
    "garbage": (Refusal(200, b"\x00<html>", "text/html"), {502}, "backend_protocol_error"),
}


@dataclass(frozen=True)
class Site:
    gateway: Gateway
    broken: FakeModes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    """Gateway with two models of each mode; those named `broken` are on a server with faults."""
    async with FakeModes() as broken, FakeModes() as works:
        entries = [model(broken.url, mode, name=f"broken-{mode}", timeout=0.5) for mode in MODES]
        entries += [model(works.url, mode, name=f"works-{mode}") for mode in MODES]
        settings = {"num_retries": 0, "allowed_fails": 10_000}
        async with served(*entries, router_settings=settings) as gateway:
            yield Site(gateway, broken)


async def ask(site: Site, case: Case, name: str) -> Answer:
    if case.field == "file":
        body = form(("model", None, f"{name}-{case.mode}".encode()), *USUAL[1:])
        return await site.gateway.post(case.path, body, content_type="multipart/form-data; boundary=limit")
    return await site.gateway.post(case.path, json.dumps({"model": f"{name}-{case.mode}", **case.body}).encode())


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("answer", "statuses", "code"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("case", APIS.values(), ids=APIS)
async def test_a_fault_is_a_clear_error_and_neighbours_are_served(
    site: Site, case: Case, answer: Any, statuses: set[int], code: str
) -> None:
    site.broken.script = lambda _: answer
    failed, *neighbours = await asyncio.gather(
        ask(site, case, "broken"),
        *(ask(site, other, "works") for other in APIS.values() if other.mode != "audio_speech"),
    )
    assert failed.status in statuses
    assert failed.body["error"]["code"].startswith(code)
    assert "/home" not in failed.raw.decode()
    assert {neighbour.status for neighbour in neighbours} == {200}
