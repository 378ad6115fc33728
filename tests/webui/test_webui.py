"""A real Open WebUI finds documents, orders them, answers from them and reads aloud with the models of one gateway."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.e2e.clients.scripts import ENCODING, THOUGHT, playing
from tests.e2e.clients.stage import MASTER_KEY, served
from tests.fakes import FakeVllm, VllmScript
from tests.fakes.openai_modes import FakeModes, shared_words, word_vector
from tests.phoenix.test_phoenix import free_port
from tests.webui.conftest import OPEN_WEBUI

pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

START_S = 400.0
QUESTION = "How warm is the sea at Oslo in June?"
DOCUMENTS = ("The sea at Oslo is 17 degrees warm in June.", "Oslo is a city.", "How to bake bread in a warm oven.")


@contextmanager
def open_webui(gateway: str, folder: Path) -> Iterator[str]:
    port = free_port()
    base = {"": f"{gateway}/v1", "RAG_": f"{gateway}/v1", "AUDIO_TTS_": f"{gateway}/v1"}
    settings = {
        **{f"{name}OPENAI_API_BASE_URL": address for name, address in base.items()},
        **{f"{name}OPENAI_API_KEY": MASTER_KEY for name in base},
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_EMBEDDING_MODEL": "word-vectors",
        "RAG_EMBEDDING_BATCH_SIZE": "2",
        "ENABLE_RAG_HYBRID_SEARCH": "True",
        "RAG_RERANKING_ENGINE": "external",
        "RAG_RERANKING_MODEL": "word-ranker",
        "RAG_EXTERNAL_RERANKER_URL": f"{gateway}/v1/rerank",
        "RAG_EXTERNAL_RERANKER_API_KEY": MASTER_KEY,
        # Otherwise the model writes the queries, and this one only repeats its prompt.
        "ENABLE_RETRIEVAL_QUERY_GENERATION": "False",
        "RAG_TOP_K": "3",
        "RAG_TOP_K_RERANKER": "1",
        "AUDIO_TTS_ENGINE": "openai",
        "AUDIO_TTS_MODEL": "speaker",
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "-",
        "ENABLE_OLLAMA_API": "False",
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
        "ANONYMIZED_TELEMETRY": "False",
        "DATA_DIR": str(folder),
    }
    command = [OPEN_WEBUI, "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, cwd=folder, env={**os.environ, **settings}, stdout=log, stderr=log) as process,
    ):
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


async def wait_for(session: aiohttp.ClientSession, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            async with session.get("/health") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])


async def post(session: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with session.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def echo(body: dict[str, Any]) -> VllmScript:
    """Answer with the prompt itself, with markers as plain text."""
    prompt = ENCODING.decode(body["prompt"]).replace("<|", "<")
    return playing(f"{THOUGHT}<|channel|>final<|message|>{prompt}<|return|>")


def config_for(chat: str, words: str) -> dict[str, Any]:
    """Return a configuration with a scripted chat model, and models of a server that compares texts by their words."""
    modes = {"word-vectors": "embedding", "word-ranker": "rerank", "speaker": "audio_speech"}
    entries = [("scripted", "vllm/tiny", chat, {"harmony": True})]
    entries += [(name, "vllm/bge", words, {"mode": mode}) for name, mode in modes.items()]
    return {
        "model_list": [
            {"model_name": name, "litellm_params": {"model": model, "api_base": base}, "model_info": info}
            for name, model, base, info in entries
        ],
        "general_settings": {"master_key": MASTER_KEY},
        "store": {"url": "memory://"},
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, FakeModes]]:
    async with (
        FakeVllm(script=echo) as fake,
        FakeModes(vector=word_vector, relevance=shared_words) as words,
        served(tmp_path_factory.mktemp("gateway"), "gateway", config_for(fake.url, words.url)) as url,
    ):
        yield url, words


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def webui(
    gateway: tuple[str, FakeModes], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[aiohttp.ClientSession]:
    """Session of a signed-in user."""
    folder = tmp_path_factory.mktemp("webui")
    with open_webui(gateway[0], folder) as url:
        async with aiohttp.ClientSession(url) as session:
            await wait_for(session, folder / "log")
            signed_in = await post(session, "/api/v1/auths/signin", {"email": "", "password": ""})
            session.headers["authorization"] = f"Bearer {signed_in['token']}"
            yield session


async def add_document(webui: aiohttp.ClientSession, collection: str, text: str) -> None:
    form = aiohttp.FormData()
    form.add_field("file", text.encode(), filename=f"{len(text)}.txt", content_type="text/plain")
    async with webui.post("/api/v1/files/?process_in_background=false", data=form) as response:
        assert response.status == 200, await response.text()
        file = await response.json()
    await post(webui, f"/api/v1/knowledge/{collection}/file/add", {"file_id": file["id"]})


async def test_an_answer_uses_the_best_document(webui: aiohttp.ClientSession, gateway: tuple[str, FakeModes]) -> None:
    collection = (await post(webui, "/api/v1/knowledge/create", {"name": "facts", "description": "facts"}))["id"]
    for text in DOCUMENTS:
        await add_document(webui, collection, text)
    answer = await post(
        webui,
        "/api/chat/completions",
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": QUESTION}],
            "files": [{"type": "collection", "id": collection}],
            "stream": False,
        },
    )
    prompt = answer["choices"][0]["message"]["content"]
    assert QUESTION in prompt
    assert [text in prompt for text in DOCUMENTS] == [True, False, False]
    assert {"/v1/embeddings", "/v1/rerank"} <= {request.path for request in gateway[1].requests}


async def test_text_is_read_aloud(webui: aiohttp.ClientSession, gateway: tuple[str, FakeModes]) -> None:
    async with webui.post("/api/v1/audio/speech", json={"input": "Say this.", "voice": "alloy"}) as response:
        assert response.status == 200, await response.text()
        assert await response.read() == b"".join(gateway[1].audio)
    assert gateway[1].requests[-1].path == "/v1/audio/speech"
