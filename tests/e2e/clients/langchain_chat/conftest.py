"""LangChain's models in front of the gateways of the stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    # The project's own pytest reads this file too, and has no such library.
    from langchain_openai import ChatOpenAI

    from conftest import Stage

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would send what it does to where the environment says."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("LANGCHAIN_TRACING_V2", "false")


Making: TypeAlias = "Callable[..., ChatOpenAI]"


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def on_responses(request: pytest.FixtureRequest) -> bool:
    """Which of the two surfaces is spoken to."""
    return bool(request.param)


@pytest.fixture
def demo(stage: Stage) -> Making:
    """Makes models in front of mlx-lm and the demo model."""
    return partial(made, f"{stage.demo}/v1", "unused", model="gpt-oss-demo", temperature=0)


@pytest.fixture
def scripted(stage: Stage) -> Making:
    """Makes models in front of the scripted backend."""

    def named(model: str = "scripted", **fields: Any) -> ChatOpenAI:
        return made(f"{stage.scripted}/v1", stage.key, model=model, **fields)

    return named


def made(url: str, key: str, **fields: Any) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE_S, **fields)
