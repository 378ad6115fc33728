"""Embeddings of a real llama-server with the demo model, through the gateway and asked directly."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.gateway import gateway
from tests.engines_all.engines import Running, running

pytestmark = [pytest.mark.engine, pytest.mark.slow]

INPUTS = ["The sea is warm.", "Meer", "a", "日本語 é", *(f"text {number}" for number in range(40))]
REQUESTS: dict[str, dict[str, Any]] = {
    "a text": {"input": INPUTS[0]},
    "a list": {"input": INPUTS[:4]},
    "token ids": {"input": [[200, 3000, 17], [5]]},
    "base64": {"input": INPUTS[:4], "encoding_format": "base64"},
}


@pytest.fixture(scope="module")
def embedder() -> Iterator[Running]:
    # One slot, because texts that are computed together differ in their last digits.
    with running("llamacpp", None, "--embeddings", "--pooling", "mean", "-np", "1") as started:
        yield started


def config_for(embedder: Running, *sizes: int | None) -> dict[str, Any]:
    """Return a configuration with one entry for each maximum size of a part."""
    entry = {
        "model_name": "vectors",
        "litellm_params": {"model": "llamacpp/tiny", "api_base": embedder.url},
        "model_info": {"mode": "embedding"},
    }
    return {"model_list": [{**entry, "unisono": {"max_embedding_batch_size": size}} for size in sizes]}


def ask_directly(embedder: Running, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{embedder.url}/v1/embeddings",
        json.dumps({"model": "tiny", **body}).encode(),
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
    assert [one["embedding"] for one in answer.body["data"]] == direct
    assert [one["index"] for one in answer.body["data"]] == [*range(len(INPUTS))]
