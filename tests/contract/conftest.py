"""Fixtures of the backend contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.contract.kinds import (
    KINDS,
    ON_A_WIRE,
    Kind,
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(params=ON_A_WIRE)
def wired(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(autouse=True)
async def nothing_left_running() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    for _ in range(50):
        left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
        if not left:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"tasks left: {left}")
