"""LiteLLM's settings that restrict access: addresses, end users, blocked models, recordings."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.e2e.gateway import config_of, gateway
from tests.fakes import FakeVllm
from unisono.config import parse
from unisono.errors import ConfigError
from unisono.harmony.encoding import load_encoding

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hi.<|return|>")
KEY = "sk-operator-of-access"
MESSAGES = [{"role": "user", "content": "Hi"}]
# Path, body, the field that names the end user, and a body that names one.
SURFACES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, "user", {"user": "u-1"}),
    "chat, safety identifier": ("/v1/chat/completions", {"messages": MESSAGES}, "user", {"safety_identifier": "u-1"}),
    "responses": ("/v1/responses", {"input": "Hi", "store": False}, "user", {"user": "u-1"}),
    "messages": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 9},
        "metadata.user_id",
        {"metadata": {"user_id": "u-1"}},
    ),
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": 9}, "user", {"user": "u-1"}),
}


def config(url: str, **general: Any) -> dict[str, Any]:
    return {
        **config_of(f"vllm@{url}", general_settings={"master_key": KEY, **general}),
        "unisono": {"raw_completions": True},
    }


@pytest.mark.parametrize("name", SURFACES)
async def test_a_request_without_an_end_user_is_refused_if_the_operator_requires_one(name: str) -> None:
    path, body, field, named = SURFACES[name]
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config(fake.url, enforce_user_param=True)) as server:
        for more, status in (({}, 400), ({"user": ""}, 400), (named, 200)):
            sent = json.dumps({"model": "gpt-oss", **body, **more}).encode()
            answer = await server.post(path, sent, authorization=f"Bearer {KEY}")
            assert answer.status == status, answer.raw
            if status == 400:
                assert field in answer.body["error"]["message"]
        assert len(fake.requests) == 1
        assert (await server.get("/v1/models", authorization=f"Bearer {KEY}")).status == 200


@pytest.mark.parametrize(
    ("networks", "allowed"),
    [
        (["127.0.0.1"], True),
        (["10.0.0.0/8", "127.0.0.0/8"], True),
        (["127.0.0.9/8"], True),
        (["10.0.0.1"], False),
        (["::1"], False),
    ],
    ids=str,
)
async def test_only_listed_addresses_may_send_requests(networks: list[str], allowed: bool) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config(fake.url, allowed_ips=networks)) as server:
        for path, body, *_ in SURFACES.values():
            sent = json.dumps({"model": "gpt-oss", **body}).encode()
            answer = await server.post(path, sent, authorization=f"Bearer {KEY}")
            assert answer.status == (200 if allowed else 403)
            if not allowed:
                assert "allowed_ips" in answer.body["error"]["message"]
        # A wrong key is not checked before the address.
        assert (await server.get("/v1/models", authorization="Bearer sk-x")).status == (401 if allowed else 403)
        assert (await server.get("/health/liveliness")).status == 200


PROXY = {"use_x_forwarded_for": True, "trusted_proxy_ranges": ["127.0.0.1", "10.0.0.0/8"]}


@pytest.mark.parametrize(
    ("forwarded", "settings", "allowed"),
    [
        ("192.0.2.7", PROXY, True),
        ("192.0.2.7, 10.1.1.1", PROXY, True),
        ("192.0.2.8", PROXY, False),
        ("192.0.2.7, 192.0.2.8", PROXY, False),  # the client wrote the first address itself
        ("unknown", PROXY, False),
        ("", PROXY, False),
        ("192.0.2.7", {**PROXY, "trusted_proxy_ranges": ["10.0.0.0/8"]}, False),  # not from a trusted proxy
        ("192.0.2.7", {**PROXY, "use_x_forwarded_for": False}, False),
    ],
    ids=str,
)
async def test_the_address_behind_a_trusted_proxy_is_that_of_the_client(
    forwarded: str, settings: dict[str, Any], allowed: bool
) -> None:
    config_ = config("http://127.0.0.1:9", allowed_ips=["192.0.2.7"], **settings)
    async with gateway(config_) as server:
        answer = await server.get("/v1/models", authorization=f"Bearer {KEY}", **{"x-forwarded-for": forwarded})
        assert answer.status == (200 if allowed else 403)


def test_forwarded_addresses_need_the_addresses_of_the_proxies() -> None:
    with pytest.raises(
        ConfigError, match=r"general_settings: `use_x_forwarded_for` requires .* `trusted_proxy_ranges`"
    ):
        parse({"general_settings": {"allowed_ips": ["192.0.2.7"], "use_x_forwarded_for": True}}, {})


@pytest.mark.parametrize("networks", [["10.0.0.300"], []], ids=str)
def test_an_invalid_address_and_an_empty_list_are_configuration_errors(networks: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"general_settings.allowed_ips"):
        parse({"general_settings": {"allowed_ips": networks}}, {})


async def test_a_blocked_entry_gets_no_requests() -> None:
    async with FakeVllm(tokens=ANSWER) as fake, FakeVllm(tokens=ANSWER) as blocked:
        settings = config(fake.url)
        settings["model_list"] += config_of(f"vllm@{blocked.url}")["model_list"]
        settings["model_list"] += config_of(f"vllm@{blocked.url}", name="gpt-oss-other")["model_list"]
        for entry in settings["model_list"][1:]:
            entry["model_info"] = {"blocked": True}
        async with gateway(settings) as server:
            for _ in range(4):
                sent = json.dumps({"model": "gpt-oss", "messages": MESSAGES}).encode()
                assert (await server.post("/v1/chat/completions", sent, authorization=f"Bearer {KEY}")).status == 200
            sent = json.dumps({"model": "gpt-oss-other", "messages": MESSAGES}).encode()
            assert (await server.post("/v1/chat/completions", sent, authorization=f"Bearer {KEY}")).status == 404
            models = (await server.get("/v1/models", authorization=f"Bearer {KEY}")).body["data"]
        assert [model["id"] for model in models] == ["gpt-oss"]
        assert not blocked.requests


@pytest.mark.parametrize("off", [False, True], ids=["recorded", "not recorded"])
async def test_no_content_is_recorded_if_message_logging_is_off(off: bool) -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        settings = config(fake.url)
        settings["unisono"]["traces"] = {"mode": "all"}
        settings["litellm_settings"] = {"turn_off_message_logging": off}
        async with gateway(settings) as server:
            sent = json.dumps({"model": "gpt-oss", "messages": MESSAGES}).encode()
            assert (await server.post("/v1/chat/completions", sent, authorization=f"Bearer {KEY}")).status == 200
            for _ in range(50):
                listed = await server.get("/v1/traces", authorization=f"Bearer {KEY}")
                if listed.body["data"]:
                    break
                await asyncio.sleep(0.05)
            assert bool(listed.body["data"]) is not off
