"""Fixtures: each engine, started once per session, its adapter, and a gateway before it.

The versions and timings are reported at the end. A missing engine fails its tests, because this suite covers all
engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import pytest
import pytest_asyncio
import uvloop

from tests.e2e.gateway import Gateway, gateway
from tests.engines_all.engines import ENGINES, Running, running
from tests.engines_all.setup.places import LOGS
from unisono.core.ports import Backend

MEASURED = pytest.StashKey[dict[str, dict[str, str]]]()


# Every prompt contains the date, and the answers of such a small model depend on it.
PINNED = {"current_date": "2026-01-02"}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Use the event loop of the gateway."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(request.param) as started:
        measured = request.config.stash.setdefault(MEASURED, {}).setdefault(request.param, {})
        measured["version"] = started.version
        if started.url is not None:
            measured["start"] = f"{started.started_s:.1f} s"
        yield started


@pytest.fixture
def measured(engine: Running, request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the values of the engine in the report, by label."""
    return request.config.stash[MEASURED][engine.engine.kind]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def backend(engine: Running) -> AsyncIterator[Backend]:
    backend = engine.backend()
    yield backend
    await backend.aclose()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def site(engine: Running) -> AsyncIterator[Gateway]:
    async with gateway({"model_list": [engine.deployment()], "unisono": PINNED}) as started:
        yield started


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    measured = config.stash.get(MEASURED, {})
    if not measured:
        return
    terminalreporter.section("engines")
    for name, values in measured.items():
        terminalreporter.write_line(f"{name}: " + ", ".join(f"{label} {value}" for label, value in values.items()))
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"the logs of the engines are in {LOGS}")
