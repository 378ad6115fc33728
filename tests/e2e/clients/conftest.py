"""The stage every suite stands on: gateways in processes of their own, started once and gone with whoever asked; and
the asynchronous clients in front of them. Every client judges what it gets by the SDK's own types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.staging import staged

if TYPE_CHECKING:
    # The project's own pytest reads this file too, and has no SDK.
    from openai import AsyncOpenAI

PATIENCE_S = 30.0
"""No request of the suites takes longer."""


@dataclass(frozen=True)
class Stage:
    """Addresses without `/v1`. `demo` wants no key, `scripted` wants `key`. `tools` are those of the tool servers of
    `scripted`, by their labels."""

    demo: str
    scripted: str
    key: str
    tools: dict[str, str]


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """Both gateways."""
    with staged("tests.e2e.clients.stage") as addresses:
        yield Stage(**addresses)


@pytest.fixture(scope="session")
def usual() -> dict[str, Any]:
    """Settings of a client where a check wants no others. They are strict about every answer."""
    return {"api_key": "unused", "max_retries": 0, "timeout": PATIENCE_S, "_strict_response_validation": True}


@pytest_asyncio.fixture
async def async_demo(stage: Stage, usual: dict[str, Any]) -> AsyncIterator[AsyncOpenAI]:
    """In front of mlx-lm and the demo model."""
    import openai

    async with openai.AsyncOpenAI(base_url=f"{stage.demo}/v1", **usual) as client:
        yield client


@pytest_asyncio.fixture
async def async_scripted(stage: Stage, usual: dict[str, Any]) -> AsyncIterator[AsyncOpenAI]:
    """In front of the scripted backend."""
    import openai

    async with openai.AsyncOpenAI(base_url=f"{stage.scripted}/v1", **{**usual, "api_key": stage.key}) as client:
        yield client
