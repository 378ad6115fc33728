"""Settings of LiteLLM's configuration have an effect: with each one, the gateway behaves otherwise than without it."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import config_of, gateway
from tests.fakes import FakeVllm, VllmScript
from unisono.config.general_settings import GeneralSettings
from unisono.config.model_settings import LitellmParams, ModelEntry, ModelInfo
from unisono.config.root_config import LitellmSettings
from unisono.config.router_settings import RouterSettings
from unisono.harmony.encoding import load_encoding

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hi.<|return|>")
TESTS = Path(__file__).parent.parent
CREDENTIALS = [{"credential_name": "box", "credential_values": {"api_key": "sk-of-the-box"}}]
LONG = [{"role": "user", "content": "word " * 300}]
SLOW = VllmScript(tokens=ANSWER, first_delay_s=1.0)


def add_credential(config: dict[str, Any]) -> None:
    config["model_list"][0]["litellm_params"]["litellm_credential_name"] = "box"


def add_second_tag(config: dict[str, Any]) -> None:
    config["router_settings"]["tag_filtering_match_any"] = False


# The server of the first model, the setting, fields of the request, and the status without and with the setting.
Case = tuple[
    dict[str, Any], dict[str, Any], Callable[[dict[str, Any]], None] | dict[str, Any], dict[str, Any], int, int
]
TAGGED = {"router_settings": {"enable_tag_filtering": True, "allowed_fails": 100_000}}
CASES: dict[str, Case] = {
    "completion_model": (
        {},
        {},
        {"general_settings": {"completion_model": "gpt-oss"}},
        {"model": "unknown"},
        404,
        200,
    ),
    "litellm_credential_name": (
        {"api_key": "sk-of-the-box"},
        {"credential_list": CREDENTIALS},
        add_credential,
        {},
        503,
        200,
    ),
    "litellm_settings.context_window_fallbacks": (
        {"context": 200},
        {},
        {"litellm_settings": {"context_window_fallbacks": [{"gpt-oss": ["gpt-oss-2"]}]}},
        {"messages": LONG},
        400,
        200,
    ),
    "router_settings.context_window_fallbacks": (
        {"context": 200},
        {},
        {"router_settings": {"context_window_fallbacks": [{"gpt-oss": ["gpt-oss-2"]}]}},
        {"messages": LONG},
        400,
        200,
    ),
    "request_timeout": (
        {"script": lambda _: SLOW},
        {},
        {"litellm_settings": {"request_timeout": 0.2, "num_retries": 0}},
        {},
        200,
        504,
    ),
    "tag_filtering_match_any": ({}, TAGGED, add_second_tag, {"tags": ["fast", "large"]}, 200, 400),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_setting_has_an_effect(name: str) -> None:
    first, sections, setting, fields, without, with_setting = CASES[name]
    async with FakeVllm(**{"tokens": ANSWER, **first}) as fake, FakeVllm(tokens=ANSWER) as second:
        for is_set, status in ((False, without), (True, with_setting)):
            config = {**config_of(f"vllm@{fake.url}"), **deepcopy(sections)}
            config["model_list"][0]["litellm_params"]["tags"] = ["fast"]
            config["model_list"] += config_of(f"vllm@{second.url}", name="gpt-oss-2")["model_list"]
            if is_set:
                if callable(setting):
                    setting(config)
                else:
                    config.update(setting)
            async with gateway(config) as running:
                answer = await running.chat(**fields)
                assert answer.status == status, answer.raw


def test_every_setting_that_litellm_knows_too_is_used_in_a_test_of_behaviour() -> None:
    texts = [
        path.read_text()
        for path in TESTS.rglob("test_*.py")
        if not path.name.startswith("test_config") and path.parent.name != "fields"
    ]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    sections = (GeneralSettings, LitellmParams, ModelEntry, ModelInfo, LitellmSettings, RouterSettings)
    unused = [f"{section.__name__}.{key}" for section in sections for key in section.model_fields if key not in words]
    assert unused == []
