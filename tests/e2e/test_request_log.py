"""The request log of a running gateway: one line per request, refusals included, without content."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from tests.e2e.gateway import config_of, gateway
from tests.e2e.keyed import MASTER, bearing, keyed
from tests.fakes import FakeVllm, Refusal, VllmScript
from unisono.core.quotas import KeyLimits
from unisono.harmony.encoding import load_encoding
from unisono.observe.logs import start_logging

ENCODING = load_encoding()
THOUGHT = "<|channel|>analysis<|message|>A canary thinks.<|end|><|start|>assistant"
ANSWER = ENCODING.encode_marked(THOUGHT + "<|channel|>final<|message|>Hello, canary.<|return|>")
PRICES = {"input_cost_per_token": 0.000001, "output_cost_per_token": 0.000002}
CHAT: dict[str, Any] = {"model": "gpt-oss", "messages": [{"role": "user", "content": "A canary asks."}]}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat, streamed": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "responses": ("/v1/responses", {"model": "gpt-oss", "input": "A canary asks."}),
    "responses, streamed": ("/v1/responses", {"model": "gpt-oss", "input": "A canary asks.", "stream": True}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 64}),
    "messages, streamed": ("/v1/messages", {**CHAT, "max_tokens": 64, "stream": True}),
    "completions": ("/v1/completions", {"model": "gpt-oss", "prompt": "A canary asks.", "max_tokens": 64}),
    "chat, two choices": ("/v1/chat/completions", {**CHAT, "n": 2}),
}


class Lines:
    """Captured log of this process."""

    def __init__(self, stream: StringIO) -> None:
        self._stream = stream

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def requests(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in lines if line["logger"] == "unisono.requests"]

    async def until(self, count: int) -> list[dict[str, Any]]:
        """Wait until this number of requests is logged. A client may see its answer before."""
        async with asyncio.timeout(10):
            while len(self.requests) < count:
                await asyncio.sleep(0.005)
        return self.requests


@contextmanager
def logged(log_format: str = "json") -> Iterator[Lines]:
    stream = StringIO()
    undo = start_logging("info", [], stream, log_format)
    try:
        yield Lines(stream)
    finally:
        undo()


def priced(url: str, **unisono: Any) -> dict[str, Any]:
    config = config_of(f"vllm@{url}", unisono={"raw_completions": True, **unisono})
    config["model_list"][0]["litellm_params"].update(PRICES)
    return config


@pytest.mark.parametrize(("path", "body"), FORMS.values(), ids=FORMS)
async def test_a_line_has_the_facts_of_an_answer(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with FakeVllm(script=lambda _: VllmScript(tokens=ANSWER, cached_tokens=3)) as fake:
        with logged() as log:
            async with keyed(priced(fake.url), tmp_path) as (running, keys):
                record, key = await keys.issue("acme", name="alice", raw=True)
                answer = await running.post(path, json.dumps(body).encode(), **bearing(key))
                assert answer.status == 200
                [line] = await log.until(1)
    choices = body.get("n", 1)
    prompts = sum(len(request.json["prompt"]) for request in fake.requests)
    assert line["message"].startswith(f"POST {path} 200 in ")
    assert (line["method"], line["route"], line["status"]) == ("POST", path, 200)
    assert line["id"] == answer.headers["x-request-id"]
    assert (line["tenant"], line["key"], line["key_name"]) == ("acme", record.id, "alice")
    assert (line["model"], line["served_model"], line["deployment"]) == ("gpt-oss", "gpt-oss", "vllm-1")
    assert line["attempts"] == [{"deployment": "vllm-1"}] * choices
    assert (line["input_tokens"], line["output_tokens"]) == (prompts, len(ANSWER) * choices)
    assert 0 < line["first_token_s"] <= line["duration_s"]
    assert (line["cached_tokens"], line["finish"]) == (3 * choices, "stop")
    assert line["cost"] == pytest.approx(0.000001 * prompts + 0.000002 * len(ANSWER) * choices)
    assert "error" not in line
    assert "canary" not in log.text


@pytest.mark.parametrize(("prices", "cached"), [({}, 0.000001), ({"cache_read_input_token_cost": 0.000005}, 0.000005)])
async def test_cached_tokens_may_have_a_price_of_their_own(prices: dict[str, float], cached: float) -> None:
    async with FakeVllm(script=lambda _: VllmScript(tokens=ANSWER, cached_tokens=3)) as fake:
        config = priced(fake.url)
        config["model_list"][0]["litellm_params"].update(prices)
        with logged() as log:
            async with gateway(config) as running:
                assert (await running.chat()).status == 200
                [line] = await log.until(1)
    tokens = line["input_tokens"] - 3
    assert line["cost"] == pytest.approx(0.000001 * tokens + cached * 3 + 0.000002 * line["output_tokens"])


REFUSALS: dict[str, tuple[str, bytes, str | None, int, str]] = {
    "no key": ("/v1/chat/completions", b"{}", None, 401, "invalid_api_key"),
    "unknown key": ("/v1/chat/completions", b"{}", "sk-canary", 401, "invalid_api_key"),
    "unknown path": ("/v1/nothing", b"{}", MASTER, 404, "not_found"),
    "no JSON": ("/v1/chat/completions", b"{canary", MASTER, 400, "invalid_value"),
    "unknown model": ("/v1/responses", b'{"model": "gpt-9", "input": "canary"}', MASTER, 404, "model_not_found"),
}


@pytest.mark.parametrize(("path", "body", "key", "status", "code"), REFUSALS.values(), ids=REFUSALS)
async def test_a_refusal_has_a_line(
    tmp_path: Path, path: str, body: bytes, key: str | None, status: int, code: str
) -> None:
    with logged() as log:
        async with FakeVllm() as fake, keyed(priced(fake.url, request_log={"sample": 0}), tmp_path) as (running, _):
            answer = await running.post(path, body, **({} if key is None else bearing(key)))
            [line] = await log.until(1)
    assert (line["status"], line["error"]) == (answer.status, answer.body["error"]["code"]) == (status, code)
    assert line.get("route", "/v1/nothing") == path
    assert line.get("model", "gpt-9") == "gpt-9"
    assert "canary" not in log.text


async def test_a_failure_names_all_attempts() -> None:
    async with FakeVllm(script=lambda _: Refusal(500, b"{}")) as broken, FakeVllm() as sound:
        sound.script = lambda _: VllmScript(tokens=ANSWER)
        with logged() as log:
            routing = {"routing_strategy": "simple-shuffle"}
            async with gateway(config_of(f"vllm@{broken.url}", f"vllm@{sound.url}", router_settings=routing)) as site:
                for _ in range(8):
                    assert (await site.chat()).status == 200
                lines = await log.until(8)
    moved = [line["attempts"] for line in lines if len(line["attempts"]) > 1]
    assert moved
    assert {(each[0]["deployment"], each[0]["error"]) for each in moved} == {("vllm-1", "backend_error")}
    assert all(line["deployment"] == "vllm-2" for line in lines)


async def test_a_limit_is_logged_with_its_key_and_end_user(tmp_path: Path) -> None:
    with logged() as log:
        async with FakeVllm() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
            fake.script = lambda _: VllmScript(tokens=ANSWER)
            record, key = await keys.issue(limits=KeyLimits(rpm=1))
            answers = [await running.chat_as(key, user="u-7", metadata={"a": "b"}) for _ in range(2)]
            lines = await log.until(2)
    assert [answer.status for answer in answers] == [line["status"] for line in lines] == [200, 429]
    assert {(line["key"], line["user"]) for line in lines} == {(record.id, "u-7")}
    assert lines[1]["error"] == "rate_limit_exceeded"
    assert lines[0]["notes"] == answers[0].headers["x-unisono-notes"].split(", ")


async def test_a_client_that_leaves_is_logged(tmp_path: Path) -> None:
    with logged() as log:
        async with FakeVllm() as fake, gateway(priced(fake.url)) as site:
            fake.script = lambda _: VllmScript(tokens=ANSWER * 50, delay_s=0.01)
            body = {**CHAT, "stream": True}
            async with site.session.post(f"{site.url}/v1/chat/completions", json=body) as response:
                await response.content.readany()
            [line] = await log.until(1)
    assert (line["status"], line["finish"]) == (200, "left")
    assert line["output_tokens"] > 0


async def test_answers_on_a_websocket_and_in_the_background_have_lines(tmp_path: Path) -> None:
    with logged() as log:
        async with FakeVllm(script=lambda _: VllmScript(tokens=ANSWER)) as fake, gateway(priced(fake.url)) as site:
            created = await site.post(
                "/v1/responses", b'{"model": "gpt-oss", "input": "A canary asks.", "background": true}'
            )
            assert created.status == 200
            await log.until(2)
            async with connect(site.url.replace("http", "ws", 1) + "/v1/responses") as socket:
                for _ in range(2):
                    create = {"type": "response.create", "model": "gpt-oss", "input": "A canary asks."}
                    await socket.send(json.dumps(create))
                    while json.loads(await socket.recv())["type"] != "response.completed":
                        pass
            lines = await log.until(5)
    by_route: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_route.setdefault(line["route"], []).append(line)
    request, handshake = by_route["/v1/responses"]
    assert (request["status"], "output_tokens" in request, handshake["status"]) == (200, False, 101)
    assert (request["separate_answer"], handshake["separate_answer"]) == (True, True)
    answers = [*by_route["background"], *by_route["websocket"]]
    assert not any("status" in line for line in answers)
    assert [line["output_tokens"] for line in answers] == [len(ANSWER)] * 3
    assert {line["deployment"] for line in answers} == {"vllm-1"}
    assert "canary" not in log.text


async def _logged_statuses(log: Lines, **settings: Any) -> Sequence[dict[str, Any]]:
    """Return the lines of a probe, a scrape, a successful request and a failed one."""
    async with (
        FakeVllm(script=lambda _: VllmScript(tokens=ANSWER)) as fake,
        gateway(priced(fake.url, request_log=settings)) as site,
    ):
        for path in ("/health/liveliness", "/"):
            async with site.session.get(site.url + path) as response:
                assert response.status == 200
        assert (await site.chat()).status == 200
        assert (await site.chat(model="gpt-9")).status == 404
        return log.requests


SETTINGS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "by default": ({}, [200, 404]),
    "with probes": ({"probes": True}, [200, 200, 200, 404]),
    "only failures": ({"sample": 0}, [404]),
    "off": ({"enabled": False}, []),
}


@pytest.mark.parametrize(("settings", "statuses"), SETTINGS.values(), ids=SETTINGS)
async def test_the_operator_chooses_the_logged_requests(settings: dict[str, Any], statuses: list[int]) -> None:
    with logged() as log:
        assert [line["status"] for line in await _logged_statuses(log, **settings)] == statuses


async def test_the_operator_chooses_the_fields() -> None:
    with logged() as log:
        lines = await _logged_statuses(log, fields=["status", "model"])
    of_logging = {"time", "level", "logger", "message"}
    assert [line.keys() - of_logging for line in lines] == [{"status", "model"}, {"status", "model"}]


async def test_the_text_format_is_one_readable_line() -> None:
    with logged("text") as log:
        async with FakeVllm(script=lambda _: VllmScript(tokens=ANSWER)) as fake, gateway(priced(fake.url)) as site:
            assert (await site.chat()).status == 200
            assert (await site.chat(model="gpt-9\n\x1b[31mred")).status == 404
    answered, refused = (line for line in log.text.splitlines() if "POST" in line)
    time, rest = answered.split(" ", 1)
    assert len(time.split(":")) == 3
    assert rest.startswith("POST /v1/chat/completions 200 in ")
    assert f" + {len(ANSWER)} tokens" in rest
    assert "gpt-oss on vllm-1" in rest
    assert "404" in refused
    assert refused.endswith(r"gpt-9\n\x1b[31mred")
