"""Responses and stream events of a running gateway match its OpenAPI document."""

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
OUTPUT = ENCODING.encode_marked(THOUGHT + "<|channel|>final<|message|>Hello.<|return|>")
CALL_OUTPUT = ENCODING.encode_marked(
    THOUGHT + "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}<|call|>"
)
TOOL = {"type": "function", "name": "look"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_gateway() -> AsyncIterator[Gateway]:
    async with (
        FakeVllm(
            script=lambda request: VllmScript(
                tokens=CALL_OUTPUT if "look" in ENCODING.decode(request["prompt"]) else OUTPUT
            )
        ) as fake,
        gateway(config_of(f"vllm@{fake.url}")) as running,
    ):
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def document(running_gateway: Gateway) -> Any:
    return (await running_gateway.get("/openapi.json")).body


def violations(document: Any, name: str, value: Any) -> list[str]:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return [error.message for error in Draft202012Validator(schema).iter_errors(value)]


def content_of(document: Any, path: str, status: int) -> Any:
    response = document["paths"][path]["post"]["responses"][str(status)]
    if "$ref" in response:
        response = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
    return response["content"]


CHAT, RESPONSES, OPEN = "/v1/chat/completions", "/v1/responses", "/open-responses/v1/responses"
MESSAGES = [{"role": "user", "content": "Hi"}]
REQUESTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat": (CHAT, {"messages": MESSAGES}, 200),
    "chat with a call": (CHAT, {"messages": MESSAGES, "tools": [TOOL]}, 200),
    "chat with usage in the stream": (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, 200),
    "several choices": (CHAT, {"messages": MESSAGES, "n": 2}, 200),
    "response": (RESPONSES, {"input": "Hi"}, 200),
    "response with a call": (RESPONSES, {"input": "Hi", "tools": [TOOL]}, 200),
    "background response": (RESPONSES, {"input": "Hi", "background": True}, 200),
    "Open Responses request": (OPEN, {"input": "Hi", "tools": [TOOL]}, 200),
    "no messages": (CHAT, {"messages": []}, 400),
    "unknown model": (RESPONSES, {"input": "Hi", "model": "nobody"}, 404),
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body", "status"), REQUESTS.values(), ids=REQUESTS)
async def test_responses_match_the_openapi_document(
    running_gateway: Gateway, document: Any, path: str, body: dict[str, Any], status: int, stream: bool
) -> None:
    response = await running_gateway.post(path, json.dumps({"model": "gpt-oss", **body, "stream": stream}).encode())
    assert response.status == status
    content = content_of(document, path, status)
    media_type = response.headers["content-type"].partition(";")[0]
    assert media_type == ("text/event-stream" if stream and status == 200 else "application/json")
    if media_type == "application/json":
        assert violations(document, content[media_type]["schema"]["$ref"].rpartition("/")[2], response.body) == []
        return
    assert response.events
    for event in response.events:
        assert violations(document, content[media_type]["x-event-schema"]["$ref"].rpartition("/")[2], event) == []
