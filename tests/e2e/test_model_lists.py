"""Model lists and the auxiliary model name of Codex, through a whole gateway with virtual keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, config_of
from tests.e2e.keyed import bearing, keyed
from tests.e2e.responses import line
from tests.e2e.wires import WIRES
from tests.fakes import FakeVllm
from unisono.harmony.encoding import load_encoding

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hello.<|return|>")
ANTHROPIC = {"anthropic-version": "2023-06-01"}
PARSED: dict[str, Any] = {
    "OpenAI": ("", {}, lambda body: [(model["id"], model["context_length"]) for model in body["data"]]),
    "Codex": (
        "?client_version=0.169.0",
        {},
        lambda body: [(model["slug"], model["context_window"]) for model in body["models"]],
    ),
    "Anthropic": (
        "?limit=1000",
        ANTHROPIC,
        lambda body: [(model["id"], model["max_input_tokens"]) for model in body["data"]],
    ),
}


async def asked(gateway: Gateway, key: str, model: str) -> Answer:
    return await gateway.post("/v1/responses", json.dumps({"model": model, "input": "Hi"}).encode(), **bearing(key))


async def test_every_format_lists_the_models_of_the_key_with_their_windows(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER, context=4096) as fake:
        config = config_of(f"vllm@{fake.url}")
        config["model_list"].append(
            {"model_name": "other", "litellm_params": {"model": "vllm/tiny", "api_base": fake.url}}
        )
        async with keyed(config, tmp_path) as (gateway, keys):
            _, key = await keys.issue(models=frozenset({"gpt-oss"}))
            # The gateway knows the window after the first request at the latest.
            assert (await asked(gateway, key, "gpt-oss")).status == 200
            for name, (query, headers, listed) in PARSED.items():
                answer = await gateway.get(f"/v1/models{query}", **headers, **bearing(key))
                assert listed(answer.body) == [("gpt-oss", 4096)], name


REVIEWS = "codex-auto-review"
PERMITTED = {"all models": None, "the model": {"gpt-oss"}, "the name": {REVIEWS}}


@pytest.mark.parametrize("models", PERMITTED.values(), ids=PERMITTED)
async def test_reviews_of_codex_go_to_the_only_gpt_oss_model(models: set[str] | None, tmp_path: Path) -> None:
    async with (
        FakeVllm(tokens=ANSWER) as fake,
        keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (gateway, keys),
    ):
        _, key = await keys.issue(models=None if models is None else frozenset(models))
        answer = await asked(gateway, key, REVIEWS)
        assert (answer.status, answer.body["model"]) == (200, REVIEWS)
        _, other = await keys.issue(models=frozenset({"another"}))
        assert (await asked(gateway, other, REVIEWS)).status == 403


# Path, and status and type of the error in Anthropic's format.
WRONG = {
    "/v1/models/nope": (404, "not_found_error"),
    "/v1/models?limit=0": (400, "invalid_request_error"),
    "/v1/models?after_id=nope": (400, "invalid_request_error"),
}


@pytest.mark.parametrize("version", [True, False], ids=["anthropic", "openai"])
async def test_errors_have_the_format_of_the_client(version: bool) -> None:
    headers = ANTHROPIC if version else {}
    async with line(WIRES["vllm"]) as harness:
        for path, (status, kind) in WRONG.items():
            answer = await harness.gateway.get(path, **headers)
            if version:
                assert (answer.status, answer.body["type"], answer.body["error"]["type"]) == (status, "error", kind)
                assert answer.headers["request-id"] == answer.body["request_id"]
            elif "?" not in path:
                assert (answer.status, answer.body["error"]["code"]) == (status, "model_not_found")
