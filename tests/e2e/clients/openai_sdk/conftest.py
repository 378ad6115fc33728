"""Clients for the test gateways. They validate every response against the types of the SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.sampling import mark_sampled

if TYPE_CHECKING:
    # The project's own pytest imports this file too, without the SDK installed.
    from openai import OpenAI

    from conftest import Stage


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but a third of the cases of each check as slow. `items` also has the tests of other folders."""
    mark_sampled([item for item in items if item.path.parent == Path(__file__).parent], one_in=3)


@pytest.fixture(scope="session")
def connect(usual: dict[str, Any]) -> Iterator[Callable[..., OpenAI]]:
    """Return a factory of clients for an address, with optional settings of the SDK."""
    import openai

    clients: list[OpenAI] = []

    def connect(url: str, **settings: Any) -> OpenAI:
        clients.append(openai.OpenAI(base_url=url, **{**usual, **settings}))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def demo(stage: Stage, connect: Callable[..., OpenAI]) -> OpenAI:
    """Client of the gateway with mlx-lm and the demo model."""
    return connect(f"{stage.demo}/v1")


@pytest.fixture(scope="session")
def scripted(stage: Stage, connect: Callable[..., OpenAI]) -> OpenAI:
    """Client of the gateway with the scripted backend."""
    return connect(f"{stage.scripted}/v1", api_key=stage.key)
