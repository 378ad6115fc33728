"""The stage every suite stands on: gateways in processes of their own, started once and gone with whoever asked; and
the asynchronous clients in front of them. Every client judges what it gets by the SDK's own types."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    # The project's own pytest reads this file too, and has no SDK.
    from openai import AsyncOpenAI

ROOT = Path(__file__).parents[3]
END_S = 40.0
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
    """Both gateways. They end with this process however it ends, since the stage waits for the end of its stdin."""
    command = [str(ROOT / ".venv/bin/python"), "-m", "tests.e2e.clients.stage"]
    with (
        tempfile.TemporaryFile("w+") as trouble,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=trouble, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if addresses := process.stdout.readline():
                yield Stage(**json.loads(addresses))
        finally:
            process.stdin.close()
            try:
                code = process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        trouble.seek(0)
        said = trouble.read()
        if not addresses:
            pytest.exit(f"the gateways did not start: {said}", returncode=1)
        assert code == 0, said


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
