"""Pydantic AI models in front of the test gateways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    # The project's own pytest imports this file too, without Pydantic AI installed.
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIResponsesModel


@pytest.fixture
def demo(async_demo: AsyncOpenAI) -> OpenAIResponsesModel:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIResponsesModel("gpt-oss-demo", provider=OpenAIProvider(openai_client=async_demo))


@pytest.fixture
def scripted(async_scripted: AsyncOpenAI) -> OpenAIResponsesModel:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIResponsesModel("scripted", provider=OpenAIProvider(openai_client=async_scripted))
