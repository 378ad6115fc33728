"""Reranking, scores, moderations and images of models that pass through."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway
from tests.e2e.keyed import bearing, keyed
from tests.fakes import Refusal
from tests.fakes.openai_modes import FakeModes
from tests.passthrough.test_passing_chat import entry, served
from tests.passthrough.test_passing_counted import used_by
from unisono.core.quotas import TokenUsage


@dataclass(frozen=True)
class Case:
    """API with a mode, a body, the field that it needs, and the tokens that the server reports."""

    path: str
    mode: str
    body: dict[str, Any]
    field: str
    usage: TokenUsage
    sent_to: str = ""


RERANK = {"query": "long", "documents": ["a", {"text": "a long text"}], "top_n": 1, "odd": [None]}
CASES = {
    "embeddings": Case("/v1/embeddings", "embedding", {"input": "Hi"}, "input", TokenUsage(input=1)),
    "rerank": Case("/v1/rerank", "rerank", RERANK, "query", TokenUsage(input=2)),
    "rerank of Cohere": Case("/v2/rerank", "rerank", RERANK, "query", TokenUsage(input=2), "/v1/rerank"),
    "rerank by a model for scores": Case("/rerank", "score", RERANK, "query", TokenUsage(input=2), "/v1/rerank"),
    "score": Case("/v1/score", "score", {"text_1": "a", "text_2": ["b"]}, "text_1", TokenUsage(input=2)),
    "score by a reranker": Case("/v1/score", "rerank", {"queries": "a", "documents": []}, "", TokenUsage(input=2)),
    "moderations": Case("/v1/moderations", "moderation", {"input": ["a" * 12] * 3}, "input", TokenUsage(input=13)),
    "images": Case(
        "/v1/images/generations",
        "image_generation",
        {"prompt": "a cat", "n": 2},
        "prompt",
        TokenUsage(input=3, output=40),
    ),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def model(base: str, mode: str, *, name: str = "other", **params: Any) -> dict[str, Any]:
    return {**entry(base, "vllm/bge", name=name, **params), "model_info": {"mode": mode}}


@asynccontextmanager
async def passed(case: Case, script: Refusal | None = None) -> AsyncIterator[tuple[Gateway, FakeModes]]:
    async with FakeModes(script) as fake, served(model(fake.url, case.mode)) as running:
        yield running, fake


async def ask(running: Gateway, case: Case, *, key: str = "", **fields: Any) -> Answer:
    body = json.dumps({"model": "other", **case.body, **fields}).encode()
    return await running.post(case.path, body, **(bearing(key) if key else {}))


@EVERY
async def test_body_and_answer_are_unchanged_except_for_the_model(case: Case) -> None:
    async with passed(case) as (running, fake):
        answer = await ask(running, case)
        [request] = fake.requests
        expected = fake._answer(request.path, {**case.body, "model": "other"})
    assert answer.status == 200, answer.raw
    assert request.path == (case.sent_to or case.path)
    assert request.json == {**case.body, "model": "bge"}
    assert answer.body == expected
    assert answer.headers["x-unisono-backend"] == "vllm-1"


@EVERY
async def test_a_model_of_another_mode_is_refused(case: Case) -> None:
    async with FakeModes() as fake, served(entry(fake.url, name="other")) as running:
        answer = await ask(running, case)
    assert (answer.status, answer.body["error"]["param"]) == (400, "model")
    assert "/v1/chat/completions" in answer.body["error"]["message"]
    assert not fake.requests


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.field], ids=lambda case: case.path)
async def test_a_missing_field_is_named(case: Case) -> None:
    async with passed(case) as (running, fake):
        answer = await ask(running, case, **{case.field: None})
    assert (answer.status, answer.body["error"]["param"]) == (400, case.field)
    assert not fake.requests


@EVERY
async def test_a_stream_is_refused(case: Case) -> None:
    async with passed(case) as (running, _):
        answer = await ask(running, case, stream="yes" if case.mode == "image_generation" else True)
    assert (answer.status, answer.body["error"]["param"]) == (400, "stream")


@EVERY
async def test_another_deployment_answers_after_a_failure(case: Case) -> None:
    async with FakeModes(Refusal(500, b"{}")) as broken, FakeModes() as works:
        entries = model(broken.url, case.mode, order=0), model(works.url, case.mode, order=1)
        async with served(*entries) as running:
            answer = await ask(running, case)
    assert answer.status == 200
    assert len(broken.requests) == len(works.requests) == 1


@EVERY
async def test_usage_is_charged_to_the_key(case: Case, tmp_path: Path) -> None:
    async with FakeModes() as fake, keyed({"model_list": [model(fake.url, case.mode)]}, tmp_path) as (running, keys):
        record, key = await keys.issue()
        answer = await ask(running, case, key=key)
        used = await used_by(running, record.tenant, record.id)
    assert answer.status == 200
    assert (used.requests, used.input, used.output) == (1, case.usage.input, case.usage.output)


async def test_the_only_model_of_a_mode_needs_no_name() -> None:
    case = CASES["moderations"]
    async with FakeModes() as fake:
        async with served(model(fake.url, case.mode), entry(fake.url, name="text")) as running:
            answer = await ask(running, case, model=None)
            assert (answer.status, answer.body["model"]) == (200, "other")
        async with served(model(fake.url, case.mode), model(fake.url, case.mode, name="second")) as running:
            for name in (None, ""):
                ambiguous = (await ask(running, case, model=name)).body["error"]
                assert (ambiguous["code"], ambiguous["param"]) == ("invalid_value", "model")


async def test_a_default_model_of_another_mode_is_named() -> None:
    settings = {"completion_model": "text"}
    async with FakeModes() as fake, served(entry(fake.url, name="text"), general_settings=settings) as running:
        answer = await ask(running, CASES["moderations"], model=None)
    assert answer.status == 400
    assert "The model `text` has the mode `chat`" in answer.body["error"]["message"]


LISTS = {
    "of SGLang": (b'[{"score": 0.5, "index": 1, "document": "b"}]', {"score": 0.5, "index": 1, "document": "b"}),
    "of Cohere's names": (b'[{"relevance_score": 0.5, "index": 1}]', {"index": 1}),
}


@pytest.mark.parametrize(("sent", "kept"), LISTS.values(), ids=LISTS)
async def test_a_list_of_documents_becomes_coheres_object(sent: bytes, kept: dict[str, Any]) -> None:
    case = CASES["rerank"]
    async with passed(case, Refusal(200, sent)) as (running, _):
        answer = await ask(running, case)
    assert answer.body == {"results": [{**kept, "relevance_score": 0.5}]}


async def test_a_request_that_a_guardrail_masks_is_refused_for_good() -> None:
    case = CASES["embeddings"]
    mail = {"pattern_type": "prebuilt", "pattern_name": "email", "action": "MASK"}
    params = {"guardrail": "litellm_content_filter", "mode": "pre_call", "default_on": True, "patterns": [mail]}
    guardrails = [{"guardrail_name": "mail", "litellm_params": params}]
    async with FakeModes() as fake, served(model(fake.url, case.mode), guardrails=guardrails) as running:
        refused = await ask(running, case, input=["fine", "ann@example.com"])
    error = refused.body["error"]
    assert (refused.status, error["code"], error["param"]) == (400, "refused_by_hook", "input")
    # A client that tried again would be refused again.
    assert refused.headers["x-should-retry"] == "false"
    assert not fake.requests


async def test_guardrails_check_texts_and_not_vectors(tmp_path: Path) -> None:
    hooks = {"hooks": [{"blocklist": {"patterns": {"word": "forbidden"}, "where": ["input"]}}]}
    for name in ("embeddings", "rerank", "moderations", "images"):
        case = CASES[name]
        async with FakeModes() as fake, served(model(fake.url, case.mode), unisono=hooks) as running:
            value = ["fine", "a forbidden word"] if case.field == "input" else "a forbidden word"
            refused = await ask(running, case, **{case.field: value})
            allowed = await ask(running, case)
        assert (refused.status, refused.body["error"]["param"]) == (400, case.field)
        assert allowed.status == 200
        assert len(fake.requests) == 1
