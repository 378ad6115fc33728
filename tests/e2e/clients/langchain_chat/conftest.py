"""LangChain models for the test gateways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    # The project's own pytest also imports this file, without the library.
    from langchain_openai import ChatOpenAI

    from conftest import Stage

TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable LangSmith tracing, even if the environment enables it."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("LANGCHAIN_TRACING_V2", "false")


ModelFactory: TypeAlias = "Callable[..., ChatOpenAI]"


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def on_responses(request: pytest.FixtureRequest) -> bool:
    """Choice between Chat Completions (False) and the Responses API (True)."""
    return bool(request.param)


@pytest.fixture
def demo(stage: Stage) -> ModelFactory:
    """Factory of models for the gateway of mlx-lm and the demo model."""
    return partial(make_model, f"{stage.demo}/v1", "unused", model="gpt-oss-demo", temperature=0)


@pytest.fixture
def scripted(stage: Stage) -> ModelFactory:
    """Factory of models for the gateway of the scripted backend."""

    def make(model: str = "scripted", **fields: Any) -> ChatOpenAI:
        return make_model(f"{stage.scripted}/v1", stage.key, model=model, **fields)

    return make


def make_model(url: str, key: str, **fields: Any) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key=key, max_retries=0, timeout=TIMEOUT_S, **fields)
