"""Models of the Agents SDK in front of the gateways of the stage, and no traces sent to anybody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    # The project's own pytest reads this file too, and has no SDK.
    from agents import OpenAIResponsesModel
    from openai import AsyncOpenAI

    from conftest import Stage

PATIENCE_S = 30.0


@pytest.fixture(scope="session", autouse=True)
def untraced() -> None:
    """The SDK would send what it does to OpenAI."""
    from agents import set_tracing_disabled

    set_tracing_disabled(True)


@pytest_asyncio.fixture
async def demo_client(stage: Stage) -> AsyncIterator[AsyncOpenAI]:
    """In front of mlx-lm and the demo model; strict about every answer."""
    import openai

    async with openai.AsyncOpenAI(
        base_url=f"{stage.demo}/v1",
        api_key="unused",
        max_retries=0,
        timeout=PATIENCE_S,
        _strict_response_validation=True,
    ) as client:
        yield client


@pytest_asyncio.fixture
async def scripted_client(stage: Stage) -> AsyncIterator[AsyncOpenAI]:
    """In front of the scripted backend; strict about every answer."""
    import openai

    async with openai.AsyncOpenAI(
        base_url=f"{stage.scripted}/v1",
        api_key=stage.key,
        max_retries=0,
        timeout=PATIENCE_S,
        _strict_response_validation=True,
    ) as client:
        yield client


@pytest.fixture
def demo(demo_client: AsyncOpenAI) -> OpenAIResponsesModel:
    from agents import OpenAIResponsesModel

    return OpenAIResponsesModel("gpt-oss-demo", demo_client)


@pytest.fixture
def scripted(scripted_client: AsyncOpenAI) -> OpenAIResponsesModel:
    from agents import OpenAIResponsesModel

    return OpenAIResponsesModel("scripted", scripted_client)
