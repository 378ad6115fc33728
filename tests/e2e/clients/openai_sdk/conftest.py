"""Clients for the gateways of the stage. Every client judges what it gets by the SDK's own types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    # The project's own pytest reads this file too, and has no SDK.
    from openai import OpenAI

    from conftest import Stage


@pytest.fixture(scope="session")
def connect(usual: dict[str, Any]) -> Iterator[Callable[..., OpenAI]]:
    """A client for an address, with any other setting of the SDK; closed at the end."""
    import openai

    made: list[OpenAI] = []

    def connect(url: str, **settings: Any) -> OpenAI:
        made.append(openai.OpenAI(base_url=url, **{**usual, **settings}))
        return made[-1]

    yield connect
    for client in made:
        client.close()


@pytest.fixture(scope="session")
def demo(stage: Stage, connect: Callable[..., OpenAI]) -> OpenAI:
    """In front of mlx-lm and the demo model."""
    return connect(f"{stage.demo}/v1")


@pytest.fixture(scope="session")
def scripted(stage: Stage, connect: Callable[..., OpenAI]) -> OpenAI:
    """In front of the scripted backend."""
    return connect(f"{stage.scripted}/v1", api_key=stage.key)
