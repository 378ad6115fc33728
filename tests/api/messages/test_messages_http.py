"""The Messages API over HTTP: complete and streamed responses, errors, headers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.api.asgi import Exchange
from tests.api.messages.folding import fold, named_events
from tests.api.messages.mounted import gateway, request
from tests.api.scripted import ScriptedTurns, call, commentary, final, finished, reasoning
from unisono.core.events import Event
from unisono.core.observer import GenerationFacts
from unisono.core.quotas import KeyLimits, QuotaStatus
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.errors import (
    BackendOverloaded,
    BackendTimeout,
    BackendUnavailable,
    ContextTooLong,
    LimitReached,
    UnisonoError,
)

ANSWER: list[Event] = [*reasoning(0, "hm"), *final(1, "Hel", "lo"), finished()]


@pytest.mark.parametrize("path", ["/v1/messages", "/messages"])
async def test_a_request_gets_a_complete_message(path: str) -> None:
    service = ScriptedTurns([ANSWER], report=lambda: GenerationReport("vllm-1", 1, ["missing-end", "trailing-stop"]))
    response = await request(service, path=path, metadata={"user_id": "u"}, service_tier="auto").run()
    assert response.status == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-unisono-backend"] == "vllm-1"
    assert response.headers["x-unisono-recoveries"] == "missing-end,trailing-stop"
    assert response.headers["request-id"] == response.headers["x-request-id"] == "req_0"
    assert response.json() == {
        "id": "msg_abc",
        "type": "message",
        "role": "assistant",
        "model": "gpt-oss-20b",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 5,
            "output_tokens": 7,
            "output_tokens_details": {"thinking_tokens": 3},
        },
        "unisono": {
            "recoveries": ["missing-end", "trailing-stop"],
            "failovers": 1,
            "backend": "vllm-1",
            "notes": ["service_tier: no effect"],
        },
    }
    assert service.runs[0].closed == 1


async def test_a_stream_starts_with_message_start_and_ends_with_message_stop() -> None:
    facts = GenerationFacts(prompt_tokens=11)
    service = ScriptedTurns([ANSWER[:5], ANSWER[5:]], report=lambda: GenerationReport("vllm-1", facts=facts))
    response = await request(service, stream=True).run()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = named_events(response.body)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"] == {
        "input_tokens": 11,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    assert fold(events)["content"] == [{"type": "text", "text": "Hello"}]
    assert service.runs[0].closed == 1


async def test_pings_follow_message_start_while_the_backend_is_silent() -> None:
    service = ScriptedTurns([0.2, ANSWER[:4], 0.2, ANSWER[4:]])
    response = await request(service, stream=True, keep_alive_s=0.05).run()
    first, second, *_ = response.body.split(b"\n\n")
    assert first.startswith(b"event: message_start\n")
    assert second == b'event: ping\ndata: {"type":"ping"}'
    assert fold(named_events(response.body))["content"] == [{"type": "text", "text": "Hello"}]


FAILURES: dict[str, tuple[UnisonoError, int, str]] = {
    "context too long": (ContextTooLong("too long", param="messages"), 400, "invalid_request_error"),
    "backend overloaded": (BackendOverloaded("busy"), 503, "overloaded_error"),
    "backend unavailable": (BackendUnavailable("gone"), 503, "overloaded_error"),
    "backend timeout": (BackendTimeout("late"), 504, "timeout_error"),
    "limit reached": (LimitReached("enough"), 429, "rate_limit_error"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["complete", "stream"])
@pytest.mark.parametrize(("error", "status", "kind"), FAILURES.values(), ids=FAILURES)
async def test_a_failure_before_the_first_event_is_an_http_error(
    error: UnisonoError, status: int, kind: str, stream: bool
) -> None:
    response = await request(ScriptedTurns([error]), stream=stream).run()
    assert response.status == status
    message = f"{error.param}: {error.message}" if error.param else error.message
    assert response.json() == {
        "type": "error",
        "error": {"type": kind, "message": message, "details": {"error_code": error.code}},
        "request_id": "req_0",
    }


WINDOW: dict[str, tuple[ContextTooLong, str]] = {
    "above the limit": (ContextTooLong("x", param="messages", tokens=5000, limit=4096), "5000 tokens > 4096 maximum"),
    "at the limit": (ContextTooLong("x", tokens=4096, limit=4096), "4096 tokens > 4095 maximum"),
}


@pytest.mark.parametrize("stream_started", [False, True], ids=["before the stream", "during the stream"])
@pytest.mark.parametrize(("error", "counts"), WINDOW.values(), ids=WINDOW)
async def test_a_context_overflow_has_anthropics_error_message(
    error: ContextTooLong, counts: str, stream_started: bool
) -> None:
    batches = [[*final(0, "Hel")[:2]], error] if stream_started else [error]
    response = await request(ScriptedTurns(batches), stream=True).run()
    body = named_events(response.body)[-1] if stream_started else response.json()
    assert response.headers.get("x-should-retry") == (None if stream_started else "false")
    assert (body["error"]["type"], body["error"]["message"]) == (
        "invalid_request_error",
        f"prompt is too long: {counts}",
    )


async def test_a_failure_during_the_stream_ends_it_with_an_error_event() -> None:
    service = ScriptedTurns([[*final(0, "Hel", "lo")[:2]], BackendUnavailable("gone")])
    response = await request(service, stream=True).run()
    assert response.status == 200
    events = named_events(response.body)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "error",
    ]
    assert events[-1]["error"] == {
        "type": "overloaded_error",
        "message": "gone",
        "details": {"error_code": "backend_unavailable"},
    }
    assert events[-1]["request_id"] == "req_0"


REFUSED: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "no max_tokens": ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    "an unknown model": ({"model": "nothing"}, 404, "not_found_error", "model"),
    "a thread": ({"thread": {"type": "create"}}, 400, "invalid_request_error", "thread"),
    "no messages": ({"messages": []}, 400, "invalid_request_error", "messages"),
}


@pytest.mark.parametrize(("fields", "status", "kind", "name"), REFUSED.values(), ids=REFUSED)
async def test_an_error_names_the_invalid_field(fields: dict[str, Any], status: int, kind: str, name: str) -> None:
    response = await request(ScriptedTurns([ANSWER]), **fields).run()
    assert response.status == status
    assert response.json()["error"]["type"] == kind
    assert name in response.json()["error"]["message"]


INVALID_HTTP_REQUESTS: dict[str, tuple[str, str, dict[str, Any], int, str]] = {
    "another host": ("POST", "/v1/messages", {"headers": [("host", "evil.example")]}, 403, "permission_error"),
    "another content type": (
        "POST",
        "/v1/messages",
        {"body": b"{", "headers": [("content-type", "text/plain")]},
        415,
        "",
    ),
    "too large": (
        "POST",
        "/v1/messages/count_tokens",
        {"body": b"", "headers": [("content-type", "application/json"), ("content-length", "99999999")]},
        413,
        "request_too_large",
    ),
    "another method": ("GET", "/v1/messages", {}, 405, ""),
    "an unknown path": ("POST", "/messages/batches", {"json": {}}, 404, "not_found_error"),
}


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "kind"), INVALID_HTTP_REQUESTS.values(), ids=INVALID_HTTP_REQUESTS
)
async def test_http_level_errors_have_anthropics_error_shape(
    method: str, path: str, sent: dict[str, Any], status: int, kind: str
) -> None:
    response = await Exchange(gateway(ScriptedTurns([ANSWER])), method, path, **sent).run()
    assert response.status == status
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind or "invalid_request_error")
    assert body["request_id"] == response.headers["request-id"] == "req_0"


async def test_errors_of_other_paths_keep_the_openai_shape() -> None:
    response = await Exchange(gateway(ScriptedTurns([ANSWER])), "POST", "/v1/messagesx", json={}).run()
    assert response.status == 404
    assert response.json()["error"]["code"] == "not_found"
    assert "request-id" not in response.headers


async def test_rate_limit_headers_have_both_spellings() -> None:
    left = QuotaStatus(requests_left=4, requests_reset_s=12, tokens_left=900, tokens_reset_s=6)
    quota_status = replace(left, limits=KeyLimits(rpm=5, tpm=1000))
    service = ScriptedTurns([ANSWER], report=lambda: GenerationReport(standing=quota_status))
    headers = (await request(service).run()).headers
    assert headers["x-ratelimit-remaining-requests"] == headers["anthropic-ratelimit-requests-remaining"] == "4"
    assert headers["anthropic-ratelimit-tokens-limit"] == "1000"
    assert headers["anthropic-ratelimit-requests-reset"] == "2023-11-14T22:13:32Z"


class CountingTurns(ScriptedTurns):
    async def count(self, turn: GenerationRequest) -> int:
        self.turns.append(turn)
        return 42


async def test_tokens_are_counted_without_max_tokens_or_a_backend_request() -> None:
    service = CountingTurns([])
    response = await request(service, path="/v1/messages/count_tokens", max_tokens=None, system="Be brief.").run()
    assert (response.status, response.json()) == (200, {"input_tokens": 42})
    assert service.turns[0].conversation.preamble.instructions == "Be brief."
    assert not service.runs


async def test_streamed_tool_calls_are_the_same_with_and_without_early_arguments() -> None:
    script = [[*commentary(0, "Let me see.")], [*call(1, 0, "f", '{"a"', ":1}"), finished()]]
    for model, pieces in {"gpt-oss-20b": ["", '{"a":1}'], "early": ["", '{"a":1}']}.items():
        response = await request(ScriptedTurns(script), model=model, stream=True).run()
        events = named_events(response.body)
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert [delta["partial_json"] for delta in deltas if "partial_json" in delta] == pieces
        folded = fold(events)
        assert folded["stop_reason"] == "tool_use"
        assert folded["content"] == [
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "toolu_0", "name": "f", "input": {"a": 1}},
        ]
