"""Anthropic clients for the test gateways, with strict validation of responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    # The project's own pytest also imports this file, without the SDK.
    from anthropic import Anthropic

    from conftest import Stage


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable LangSmith tracing, even if the environment enables it."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("LANGCHAIN_TRACING_V2", "false")


@pytest.fixture(scope="session")
def connect(usual: dict[str, Any]) -> Iterator[Callable[..., Anthropic]]:
    """Factory of clients by base URL and SDK settings; all are closed at the end."""
    import anthropic

    clients: list[Anthropic] = []

    def connect(url: str, **settings: Any) -> Anthropic:
        clients.append(anthropic.Anthropic(base_url=url, **{**usual, **settings}))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def demo(stage: Stage, connect: Callable[..., Anthropic]) -> Anthropic:
    """Client for the gateway of mlx-lm and the demo model."""
    return connect(stage.demo)


@pytest.fixture(scope="session")
def scripted(stage: Stage, connect: Callable[..., Anthropic]) -> Anthropic:
    """Client for the gateway of the scripted backend."""
    return connect(stage.scripted, api_key=stage.key)
