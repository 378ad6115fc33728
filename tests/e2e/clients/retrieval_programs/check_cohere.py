"""Cohere's SDK: both versions of its rerank API."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cohere
import pytest
from retrieval_programs.conftest import DOCUMENTS, QUESTION, TIMEOUT_S

if TYPE_CHECKING:
    from conftest import Stage

CLIENTS = {"version 1": cohere.Client, "version 2": cohere.ClientV2}


@pytest.mark.parametrize("kind", CLIENTS.values(), ids=CLIENTS)
def test_documents_are_ordered(stage: Stage, kind: type[cohere.Client] | type[cohere.ClientV2]) -> None:
    client = kind(stage.key, base_url=stage.scripted, timeout=TIMEOUT_S)
    answer = client.rerank(model="word-ranker", query=QUESTION, documents=[*reversed(DOCUMENTS)], top_n=2)
    assert answer.results[0].index == len(DOCUMENTS) - 1
    assert answer.results[0].relevance_score > answer.results[1].relevance_score
    assert len(answer.results) == 2


def test_errors_are_those_of_the_sdk(stage: Stage) -> None:
    with pytest.raises(cohere.errors.UnauthorizedError):
        cohere.ClientV2("sk-wrong", base_url=stage.scripted).rerank(model="word-ranker", query="a", documents=["b"])
    client = cohere.ClientV2(stage.key, base_url=stage.scripted)
    with pytest.raises(cohere.errors.NotFoundError):
        client.rerank(model="unknown", query="a", documents=["b"])
    with pytest.raises(cohere.errors.BadRequestError) as raised:
        client.rerank(model="word-vectors", query="a", documents=["b"])
    assert raised.value.body["error"]["param"] == "model"


async def test_the_asynchronous_client_orders_documents(stage: Stage) -> None:
    async with cohere.AsyncClientV2(stage.key, base_url=stage.scripted, timeout=TIMEOUT_S) as client:
        answer = await client.rerank(model="word-ranker", query=QUESTION, documents=[*DOCUMENTS])
    assert answer.results[0].index == 0
    assert len(answer.results) == len(DOCUMENTS)
