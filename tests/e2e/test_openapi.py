"""What a running gateway answers is what its OpenAPI document says, the events of streams included."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from tests.e2e.gateway import Gateway, config_of, gateway
from tests.fakes import FakeVllm, VllmScript
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENCODING = load_encoding()
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
SAID = ENCODING.encode_marked(THOUGHT + "<|channel|>final<|message|>Hello.<|return|>")
CALLED = ENCODING.encode_marked(
    THOUGHT + "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}<|call|>"
)
TOOL = {"type": "function", "name": "look"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door() -> AsyncIterator[Gateway]:
    async with (
        FakeVllm(
            script=lambda asked: VllmScript(tokens=CALLED if "look" in ENCODING.decode(asked["prompt"]) else SAID)
        ) as fake,
        gateway(config_of(f"vllm@{fake.url}")) as running,
    ):
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def document(door: Gateway) -> Any:
    return (await door.get("/openapi.json")).body


def faults(document: Any, name: str, value: Any) -> list[str]:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return [error.message for error in Draft202012Validator(schema).iter_errors(value)]


def content_of(document: Any, path: str, status: int) -> Any:
    answer = document["paths"][path]["post"]["responses"][str(status)]
    if "$ref" in answer:
        answer = document["components"]["responses"][answer["$ref"].rpartition("/")[2]]
    return answer["content"]


CHAT, RESPONSES, OPEN = "/v1/chat/completions", "/v1/responses", "/open-responses/v1/responses"
MESSAGES = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, tuple[str, dict[str, Any], int]] = {
    "a chat": (CHAT, {"messages": MESSAGES}, 200),
    "a chat that calls": (CHAT, {"messages": MESSAGES, "tools": [TOOL]}, 200),
    "a chat with usage in the stream": (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, 200),
    "several choices": (CHAT, {"messages": MESSAGES, "n": 2}, 200),
    "a response": (RESPONSES, {"input": "Hi"}, 200),
    "a response that calls": (RESPONSES, {"input": "Hi", "tools": [TOOL]}, 200),
    "a response in the background": (RESPONSES, {"input": "Hi", "background": True}, 200),
    "an open response": (OPEN, {"input": "Hi", "tools": [TOOL]}, 200),
    "no messages": (CHAT, {"messages": []}, 400),
    "no model": (RESPONSES, {"input": "Hi", "model": "nobody"}, 404),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body", "status"), ASKED.values(), ids=ASKED)
async def test_answers_are_those_of_the_document(
    door: Gateway, document: Any, path: str, body: dict[str, Any], status: int, stream: bool
) -> None:
    answer = await door.post(path, json.dumps({"model": "gpt-oss", **body, "stream": stream}).encode())
    assert answer.status == status
    content = content_of(document, path, status)
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind == ("text/event-stream" if stream and status == 200 else "application/json")
    if kind == "application/json":
        assert faults(document, content[kind]["schema"]["$ref"].rpartition("/")[2], answer.body) == []
        return
    assert answer.events
    for event in answer.events:
        assert faults(document, content[kind]["x-event-schema"]["$ref"].rpartition("/")[2], event) == []
