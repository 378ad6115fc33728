"""Defaults of a model for fields that a request does not give: the request wins, on every API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import config_of, gateway
from tests.e2e.keyed import bearing, keyed
from tests.fakes import FakeVllm
from unisono.bootstrap.models import rules_by_model
from unisono.config import ModelRegistry, parse
from unisono.core.passthrough_request import Api
from unisono.errors import ConfigError
from unisono.harmony.encoding import load_encoding
from unisono_adapters.openai_api import with_defaults

ANSWER = load_encoding().encode_marked('<|channel|>final<|message|>{"a": 1}<|return|>')
MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
DEFAULTS: dict[str, Any] = {
    "temperature": 0.25,
    "max_tokens": 77,
    "stop": ["END"],
    "reasoning_effort": "high",
    "response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}},
    "extra_body": {"repetition_penalty": 1.25, "top_k": 7},
}
# Path, body, and a body whose own values win over the defaults.
SURFACES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES},
        {"temperature": 0.5, "max_completion_tokens": 55, "reasoning_effort": "low"},
    ),
    "responses": (
        "/v1/responses",
        {"input": "Hi"},
        {"temperature": 0.5, "max_output_tokens": 55, "reasoning": {"effort": "low"}},
    ),
    "messages": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 77},
        {"temperature": 0.5, "max_tokens": 55, "output_config": {"effort": "low"}},
    ),
}


def config(url: str, **params: Any) -> dict[str, Any]:
    settings = config_of(f"vllm@{url}")
    settings["model_list"][0]["litellm_params"] |= params
    return settings


@pytest.mark.parametrize("name", SURFACES)
async def test_defaults_apply_to_fields_that_a_request_does_not_give(name: str) -> None:
    path, body, own = SURFACES[name]
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config(fake.url, **DEFAULTS)) as server:
        firsts = []
        for more in ({}, own):
            # An answer with a required form may take several requests.
            firsts.append(len(fake.requests))
            sent = json.dumps({"model": "gpt-oss", **body, **more}).encode()
            assert (await server.post(path, sent)).status == 200
        default, given = (fake.requests[first].json for first in firsts)
    prompts = [load_encoding().decode(sent["prompt"]) for sent in (default, given)]
    assert "Reasoning: high" in prompts[0]
    assert "Reasoning: low" in prompts[1]
    # The required form of the answer is part of the prompt.
    assert all('"a"' in prompt or "a: number" in prompt for prompt in prompts)
    assert (default["temperature"], given["temperature"]) == (0.25, 0.5)
    assert (default["max_tokens"], given["max_tokens"]) == (77, 55)
    assert {sent["repetition_penalty"] for sent in (default, given)} == {1.25}
    assert {sent["top_k"] for sent in (default, given)} == {7}


async def test_the_defaults_stop_strings_end_an_answer() -> None:
    tokens = load_encoding().encode_marked("<|channel|>final<|message|>one END two<|return|>")
    async with FakeVllm(tokens=tokens) as fake, gateway(config(fake.url, stop=["END"])) as server:
        for more, text in (({}, "one "), ({"stop": "two"}, "one END ")):
            answer = await server.chat(**more)
            assert answer.body["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"temperature": 9}, "litellm_params.temperature"),
        ({"reasoning_effort": "huge"}, "litellm_params.reasoning_effort"),
        ({"response_format": {"type": "xml"}}, "litellm_params.response_format"),
        ({"extra_body": {"tools": []}}, "litellm_params.extra_body.tools"),
        ({"extra_body": {"guided_regex": "(["}}, "litellm_params.extra_body.guided_regex"),
    ],
    ids=str,
)
def test_an_invalid_default_is_a_configuration_error(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        rules_by_model(ModelRegistry(parse(config("http://127.0.0.1:1", **params), {}).config))


def test_entries_of_one_model_have_equal_defaults() -> None:
    settings = config_of("vllm@http://127.0.0.1:1", "vllm@http://127.0.0.1:2")
    settings["model_list"][1]["litellm_params"]["temperature"] = 0.5
    with pytest.raises(ConfigError, match=r"model_list\[1\]\.litellm_params: the defaults for requests differ"):
        ModelRegistry(parse(settings, {}).config)
    settings["model_list"][0]["litellm_params"]["temperature"] = 0.5
    assert list(ModelRegistry(parse(settings, {}).config).groups())


@pytest.mark.parametrize(
    ("api", "body", "sent"),
    [
        (Api.CHAT, {}, {"temperature": 0.5, "max_tokens": 9, "reasoning_effort": "low"}),
        (
            Api.CHAT,
            {"temperature": 0, "max_completion_tokens": 5, "reasoning_effort": None},
            {"temperature": 0, "max_completion_tokens": 5, "reasoning_effort": "low"},
        ),
        (
            Api.RESPONSES,
            {"reasoning": {"summary": "auto"}},
            {"temperature": 0.5, "max_output_tokens": 9, "reasoning": {"effort": "low", "summary": "auto"}},
        ),
        (
            Api.RESPONSES,
            {"reasoning": {"effort": "high"}, "max_output_tokens": 5},
            {"temperature": 0.5, "max_output_tokens": 5, "reasoning": {"effort": "high"}},
        ),
    ],
    ids=str,
)
def test_defaults_of_pass_through_models_are_sent(api: Api, body: dict[str, Any], sent: dict[str, Any]) -> None:
    assert with_defaults(body, {"temperature": 0.5, "max_tokens": 9, "reasoning_effort": "low"}, api) == sent


async def test_a_pass_through_server_gets_the_defaults() -> None:
    async with FakeVllm() as fake:
        settings = config_of(f"vllm@{fake.url}", name="llama")
        settings["model_list"][0]["litellm_params"]["temperature"] = 0.5
        async with gateway(settings) as server:
            await server.chat(model="llama")
            await server.chat(model="llama", temperature=0.75)
        assert [request.json["temperature"] for request in fake.requests] == [0.5, 0.75]


def test_litellm_gets_the_defaults_of_its_entries() -> None:
    entry = {"model_name": "gpt-4o", "litellm_params": {"model": "openai/gpt-4o", "temperature": 0.5}}
    [read] = parse({"model_list": [entry]}, {}).config.model_list
    assert read.litellm_params.provider == {"temperature": 0.5}


async def test_a_key_may_use_the_models_of_its_access_groups(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        settings = config_of(f"vllm@{fake.url}")
        settings["model_list"] += config_of(f"vllm@{fake.url}", name="gpt-oss-beta")["model_list"]
        settings["model_list"][1]["model_info"] = {"access_groups": ["beta"]}
        async with keyed(settings, tmp_path) as (server, keys):
            for group, allowed in (("beta", ["gpt-oss-beta"]), ("other", [])):
                _, key = await keys.issue(models=frozenset({group}))
                listed = (await server.get("/v1/models", **bearing(key))).body["data"]
                assert [model["id"] for model in listed] == allowed
                for model in ("gpt-oss", "gpt-oss-beta"):
                    sent = json.dumps({"model": model, "messages": MESSAGES}).encode()
                    answer = await server.post("/v1/chat/completions", sent, **bearing(key))
                    assert answer.status == (200 if model in allowed else 403)
