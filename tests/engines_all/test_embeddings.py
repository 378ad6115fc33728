"""Embeddings, ranks and scores of real engines, through the gateway and asked directly.

The engines are llama-server with the demo model, and vLLM with an embedding model.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.gateway import gateway
from tests.engines_all.engines import Running, running

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

INPUTS = ["The sea is warm.", "Meer", "a", "日本語 é", *(f"text {number}" for number in range(40))]
REQUESTS: dict[str, dict[str, Any]] = {
    "a text": {"input": INPUTS[0]},
    "a list": {"input": INPUTS[:4]},
    "token ids": {"input": [[200, 3000, 17], [5]]},
    "base64": {"input": INPUTS[:4], "encoding_format": "base64"},
}


@pytest.fixture(scope="module")
def vllm_embedder() -> Iterator[Running]:
    with running("embedder") as started:
        yield started


@pytest.fixture(scope="module")
def llamacpp_embedder() -> Iterator[Running]:
    # One slot, because texts that are computed together differ in their last digits.
    with running("llamacpp", None, "--embeddings", "--pooling", "mean", "-np", "1") as started:
        yield started


@pytest.fixture(params=["llamacpp_embedder", "vllm_embedder"])
def embedder(request: pytest.FixtureRequest) -> Running:
    found: Running = request.getfixturevalue(request.param)
    return found


def config_for(embedder: Running, *sizes: int | None, mode: str = "embedding") -> dict[str, Any]:
    """Return a configuration with one entry for each maximum size of a part."""
    engine = embedder.engine
    entry = {
        "model_name": "vectors",
        "litellm_params": {"model": f"{engine.kind}/{engine.model}", "api_base": embedder.url},
        "model_info": {"mode": mode},
    }
    if mode != "embedding":
        return {"model_list": [entry]}
    return {"model_list": [{**entry, "unisono": {"max_embedding_batch_size": size}} for size in sizes]}


def ask_directly(embedder: Running, body: dict[str, Any], path: str = "/v1/embeddings") -> Any:
    request = urllib.request.Request(
        f"{embedder.url}{path}",
        json.dumps({"model": embedder.engine.model, **body}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.mark.parametrize("body", REQUESTS.values(), ids=REQUESTS)
async def test_vectors_are_those_of_the_engine(embedder: Running, body: dict[str, Any]) -> None:
    direct = ask_directly(embedder, body)
    async with gateway(config_for(embedder, None)) as site:
        answer = await site.post("/v1/embeddings", json.dumps({"model": "vectors", **body}).encode())
    assert answer.status == 200, answer.raw
    # Texts of numbers are compared too, so that no digit is lost.
    assert json.dumps(answer.body["data"]) == json.dumps(direct["data"])
    assert answer.body["usage"] == direct["usage"]


async def test_vectors_of_a_split_list_are_those_of_single_requests(embedder: Running) -> None:
    async with gateway(config_for(embedder, 1, None)) as site:
        answer = await site.post("/v1/embeddings", json.dumps({"model": "vectors", "input": INPUTS}).encode())
    assert answer.status == 200, answer.raw
    direct = [ask_directly(embedder, {"input": [text]})["data"][0]["embedding"] for text in INPUTS]
    vectors = [one["embedding"] for one in answer.body["data"]]
    if embedder.engine.kind == "llamacpp":
        assert vectors == direct
    else:
        # vLLM computes several texts together, which changes the last digits.
        for vector, expected in zip(vectors, direct, strict=True):
            assert vector == pytest.approx(expected, abs=1e-5)
    assert [one["index"] for one in answer.body["data"]] == [*range(len(INPUTS))]


RANKED = {
    "rerank": ("/v1/rerank", {"query": "A cat sleeps.", "documents": ["Tax law", "A kitten dozes.", "The sea"]}),
    "score": ("/v1/score", {"text_1": "A cat sleeps.", "text_2": ["Tax law", "A kitten dozes."]}),
}


@pytest.mark.parametrize("mode", RANKED)
async def test_ranks_are_those_of_the_engine(vllm_embedder: Running, mode: str) -> None:
    path, body = RANKED[mode]
    direct = ask_directly(vllm_embedder, body, path)
    async with gateway(config_for(vllm_embedder, mode=mode)) as site:
        answer = await site.post(path, json.dumps({"model": "vectors", **body}).encode())
    assert answer.status == 200, answer.raw
    results = "results" if mode == "rerank" else "data"
    assert json.dumps(answer.body[results]) == json.dumps(direct[results])
    best = max(answer.body[results], key=lambda one: one.get("relevance_score", one.get("score")))
    assert best["index"] == 1
