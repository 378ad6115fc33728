"""Fields without effect are reported in the answer, in a header and in a metric, on every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.gateway import config_of, gateway
from tests.fakes import FakeVllm
from unisono.harmony.encoding import load_encoding

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hi.<|return|>")
KEY = "sk-notes-key-of-the-operator"
MESSAGES = [{"role": "user", "content": "Hi"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "responses": ("/v1/responses", {"input": "Hi", "store": False}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": 9}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_field_without_effect_is_in_the_answer_the_header_and_the_metric(name: str, stream: bool) -> None:
    path, fields = REQUESTS[name]
    body = {"model": "gpt-oss", "stream": stream, "priority": 0, "made_up": False, **fields}
    async with FakeVllm(tokens=ANSWER) as fake:
        config = config_of(f"vllm@{fake.url}", general_settings={"master_key": KEY})
        config["unisono"] = {"raw_completions": True}
        async with gateway(config) as server:
            answer = await server.post(path, json.dumps(body).encode(), authorization=f"Bearer {KEY}")
            async with server.session.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {KEY}"}) as got:
                page = await got.text()
    assert answer.status == 200, answer.raw
    assert answer.headers["x-unisono-notes"] == "priority, made_up"
    for field in ("priority", "made_up"):
        assert f"{field}: no effect".encode() in answer.raw
    assert 'unisono_notes_total{field="priority"} 1.0' in page
    assert 'unisono_notes_total{field="other"} 1.0' in page


async def test_an_answer_without_notes_has_no_header() -> None:
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config_of(f"vllm@{fake.url}")) as server:
        answer = await server.chat()
    assert "x-unisono-notes" not in answer.headers


async def test_reasoning_is_left_out_of_the_answer_on_request() -> None:
    thought = "<|channel|>analysis<|message|>Secret.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>"
    async with (
        FakeVllm(tokens=load_encoding().encode_marked(thought)) as fake,
        gateway(config_of(f"vllm@{fake.url}")) as server,
    ):
        for stream in (False, True):
            assert b"Secret" in (await server.chat(stream=stream)).raw
            for fields in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
                answer = await server.chat(stream=stream, **fields)
                assert answer.status == 200
                assert b"Secret" not in answer.raw
                assert b"Hi." in answer.raw
