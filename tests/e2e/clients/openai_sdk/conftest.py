"""The gateways the SDK talks to, and clients for them. Every client judges what it gets by the SDK's own types."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    # The project's own pytest reads this file too, and has no SDK.
    from openai import AsyncOpenAI, OpenAI

ROOT = Path(__file__).parents[4]
END_S = 40.0
PATIENCE_S = 30.0
"""No request of the suite takes longer."""


@dataclass(frozen=True)
class Stage:
    """Addresses without `/v1`. `demo` wants no key, `scripted` wants `key`."""

    demo: str
    scripted: str
    key: str


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
def connect() -> Iterator[Callable[..., OpenAI]]:
    """A client for an address, with any other setting of the SDK; closed at the end."""
    import openai

    made: list[OpenAI] = []

    def connect(url: str, **settings: Any) -> OpenAI:
        usual = {"api_key": "unused", "max_retries": 0, "timeout": PATIENCE_S, "_strict_response_validation": True}
        made.append(openai.OpenAI(base_url=url, **{**usual, **settings}))
        return made[-1]

    yield connect
    for client in made:
        client.close()


@pytest.fixture(scope="session")
def demo(stage: Stage, connect: Callable[..., OpenAI]) -> OpenAI:
    """In front of mlx-lm and the demo model."""
    return connect(f"{stage.demo}/v1")


@pytest.fixture(scope="session")
def scripted(stage: Stage, connect: Callable[..., OpenAI]) -> OpenAI:
    """In front of the scripted backend."""
    return connect(f"{stage.scripted}/v1", api_key=stage.key)


@pytest_asyncio.fixture
async def async_demo(stage: Stage) -> AsyncIterator[AsyncOpenAI]:
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
async def async_scripted(stage: Stage) -> AsyncIterator[AsyncOpenAI]:
    import openai

    async with openai.AsyncOpenAI(
        base_url=f"{stage.scripted}/v1",
        api_key=stage.key,
        max_retries=0,
        timeout=PATIENCE_S,
        _strict_response_validation=True,
    ) as client:
        yield client
