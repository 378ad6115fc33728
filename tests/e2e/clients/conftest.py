"""Gateways that all client suites share, and asynchronous OpenAI clients for them.

The gateways run in processes of their own. They start once and end with the test process. The clients validate
responses strictly against the SDK's types.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.staging import staged

if TYPE_CHECKING:
    # The project's own pytest also imports this file, without the SDK.
    from openai import AsyncOpenAI

# Limit for each request.
TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Stage:
    """Base URLs of the gateways, without `/v1`.

    `demo` requires no key, `scripted` requires `key`. `tools` maps the labels of the tool servers of `scripted` to
    their URLs.
    """

    demo: str
    scripted: str
    key: str
    tools: dict[str, str]


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """Both gateways, started once per session."""
    with staged("tests.e2e.clients.stage") as addresses:
        yield Stage(**addresses)


@pytest.fixture(scope="session")
def usual() -> dict[str, Any]:
    """Default settings of a client, with strict validation of responses."""
    return {"api_key": "unused", "max_retries": 0, "timeout": TIMEOUT_S, "_strict_response_validation": True}


@pytest_asyncio.fixture
async def async_demo(stage: Stage, usual: dict[str, Any]) -> AsyncIterator[AsyncOpenAI]:
    """Client for the gateway of mlx-lm and the demo model."""
    import openai

    async with openai.AsyncOpenAI(base_url=f"{stage.demo}/v1", **usual) as client:
        yield client


@pytest_asyncio.fixture
async def async_scripted(stage: Stage, usual: dict[str, Any]) -> AsyncIterator[AsyncOpenAI]:
    """Client for the gateway of the scripted backend."""
    import openai

    async with openai.AsyncOpenAI(base_url=f"{stage.scripted}/v1", **{**usual, "api_key": stage.key}) as client:
        yield client
