"""Requests that pass through: which events show that a backend is generating."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.core.passthrough_request import Api, has_output


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


WITH: dict[str, tuple[Api, dict[str, Any]]] = {
    "text": (Api.CHAT, chunk(content="Hi")),
    "reasoning": (Api.CHAT, chunk(reasoning_content="Hm")),
    "a call": (Api.CHAT, chunk(tool_calls=[{"index": 0}])),
    "an end": (Api.CHAT, chunk("stop")),
    "the second choice": (Api.CHAT, {"choices": [chunk()["choices"][0], chunk(content="Hi")["choices"][0]]}),
    "an item": (Api.RESPONSES, {"type": "response.output_item.added"}),
    "a delta": (Api.RESPONSES, {"type": "response.output_text.delta", "delta": "Hi"}),
    "a failure": (Api.RESPONSES, {"type": "response.failed"}),
}
WITHOUT: dict[str, tuple[Api, dict[str, Any]]] = {
    "a role": (Api.CHAT, chunk(role="assistant")),
    "a role and empty text": (Api.CHAT, chunk(role="assistant", content="", tool_calls=None)),
    "nothing": (Api.CHAT, chunk()),
    "usage": (Api.CHAT, {"choices": [], "usage": {"prompt_tokens": 3}}),
    "no choices": (Api.CHAT, {"choices": None}),
    "odd choices": (Api.CHAT, {"choices": ["stop", {"delta": "Hi"}]}),
    "accepted": (Api.RESPONSES, {"type": "response.created"}),
    "still going": (Api.RESPONSES, {"type": "response.in_progress"}),
    "a sign of life": (Api.RESPONSES, {"type": "keepalive"}),
}


@pytest.mark.parametrize(("api", "event"), WITH.values(), ids=WITH)
def test_events_with_output(api: Api, event: dict[str, Any]) -> None:
    assert has_output(api, event)


@pytest.mark.parametrize(("api", "event"), WITHOUT.values(), ids=WITHOUT)
def test_events_without_output(api: Api, event: dict[str, Any]) -> None:
    assert not has_output(api, event)
