"""Anthropic's clients for the gateways of the stage. Every client judges what it gets by the SDK's own types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    # The project's own pytest reads this file too, and has no SDK.
    from anthropic import Anthropic

    from conftest import Stage


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the libraries would send what it does to where the environment says."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("LANGCHAIN_TRACING_V2", "false")


@pytest.fixture(scope="session")
def connect(usual: dict[str, Any]) -> Iterator[Callable[..., Anthropic]]:
    """A client for an address, with any other setting of the SDK; closed at the end."""
    import anthropic

    made: list[Anthropic] = []

    def connect(url: str, **settings: Any) -> Anthropic:
        made.append(anthropic.Anthropic(base_url=url, **{**usual, **settings}))
        return made[-1]

    yield connect
    for client in made:
        client.close()


@pytest.fixture(scope="session")
def demo(stage: Stage, connect: Callable[..., Anthropic]) -> Anthropic:
    """In front of mlx-lm and the demo model."""
    return connect(stage.demo)


@pytest.fixture(scope="session")
def scripted(stage: Stage, connect: Callable[..., Anthropic]) -> Anthropic:
    """In front of the scripted backend."""
    return connect(stage.scripted, api_key=stage.key)
