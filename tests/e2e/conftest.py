"""The event loop of the whole gateway is uvloop, so what ends sockets and holds loops is tested there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

ON_UVLOOP = (
    "test_engines.py",
    "test_engines_responses.py",
    "test_faults.py",
    "test_hostile.py",
    "test_injection.py",
    "test_leaving.py",
)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name in ON_UVLOOP:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
