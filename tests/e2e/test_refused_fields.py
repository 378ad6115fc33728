"""Fields of the client's request in errors that a backend causes, on every API surface."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.gateway import Answer, gateway
from tests.e2e.wires import WIRES, deployment
from tests.fakes import FakeVllm, Refusal, vllm_context_error

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
# Fields of a request, and the field of the conversation, by path.
SURFACES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (CHAT, "messages"),
    "/v1/responses": ({"input": "Hi", "store": False}, "input"),
    "/v1/messages": (CHAT, "messages"),
    "/v1/completions": ({"prompt": "Hi", "max_tokens": 50}, "prompt"),
}
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
SURFACE = pytest.mark.parametrize("path", SURFACES)


def refusing(field: str) -> Refusal:
    error = {"message": f"{field} must be < 1", "type": "BadRequestError", "param": field, "code": 400}
    return Refusal(400, json.dumps({"error": error}).encode())


async def refused(refusal: Refusal, path: str, **fields: Any) -> Answer:
    async with FakeVllm(script=lambda _: refusal) as fake:
        entries = [deployment("gpt-oss", WIRES["vllm"], fake)]
        async with gateway({"model_list": entries, "unisono": {"raw_completions": True}}) as running:
            body = {"model": "gpt-oss", **SURFACES[path][0], **fields}
            return await running.post(path, json.dumps(body).encode())


def param_of(answer: Answer) -> str | None:
    """Return the field that an error names; Messages has no `param` and names the field before its text."""
    failed = [event for event in answer.events if event.get("type") == "response.failed"]
    if failed:
        return next((event["param"] for event in answer.events if event["type"] == "error"), None)
    error = (answer.body or answer.events[-1])["error"]
    if "param" in error:
        return error["param"]  # type: ignore[no-any-return]
    field, colon, _ = error["message"].partition(": ")
    return field if colon and " " not in field else None


@STREAM
@SURFACE
async def test_a_prompt_that_the_backend_finds_too_long_names_the_conversation(path: str, stream: bool) -> None:
    answer = await refused(vllm_context_error(), path, stream=stream)
    if path == "/v1/messages":
        assert "prompt is too long: 5000 tokens > 4096 maximum" in answer.raw.decode()
    else:
        assert param_of(answer) == SURFACES[path][1]


@SURFACE
async def test_a_field_that_the_backend_refuses_is_named(path: str) -> None:
    answer = await refused(refusing("temperature"), path, temperature=1)
    assert (answer.status, param_of(answer)) == (400, "temperature")
    assert "temperature must be < 1" in answer.raw.decode()


@pytest.mark.parametrize("field", ["temperature", "prompt", "skip_special_tokens"])
async def test_a_field_that_the_client_did_not_send_is_not_named(field: str) -> None:
    answer = await refused(refusing(field), "/v1/chat/completions", top_p=0.5)
    assert (answer.status, param_of(answer)) == (400, None)
    assert f"{field} must be < 1" in answer.raw.decode()
