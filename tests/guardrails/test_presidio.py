"""Personal data is masked or blocked by a real Presidio, before and after the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import config_of, gateway
from tests.fakes import FakeVllm
from tests.guardrails.service import presidio
from unisono.harmony.encoding import load_encoding

CARD = "4012-8888-8888-1881"
MAIL = "ann@example.com"
ANSWER = load_encoding().encode_marked(f"<|channel|>final<|message|>Your card is {CARD}, {MAIL} 😀.<|return|>")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("presidio") / "log"


@pytest.fixture(scope="module")
def service(log: Path) -> Iterator[str]:
    with presidio(log) as address:
        yield address


def config(url: str, address: str, mode: Any, entities: dict[str, str] | None = None, **params: Any) -> dict[str, Any]:
    params = {
        "guardrail": "presidio",
        "mode": mode,
        "default_on": True,
        "presidio_analyzer_api_base": address,
        "presidio_anonymizer_api_base": f"{address}/",
        "pii_entities_config": entities or {},
        **params,
    }
    return config_of(f"vllm@{url}", guardrails=[{"guardrail_name": "personal-data", "litellm_params": params}])


async def test_data_in_requests_is_masked_in_the_prompt(service: str, log: Path) -> None:
    text = f"😀 I am {MAIL} with the card {CARD}."
    messages = [{"role": "system", "content": f"Mails go to {MAIL}."}, {"role": "user", "content": text}]
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config(fake.url, service, "pre_call")) as running:
        assert (await running.chat(messages=messages)).status == 200
        prompt = load_encoding().decode(fake.requests[0].json["prompt"])
        assert "😀 I am <EMAIL_ADDRESS> with the card <CREDIT_CARD>." in prompt
        assert "Mails go to <EMAIL_ADDRESS>." in prompt
        # The next turn sends the same texts again, which are not analyzed again.
        before = log.read_text().count("/analyze")
        await running.chat(messages=messages)
        assert log.read_text().count("/analyze") == before


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_data_in_answers_is_masked(service: str, stream: bool) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config(fake.url, service, "post_call")) as running:
        answer = await running.chat(stream=stream)
        text = json.dumps(answer.events) if stream else answer.raw.decode()
        assert "Your card is <CREDIT_CARD>, <EMAIL_ADDRESS>" in text
        assert "8888" not in text


async def test_only_configured_entities_are_masked_or_blocked(service: str) -> None:
    entities = {"CREDIT_CARD": "BLOCK", "EMAIL_ADDRESS": "MASK"}
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config(fake.url, service, "pre_call", entities)) as running:
        blocked = await running.chat(messages=[{"role": "user", "content": f"My card is {CARD}"}])
        assert blocked.status == 400
        assert blocked.body["error"]["code"] == "content_blocked"
        assert "CREDIT_CARD" in blocked.body["error"]["message"]
        assert not fake.requests
        await running.chat(messages=[{"role": "user", "content": f"{MAIL} and 192.168.0.1"}])
        prompt = load_encoding().decode(fake.requests[0].json["prompt"])
        assert "<EMAIL_ADDRESS> and 192.168.0.1" in prompt


async def test_a_request_fails_if_the_service_does_not_answer() -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        async with gateway(config(fake.url, "http://127.0.0.1:9", "pre_call")) as running:
            answer = await running.chat()
        assert answer.status == 503
        assert answer.body["error"]["code"] == "hook_failed"
        assert "personal-data" in answer.body["error"]["message"]
        assert not fake.requests
