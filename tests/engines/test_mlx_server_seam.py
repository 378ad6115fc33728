"""Tests of continuing an answer of mlx_lm.server at any of its tokens, with the demo model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
import pytest_asyncio

from tests.e2e.test_engines import mlx_lm_server
from tests.engines.demo_prompts import ENCODING, greedy, prompt_for
from unisono.core.generation import RETURN, Chunk, FinishReason, Prompt
from unisono.core.ports import BackendOptions
from unisono_adapters.mlx.mlx_server_backend import MlxServerBackend

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PROMPT = prompt_for("What is 2 + 2?")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MlxServerBackend]:
    async with mlx_lm_server(tmp_path_factory.mktemp("mlx_lm.server") / "log") as (url, _):
        backend = MlxServerBackend(BackendOptions("mlx_server", "demo", url))
        yield backend
        await backend.aclose()


async def continuation(backend: MlxServerBackend, prefix: Sequence[int], max_tokens: int = 60) -> list[Chunk]:
    tokens = [*PROMPT, *prefix]
    job = replace(greedy(tokens, max_tokens), prompt=Prompt(tokens, ENCODING.decode(tokens)))
    return [chunk async for chunk in backend.complete(job)]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.slow
async def test_greedy_answer_is_the_same_if_continued_at_any_token(backend: MlxServerBackend) -> None:
    answer = ENCODING.encode_marked(text_of(await continuation(backend, ())))
    assert len(answer) > 20
    for cut in range(1, len(answer)):
        chunks = await continuation(backend, answer[:cut])
        assert text_of(chunks) == ENCODING.decode(answer[cut:])
        assert chunks[-1].finish is FinishReason.STOP
        assert chunks[-1].stop_token in (None, RETURN)
        assert chunks[-1].prompt_tokens == len(PROMPT) + cut


@pytest.mark.slow
async def test_server_survives_prompts_that_it_has_cached(backend: MlxServerBackend) -> None:
    prefix = ENCODING.encode_marked(text_of(await continuation(backend, (), max_tokens=14)))
    rest = text_of(await continuation(backend, prefix))
    assert rest.endswith("2 + 2 is 4.")
    assert text_of(await continuation(backend, prefix[:-1])) == ENCODING.decode(prefix[-1:]) + rest
    assert text_of(await continuation(backend, prefix)) == rest
