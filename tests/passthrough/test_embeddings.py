"""Embeddings of models that pass through: bodies, vectors, failures, keys and usage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway
from tests.e2e.keyed import bearing, keyed
from tests.fakes import FakeVllm, Refusal
from tests.fakes.openai_modes import FakeModes, vector_of
from tests.passthrough.test_passing_chat import entry, oss_entry, served
from tests.passthrough.test_passing_counted import used_by
from unisono.config import parse
from unisono.core.quotas import KeyLimits, TokenUsage
from unisono.errors import ConfigError


def embedder(base: str, model: str = "vllm/bge", *, name: str = "other", **params: Any) -> dict[str, Any]:
    return {**entry(base, model, name=name, **params), "model_info": {"mode": "embedding"}}


async def embed(running: Gateway, *, path: str = "/v1/embeddings", key: str = "", **fields: Any) -> Answer:
    body = json.dumps({"model": "other", "input": "Hi", **fields}).encode()
    return await running.post(path, body, **(bearing(key) if key else {}))


# -- unchanged


ODD = {"input": ["a", "é"], "dimensions": 3, "truncate_prompt_tokens": -1, "nobody_knows": {"this": [1, None]}}


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "ollama", "hosted_vllm"])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
async def test_the_body_is_forwarded_unchanged_except_for_the_model(kind: str, path: str) -> None:
    async with FakeModes() as fake, served(embedder(fake.url, f"{kind}/bge:large", api_key="backend-key")) as running:
        answer = await embed(running, path=path, **ODD)
    assert answer.status == 200, answer.raw
    [request] = fake.requests
    assert request.path == "/v1/embeddings"
    assert request.json == {**ODD, "model": "bge:large"}
    assert request.headers["authorization"] == "Bearer backend-key"


VALUES = [0.1, -1e-9, 3.4028234663852886e38, 1.401298464324817e-45, 0.30000001192092896, -0.0]


async def test_vectors_are_those_of_the_backend() -> None:
    extra = {"id": "embd-1", "created": 7, "unknown": {"a": [None]}}
    async with FakeModes(vector=lambda _: VALUES, extra=extra) as fake, served(embedder(fake.url)) as running:
        answer = await embed(running, input=["a", "b"])
    data = [{"object": "embedding", "index": index, "embedding": VALUES} for index in range(2)]
    usage = {"prompt_tokens": 2, "total_tokens": 2}
    assert answer.body == {"object": "list", "data": data, "model": "other", "usage": usage, **extra}
    assert [str(value) for value in answer.body["data"][0]["embedding"]] == [str(value) for value in VALUES]
    assert answer.headers["x-unisono-backend"] == "vllm-1"


async def test_base64_vectors_are_not_read() -> None:
    async with FakeModes() as fake, served(embedder(fake.url)) as running:
        answer = await embed(running, input="four", encoding_format="base64")
    assert answer.body["data"][0]["embedding"] == vector_of("four", base64=True)


async def test_credentials_of_the_client_are_not_forwarded(tmp_path: Path) -> None:
    async with FakeModes() as fake, keyed({"model_list": [embedder(fake.url)]}, tmp_path) as (running, keys):
        _, key = await keys.issue()
        body = json.dumps({"model": "other", "input": "Hi"}).encode()
        sent = {"x-api-key": key, "cookie": "a=b", "openai-organization": "org", "x-forwarded-for": "1.2.3.4"}
        assert (await running.post("/v1/embeddings", body, **sent)).status == 200
        refused = await running.post("/v1/embeddings", body, authorization="Bearer sk-unknown")
    assert refused.status == 401
    [request] = fake.requests
    assert not {"authorization", *sent} & request.headers.keys()
    assert key not in request.body.decode()


# -- routing


async def test_a_failed_deployment_is_replaced_by_another() -> None:
    async with (
        FakeModes(Refusal(500, b"{}")) as broken,
        FakeModes() as works,
        served(embedder(broken.url, order=0), embedder(works.url, order=1)) as running,
    ):
        answer = await embed(running)
    assert answer.status == 200
    assert len(broken.requests) == len(works.requests) == 1
    assert answer.headers["x-unisono-backend"] == "vllm-2"
    assert answer.headers["x-unisono-failovers"] == "1"


async def test_a_fallback_model_of_the_same_mode_answers() -> None:
    settings = {"fallbacks": [{"other": ["spare"]}], "default_fallbacks": ["gpt-oss"]}
    async with (
        FakeModes(Refusal(503, b"{}")) as broken,
        FakeModes() as works,
        FakeVllm([]) as oss,
        served(
            embedder(broken.url),
            embedder(works.url, name="spare"),
            oss_entry(oss.url, "gpt-oss"),
            router_settings=settings,
        ) as running,
    ):
        answer = await embed(running)
        # The default fallback generates text, so it does not stand in for embeddings.
        chosen = await embed(running, fallbacks=["gpt-oss"])
    assert answer.status == 200
    assert answer.body["model"] == "other"
    assert answer.headers["x-unisono-served-model"] == "spare"
    assert (chosen.status, chosen.body["error"]["param"]) == (400, "fallbacks.0")
    assert not oss.requests


async def test_an_input_longer_than_the_context_window_is_left_to_the_server() -> None:
    # Servers truncate, and a list of inputs shares no window.
    async with FakeModes(context=16) as fake, served(embedder(fake.url)) as running:
        answer = await embed(running, input=["word " * 100] * 3)
    assert answer.status == 200


@pytest.mark.parametrize("left", [False, True], ids=["answered", "disconnected"])
async def test_a_client_disconnect_ends_the_backend_request(left: bool) -> None:
    async with FakeModes(delay_s=0.0 if not left else 60.0) as fake, served(embedder(fake.url)) as running:
        task = asyncio.ensure_future(embed(running))
        await fake.asked()
        if left:
            task.cancel()
            await fake.gone()
        else:
            assert (await task).status == 200


# -- refusals and failures

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input"),
    "a number": ({"input": 7}, "input"),
    "an empty list": ({"input": []}, "input"),
    "an odd model": ({"model": 7}, "model"),
    "an unknown model": ({"model": "nobody"}, "model"),
    "a long name": ({"model": "x" * 100_000}, "model"),
    "odd retries": ({"num_retries": "many"}, "num_retries"),
}


@pytest.mark.parametrize(("fields", "param"), BAD.values(), ids=BAD)
async def test_an_invalid_request_names_the_field(fields: dict[str, Any], param: str) -> None:
    async with FakeModes() as fake, served(embedder(fake.url)) as running:
        answer = await embed(running, **fields)
    assert answer.status in (400, 404)
    assert answer.body["error"]["param"] == param
    assert len(answer.raw) < 1_000
    assert not fake.requests


FAILED: dict[str, tuple[Refusal, int, str, str]] = {
    "invalid request": (
        Refusal(400, b'{"error": {"message": "dimensions is odd"}}'),
        400,
        "backend_rejected_request",
        "dimensions is odd",
    ),
    "invalid gateway key": (Refusal(401, b'{"error": "bad key sk-secret"}'), 503, "backend_unavailable", ""),
    "server error": (Refusal(500, b"trace at /home/somebody"), 502, "backend_error", ""),
    "invalid JSON": (Refusal(200, b"<html>"), 502, "backend_protocol_error", ""),
    "a list": (Refusal(200, b"[1]"), 502, "backend_protocol_error", ""),
    "error with status 200": (Refusal(200, b'{"object": "error", "code": 400}'), 400, "backend_rejected_request", ""),
    "fields": (
        Refusal(422, b'{"detail": [{"loc": ["body", "input", 0], "msg": "too odd", "type": "a"}]}'),
        400,
        "backend_rejected_request",
        "rejected the request: input.0: too odd",
    ),
    "no objects": (Refusal(200, b'{"data": [null]}'), 502, "backend_protocol_error", ""),
    "no such route": (Refusal(404, b"{}"), 502, "backend_error", ""),
}


@pytest.mark.parametrize(("refusal", "status", "code", "detail"), FAILED.values(), ids=FAILED)
async def test_a_failure_has_the_error_shape_of_the_api(refusal: Refusal, status: int, code: str, detail: str) -> None:
    async with FakeModes(refusal) as fake, served(embedder(fake.url), router_settings={"num_retries": 0}) as running:
        answer = await embed(running)
    assert (answer.status, answer.body["error"]["code"]) == (status, code)
    assert detail in answer.body["error"]["message"]
    assert "secret" not in answer.raw.decode()
    assert "/home" not in answer.raw.decode()


NAMED = {"dimensions": "dimensions", "input[0].text": "input[0].text", "prompt": None, "": None}


async def test_a_field_that_the_server_names_is_named_if_the_client_has_sent_it() -> None:
    async with FakeModes() as fake, served(embedder(fake.url)) as running:
        for sent, named in NAMED.items():
            error = {"message": "odd", "type": "BadRequestError", "param": sent, "code": 400}
            fake.script = Refusal(400, json.dumps({"error": error}).encode())
            refused = await embed(running, dimensions=3)
            assert (refused.status, refused.body["error"]["param"]) == (400, named)


async def test_text_and_embeddings_are_not_confused() -> None:
    async with FakeModes() as fake, FakeVllm([]) as oss:
        async with served(embedder(fake.url), oss_entry(oss.url, "gpt-oss")) as running:
            wrong = [
                (await embed(running, model="gpt-oss"), "/v1/chat/completions"),
                (await running.chat(model="other"), "/v1/embeddings"),
                (await running.post("/v1/responses", b'{"model": "other", "input": "Hi"}'), "/v1/embeddings"),
                (await running.messages(model="other"), "/v1/embeddings"),
            ]
        assert not fake.requests
        assert not oss.requests
    for answer, path in wrong:
        assert answer.status == 400, answer.raw
        assert path in answer.raw.decode()


async def test_a_server_without_the_api_is_not_asked() -> None:
    async with FakeModes() as fake, served(embedder(fake.url, "mlx_server/tiny")) as running:
        answer = await embed(running)
    assert (answer.status, answer.body["error"]["param"]) == (400, "model")
    assert not fake.requests


WRONG_FILES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "two modes under one name": (
        lambda: {"model_list": [embedder("http://a"), entry("http://b")]},
        "model_list[1].model_info.mode",
    ),
    "a fallback of another mode": (
        lambda: {
            "model_list": [embedder("http://a"), entry("http://b", name="text")],
            "router_settings": {"fallbacks": [{"other": ["text"]}]},
        },
        "router_settings.fallbacks[0].other[0]",
    ),
    "Harmony embeddings": (
        lambda: {"model_list": [{**embedder("http://a"), "model_info": {"mode": "embedding", "harmony": True}}]},
        "model_info.harmony",
    ),
}


@pytest.mark.parametrize(("config", "path"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_contradicting_configuration_names_the_key(config: Callable[[], dict[str, Any]], path: str) -> None:
    from unisono.config import ModelRegistry

    with pytest.raises(ConfigError) as error:
        ModelRegistry(parse(config(), {}).config)
    assert path in str(error.value)


async def test_the_model_list_has_the_mode_of_each_model() -> None:
    async with FakeModes() as fake, served(embedder(fake.url), entry(fake.url, name="text")) as running:
        listed = await running.get("/v1/models")
        one = await running.get("/v1/models/other")
        info = await running.get("/model/info")
    assert {model["id"]: model["mode"] for model in listed.body["data"]} == {"other": "embedding", "text": "chat"}
    assert one.body["mode"] == "embedding"
    assert [model["model_info"]["mode"] for model in info.body["data"]] == ["embedding", "chat"]


# -- keys, usage and metrics


def priced(base: str) -> dict[str, Any]:
    return {"model_list": [{**embedder(base), "unisono": {"price": {"input": 100_000}}}]}


USAGES: dict[str, tuple[dict[str, Any] | None, int]] = {
    "as reported": ({"prompt_tokens": 7, "total_tokens": 7}, 7),
    "only a total": ({"total_tokens": 5}, 5),
    "implausible": ({"prompt_tokens": 2**63}, 20),
}


@pytest.mark.parametrize(("usage", "tokens"), USAGES.values(), ids=USAGES)
async def test_usage_is_in_the_ledger_once_the_answer_is_sent(usage: Any, tokens: int, tmp_path: Path) -> None:
    async with FakeModes(usage=usage) as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        record, key = await keys.issue()
        answer = await embed(running, key=key, input="x" * 55)
        used = await used_by(running, record.tenant, record.id)
    assert answer.status == 200
    assert used == TokenUsage(requests=1, input=tokens, cost=tokens * 100_000)


INPUTS: dict[str, Any] = {"text": "some words " * 30, "texts": ["some words "] * 30, "ids": [[7] * 10] * 11}


@pytest.mark.parametrize("value", INPUTS.values(), ids=INPUTS)
async def test_missing_usage_is_estimated(value: Any, tmp_path: Path) -> None:
    async with FakeModes(usage=None) as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        record, key = await keys.issue()
        await embed(running, key=key, input=value)
        used = await used_by(running, record.tenant, record.id)
    assert 110 <= used.input <= 120
    assert used.cost == used.input * 100_000


async def test_limits_and_permissions_of_the_key_apply(tmp_path: Path) -> None:
    async with FakeModes() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, once = await keys.issue(limits=KeyLimits(rpm=1))
        _, elsewhere = await keys.issue(models=frozenset({"gpt-oss"}))
        _, rich = await keys.issue(limits=KeyLimits(token_budget=1_000))
        _, poor = await keys.issue(limits=KeyLimits(token_budget=50))
        statuses = [(await embed(running, key=key)).status for key in (once, once, elsewhere, rich, rich, poor)]
    # The estimate of a request has a margin of 100 tokens, and no tokens of an answer.
    assert statuses == [200, 429, 403, 200, 200, 429]
    assert len(fake.requests) == 3


async def test_metrics_count_embeddings_apart() -> None:
    async with FakeModes() as fake, served(embedder(fake.url)) as running:
        await embed(running)
        async with running.session.get(running.url + "/metrics") as response:
            page = await response.text()
    assert 'unisono_requests_total{model="other",outcome="completed",surface="embeddings"' in page or (
        'surface="embeddings"' in page
    )
