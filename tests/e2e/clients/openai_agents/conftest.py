"""Models of the Agents SDK for the test gateways, without tracing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    # The project's own pytest also imports this file, without the SDK.
    from agents import OpenAIResponsesModel
    from openai import AsyncOpenAI


@pytest.fixture(scope="session", autouse=True)
def untraced() -> None:
    """Disable the SDK's tracing, which sends data to OpenAI."""
    from agents import set_tracing_disabled

    set_tracing_disabled(True)


@pytest.fixture
def demo(async_demo: AsyncOpenAI) -> OpenAIResponsesModel:
    from agents import OpenAIResponsesModel

    return OpenAIResponsesModel("gpt-oss-demo", async_demo)


@pytest.fixture
def scripted(async_scripted: AsyncOpenAI) -> OpenAIResponsesModel:
    from agents import OpenAIResponsesModel

    return OpenAIResponsesModel("scripted", async_scripted)
