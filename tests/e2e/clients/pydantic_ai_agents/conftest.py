"""Models of Pydantic AI in front of the gateways of the stage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    # The project's own pytest reads this file too, and has no such library.
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIResponsesModel

    from conftest import Stage

PATIENCE_S = 30.0


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
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIResponsesModel("gpt-oss-demo", provider=OpenAIProvider(openai_client=demo_client))


@pytest.fixture
def scripted(scripted_client: AsyncOpenAI) -> OpenAIResponsesModel:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIResponsesModel("scripted", provider=OpenAIProvider(openai_client=scripted_client))
