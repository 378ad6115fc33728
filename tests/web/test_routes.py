"""Routes of the web page over real sockets: status, recordings and inspections.

The access depends on the key.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, config_of, gateway
from tests.e2e.keyed import MASTER, bearing, keyed
from tests.fakes import FakeVllm
from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted, StepDone
from unisono.core.recovery_rules import RULES
from unisono.harmony.encoding import load_encoding
from unisono.observe.recent_stats import MINUTES, RecentStats

MALFORMED = load_encoding().encode_marked("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hello<|return|>")


def config(url: str, mode: str = "all") -> dict[str, Any]:
    return config_of(f"vllm@{url}", "vllm@http://127.0.0.1:9", unisono={"traces": {"mode": mode}})


async def post(running: Gateway, path: str, body: object, **headers: str) -> Answer:
    return await running.post(path, json.dumps(body).encode(), **headers)


async def recordings(running: Gateway, count: int, **headers: str) -> list[dict[str, Any]]:
    """Wait for `count` recordings of a caller, and return them."""
    for _ in range(500):
        found: list[dict[str, Any]] = (await running.get("/v1/traces", **headers)).body["data"]
        if len(found) >= count:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("no recording")


async def test_the_operator_sees_the_whole_status() -> None:
    async with FakeVllm(tokens=MALFORMED) as fake, gateway(config(fake.url)) as running:
        await running.chat()
        status = (await running.get("/v1/status")).body
        assert (status["keyless"], status["key"], status["traces"]) == (True, None, "all")
        assert status["rules"] == RULES
        [model] = status["models"]
        ready, failing = model["deployments"]
        assert (ready["name"], ready["state"], ready["kind"], ready["running"]) == ("vllm-1", "ready", "vllm", 0)
        assert ready["hour"]["generations"] == 1
        assert failing["hour"] is None
        assert failing["state"] in {"failing", "unknown"}
        assert failing["reason"]
        [minute] = status["minutes"]
        assert (minute["answers"], minute["failed"]) == (1, 0)
        assert minute["recoveries"] == {"missing-end": 1}
        assert fake.url not in json.dumps(status)
        assert status["role"] == "master"


async def test_the_operator_sees_why_a_deployment_fails() -> None:
    async with FakeVllm(tokens=MALFORMED) as fake, gateway(config(fake.url)) as running:
        for _ in range(500):
            _, failing = (await running.get("/v1/status")).body["models"][0]["deployments"]
            if failing["cause"]:
                break
            await asyncio.sleep(0.02)
        assert failing["cause"] == "the backend cannot be reached: connection refused by 127.0.0.1:9"


async def test_the_tokens_of_an_answer_can_be_watched(tmp_path: Path) -> None:
    async with FakeVllm(tokens=MALFORMED) as fake, keyed(config(fake.url, "off"), tmp_path) as (running, ring):
        _, ann = await ring.issue("ann")
        _, bob = await ring.issue("bob")
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
        response = await post(running, "/v1/chat/completions", body, **bearing(ann))
        path = f"/v1/requests/{response.headers['x-request-id']}/tokens"
        watched = await running.get(path, **bearing(ann))
        assert watched.headers["content-type"].startswith("text/event-stream")
        assert watched.done
        segments = [segment for event in watched.events for segment in event["segments"]]
        specials = [segment["text"] for segment in segments if segment["kind"] == "special"]
        assert specials == ["<|channel|>", "<|message|>", "<|channel|>", "<|message|>", "<|return|>"]
        texts = {
            segment["of"]: "".join(text for text, *_ in segment["tokens"])
            for segment in segments
            if segment["kind"] == "text"
        }
        assert (texts["analysis"], texts["final"]) == ("Hm.", "Hello")
        for other in (bob, MASTER):
            assert (await running.get(path, **bearing(other))).status == 404
        assert (await running.get("/v1/requests/req_0/tokens", **bearing(ann))).status == 404


IN_COMMENTS = {"x_unisono_tokens": "comments"}


def tokens_in(answer: Answer) -> list[dict[str, Any]]:
    """Return the segments in the comments of a stream."""
    comments = [line[9:] for line in answer.raw.decode().splitlines() if line.startswith(": tokens ")]
    return [segment for comment in comments for segment in json.loads(comment)["segments"]]


SURFACES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi", "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 500},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 50},
}


async def test_a_stream_brings_its_tokens_as_comments_on_request() -> None:
    async with (
        FakeVllm(tokens=MALFORMED) as fake,
        gateway(config_of(f"vllm@{fake.url}", unisono={"raw_completions": True})) as running,
    ):
        for path, fields in SURFACES.items():
            body = {"model": "gpt-oss", "stream": True, **fields}
            plain = await post(running, path, body)
            assert tokens_in(plain) == []
            answer = await post(running, path, body, **IN_COMMENTS)
            specials = [segment["text"] for segment in tokens_in(answer) if segment["kind"] == "special"]
            assert specials[-1] == "<|return|>", path
            assert len(answer.events) == len(plain.events)
        refused = await post(running, "/v1/responses", {}, x_unisono_tokens="yes")
        assert (refused.status, refused.body["error"]["param"]) == (400, "x-unisono-tokens")
        # An error before the head is a plain error.
        failed = await post(running, "/v1/responses", {"stream": True}, **IN_COMMENTS)
        assert failed.status == 400


async def test_guardrails_keep_tokens_from_the_client() -> None:
    rule = {"keyword": "Hello", "action": "MASK"}
    filters = {"guardrail": "litellm_content_filter", "mode": "post_call", "default_on": True, "blocked_words": [rule]}
    guardrail = {"guardrail_name": "names", "litellm_params": filters}
    async with (
        FakeVllm(tokens=MALFORMED) as fake,
        gateway({**config_of(f"vllm@{fake.url}"), "guardrails": [guardrail]}) as running,
    ):
        body = {"model": "gpt-oss", "stream": True, **SURFACES["/v1/chat/completions"]}
        answer = await post(running, "/v1/chat/completions", body, **IN_COMMENTS)
        assert (answer.status, tokens_in(answer)) == (200, [])
        assert b"Hello" not in answer.raw
        path = f"/v1/requests/{answer.headers['x-request-id']}/tokens"
        assert (await running.get(path)).status == 404


async def test_a_recording_can_be_listed_read_and_inspected() -> None:
    async with FakeVllm(tokens=MALFORMED) as fake, gateway(config(fake.url)) as running:
        answer = await running.chat()
        [listed] = await recordings(running, 1)
        assert listed["id"] == answer.headers["x-request-id"]
        recording = await running.get(f"/v1/traces/{listed['id']}")
        assert recording.body["object"] == "unisono.trace"
        assert recording.headers["cache-control"] == "no-store"
        by_id = (await post(running, "/v1/inspect", {"id": listed["id"]})).body
        assert by_id == (await post(running, "/v1/inspect", {"trace": recording.body})).body
        [repair] = [one for one in by_id["steps"][0]["output"] if one["kind"] == "repair"]
        assert repair["why"] == RULES["missing-end"]
        for path in ("/v1/traces/req_0", "/v1/traces/..", f"/v1/traces/{listed['id']}x"):
            assert (await running.get(path)).status == 404
        for strange in ("\0", "é", "a" * 200, "a b"):
            assert (await post(running, "/v1/inspect", {"id": strange})).status == 404
        for limit in ("0", "201", "-1", "x", "١"):
            assert (await running.get(f"/v1/traces?limit={limit}")).status == 400


async def test_a_key_sees_only_its_own_models_and_recordings(tmp_path: Path) -> None:
    async with FakeVllm(tokens=MALFORMED) as fake, keyed(config(fake.url), tmp_path) as (running, ring):
        _, ann = await ring.issue("ann")
        _, bob = await ring.issue("bob", models=frozenset({"other"}))
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
        response = await post(running, "/v1/chat/completions", body, **bearing(ann))
        id = response.headers["x-request-id"]
        await recordings(running, 1, **bearing(ann))
        for other in (bob, MASTER):
            assert (await running.get("/v1/traces", **bearing(other))).body["data"] == []
            assert (await running.get(f"/v1/traces/{id}", **bearing(other))).status == 404
            assert (await post(running, "/v1/inspect", {"id": id}, **bearing(other))).status == 404
        status = (await running.get("/v1/status", **bearing(ann))).body
        assert status["models"] == [
            {"id": "gpt-oss", "model": "gpt-oss", "mode": "chat", "context": 131072, "ready": True}
        ]
        assert not {"minutes", "workers"} & set(status)
        assert status["role"] == "key"
        assert (await running.get("/v1/status", **bearing(bob))).body["models"] == []
        assert "deployments" in (await running.get("/v1/status", **bearing(MASTER))).body["models"][0]


@pytest.mark.slow
async def test_inspections_are_limited_in_size_and_number() -> None:
    async with FakeVllm(tokens=MALFORMED) as fake, gateway(config(fake.url, "off")) as running:
        refused = await post(running, "/v1/inspect", {"tokens": [1] * 200_001})
        assert (refused.status, refused.body["error"]["param"]) == (400, "tokens")
        requests = [post(running, "/v1/inspect", {"text": "a " * 20_000}) for _ in range(24)]
        statuses = [answer.status for answer in await asyncio.gather(*requests)]
        assert set(statuses) <= {200, 429}
        assert 200 in statuses


def test_recent_statistics_cover_only_the_last_hour() -> None:
    now = 1_790_000_000.0
    recent = RecentStats(lambda: now)
    began = GenerationStarted("req_1", "ann", "", "chat", "gpt-oss", background=False, at=now)
    step = StepDone(0, "vllm-1", 0.0, 0.1, 0.2, 10, 4, 3, failure="backend_timeout")
    for _ in range(2 * MINUTES):
        recent.ended(GenerationDone(began, 1.0, GenerationOutcome.FAILED, recoveries=("missing-end",), steps=(step,)))
        now += 60
    now -= 60
    minutes = list(recent.minutes())
    assert len(minutes) == MINUTES
    assert {(one.answers, one.failed, one.generated, one.recoveries["missing-end"]) for one in minutes} == {
        (1, 1, 3, 1)
    }
    total = recent.worked()["gpt-oss", "vllm-1"]
    assert (total.generations, total.failed, total.prompt, total.cached) == (60, 60, 600, 240)
    now += 3600
    assert list(recent.minutes()) == []
