"""Documents, and the addresses at which the retrieval clients find the gateway."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Final

import pytest

TIMEOUT_S: Final = 30.0
QUESTION: Final = "How warm is the sea at Oslo in June?"
# Only the first document answers the question. The others share words with it.
DOCUMENTS: Final = (
    "The sea at Oslo is 17 degrees warm in June.",
    "Oslo is the capital of Norway.",
    "How to bake bread in a warm oven.",
    "The train to Bergen leaves at noon.",
    "June is the sixth month.",
)
# The scripted model answers with its whole prompt, so that the prompt of an answer can be checked.
ECHO: Final = "script: the prompt"


def pytest_configure(config: pytest.Config) -> None:
    # These libraries leave their connections to the garbage collector.
    for kind in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}")


@pytest.fixture(scope="session", autouse=True)
def collected() -> Iterator[None]:
    """Collect garbage while the warnings are still ignored."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable LangSmith tracing, even if the environment enables it."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("LANGCHAIN_TRACING_V2", "false")


def check_prompt(prompt: str) -> None:
    """Check that a prompt has the one document that answers the question."""
    assert QUESTION in prompt
    assert [document in prompt for document in DOCUMENTS] == [True, False, False, False, False]
