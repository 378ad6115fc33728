"""Models of the Agents SDK in front of the gateways of the stage, and no traces sent to anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    # The project's own pytest reads this file too, and has no SDK.
    from agents import OpenAIResponsesModel
    from openai import AsyncOpenAI


@pytest.fixture(scope="session", autouse=True)
def untraced() -> None:
    """The SDK would send what it does to OpenAI."""
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
