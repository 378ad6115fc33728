"""Pass-through requests: events that show that the backend generates."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.core.passthrough_request import Api, has_output


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


WITH_OUTPUT: dict[str, tuple[Api, dict[str, Any]]] = {
    "text": (Api.CHAT, chunk(content="Hi")),
    "reasoning": (Api.CHAT, chunk(reasoning_content="Hm")),
    "a call": (Api.CHAT, chunk(tool_calls=[{"index": 0}])),
    "a finish reason": (Api.CHAT, chunk("stop")),
    "the second choice": (Api.CHAT, {"choices": [chunk()["choices"][0], chunk(content="Hi")["choices"][0]]}),
    "an item": (Api.RESPONSES, {"type": "response.output_item.added"}),
    "a delta": (Api.RESPONSES, {"type": "response.output_text.delta", "delta": "Hi"}),
    "an error": (Api.RESPONSES, {"type": "response.failed"}),
}
WITHOUT_OUTPUT: dict[str, tuple[Api, dict[str, Any]]] = {
    "a role": (Api.CHAT, chunk(role="assistant")),
    "a role and empty text": (Api.CHAT, chunk(role="assistant", content="", tool_calls=None)),
    "an empty delta": (Api.CHAT, chunk()),
    "usage": (Api.CHAT, {"choices": [], "usage": {"prompt_tokens": 3}}),
    "no choices": (Api.CHAT, {"choices": None}),
    "malformed choices": (Api.CHAT, {"choices": ["stop", {"delta": "Hi"}]}),
    "a created event": (Api.RESPONSES, {"type": "response.created"}),
    "an in-progress event": (Api.RESPONSES, {"type": "response.in_progress"}),
    "a keepalive event": (Api.RESPONSES, {"type": "keepalive"}),
}


@pytest.mark.parametrize(("api", "event"), WITH_OUTPUT.values(), ids=WITH_OUTPUT)
def test_events_with_output(api: Api, event: dict[str, Any]) -> None:
    assert has_output(api, event)


@pytest.mark.parametrize(("api", "event"), WITHOUT_OUTPUT.values(), ids=WITHOUT_OUTPUT)
def test_events_without_output(api: Api, event: dict[str, Any]) -> None:
    assert not has_output(api, event)
