"""Usage accounting, limits, metrics, hooks and shutdown of pass-through requests."""

from __future__ import annotations

import asyncio
import json
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.gateway import Gateway, to_answer
from tests.e2e.keyed import bearing, keyed
from tests.e2e.replicas import replica
from tests.fakes import Refusal, stall_at
from tests.fakes.openai_api import FakeOpenAi, OpenAiScript
from tests.passthrough.test_passing_chat import entry, passed
from unisono.core.access import LOCAL_TENANT
from unisono.core.quotas import Account, KeyLimits, TokenUsage

MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def priced(base: str) -> dict[str, Any]:
    return {"model_list": [{**entry(base), "unisono": {"price": {"input": 100_000, "output": 200_000}}}]}


async def used_by(running: Gateway, tenant: str, key: str) -> TokenUsage:
    assert running.app is not None
    today = datetime.now(UTC).date().isoformat()
    entries = await running.app.state.gateway.store.ledger(today, today, Account(tenant, key))
    assert {one.model for one in entries} <= {"other"}
    return sum((one.used for one in entries), TokenUsage())


async def chat(running: Gateway, key: str, **fields: Any) -> Any:
    body = {"model": "other", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return await running.post("/v1/chat/completions", json.dumps(body).encode(), **bearing(key))


@MODES
async def test_reported_usage_is_in_the_ledger_once_the_response_is_sent(stream: bool, tmp_path: Path) -> None:
    async with FakeOpenAi() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        record, key = await keys.issue()
        answer = await chat(running, key, stream=stream)
        used = await used_by(running, record.tenant, record.id)
    assert answer.status == 200
    assert used == TokenUsage(requests=1, input=7, output=2, cost=700_000 + 400_000)


@MODES
async def test_missing_usage_is_estimated_and_never_free(stream: bool, tmp_path: Path) -> None:
    script = OpenAiScript(words=("some words ",) * 20, counts=False)
    async with FakeOpenAi(script) as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        record, key = await keys.issue()
        await chat(running, key, stream=stream)
        used = await used_by(running, record.tenant, record.id)
    assert used.input >= 1
    assert used.output >= 20


async def test_an_implausible_token_count_does_not_exhaust_the_key(tmp_path: Path) -> None:
    async with (
        FakeOpenAi(OpenAiScript(prompt_tokens=2**63)) as fake,
        keyed(priced(fake.url), tmp_path) as (running, keys),
    ):
        record, key = await keys.issue()
        assert [(await chat(running, key)).status for _ in range(2)] == [200, 200]
        used = await used_by(running, record.tenant, record.id)
    assert used.requests == 2
    assert 0 < used.input < 100


async def test_a_client_disconnect_is_charged_for_the_received_tokens(tmp_path: Path) -> None:
    script = OpenAiScript(words=("word ",) * 50, delay_s=0.05)
    async with FakeOpenAi(script) as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        record, key = await keys.issue()
        body = {"model": "other", "messages": [], "stream": True}
        url = running.url + "/v1/chat/completions"
        async with running.session.post(url, json=body, headers=bearing(key)) as response:
            for _ in range(8):
                await response.content.readuntil(b"\n\n")
        await fake.gone()
        async with asyncio.timeout(5):
            while not (used := await used_by(running, record.tenant, record.id)).requests:
                await asyncio.sleep(0.02)
    assert 3 <= used.output <= 20


async def test_requests_over_a_rate_limit_reach_no_backend(tmp_path: Path) -> None:
    async with FakeOpenAi() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(rpm=1))
        first, second = await chat(running, key), await chat(running, key)
    assert (first.status, second.status) == (200, 429)
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(fake.requests) == 1


BOUNDS: dict[str, tuple[dict[str, Any], str]] = {
    "no limit requested": ({}, "max_tokens"),
    "max_tokens": ({"max_tokens": 100_000}, "max_tokens"),
    "max_completion_tokens": ({"max_completion_tokens": 100_000}, "max_completion_tokens"),
    "both fields": ({"max_completion_tokens": 1, "max_tokens": 100_000}, "max_tokens"),
}


@pytest.mark.parametrize(("fields", "name"), BOUNDS.values(), ids=BOUNDS)
async def test_the_token_limit_is_lowered_to_the_remaining_budget(
    fields: dict[str, Any], name: str, tmp_path: Path
) -> None:
    async with FakeOpenAi() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(token_budget=2000))
        answer = await chat(running, key, **fields)
    assert answer.status == 200
    assert 0 < fake.requests[0].json[name] < 2000


async def test_choices_share_the_remaining_budget(tmp_path: Path) -> None:
    async with FakeOpenAi() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(token_budget=2000))
        assert (await chat(running, key, n=10, max_tokens=1000)).status == 200
    assert 0 < fake.requests[0].json["max_tokens"] < 200


@pytest.mark.parametrize("number", [10, "10", " +10.0 ", "1_0", 10.0], ids=repr)
@pytest.mark.parametrize("name", ["n", "best_of"])
async def test_numbers_may_be_written_as_lenient_servers_read_them(name: str, number: Any, tmp_path: Path) -> None:
    async with FakeOpenAi() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(token_budget=2000))
        assert (await chat(running, key, **{name: number}, max_tokens="1000")).status == 200
        sent = fake.requests[-1].json
        assert (sent[name], 0 < sent["max_tokens"] < 200) == (number, True)


@pytest.mark.parametrize("value", ["many", 2.5, [3], {"n": 3}, "", "9" * 4000, "0x10"], ids=str)
@pytest.mark.parametrize("name", ["n", "best_of", "max_tokens", "max_completion_tokens"])
async def test_a_limit_that_is_no_whole_number_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    async with FakeOpenAi() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue()
        answer = await chat(running, key, **{name: value})
        assert (answer.status, answer.body["error"]["param"]) == (400, name)
        assert f"'{name}': must be a whole number" in answer.body["error"]["message"]
        assert not fake.requests


async def test_a_budget_without_a_token_for_each_answer_refuses_the_request(tmp_path: Path) -> None:
    async with FakeOpenAi() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(token_budget=2000))
        answer = await chat(running, key, n=5000, max_tokens=1)
        assert (answer.status, answer.body["error"]["param"]) == (429, "n")
        assert not fake.requests


async def test_a_key_for_other_models_is_refused(tmp_path: Path) -> None:
    async with FakeOpenAi() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(models=frozenset({"another"}))
        answer = await chat(running, key)
    assert (answer.status, answer.body["error"]["code"]) == (403, "model_not_allowed")
    assert fake.requests == []


@MODES
async def test_metrics_and_readiness_include_pass_through_models(stream: bool) -> None:
    async with passed() as (running, _):
        await running.chat(model="other", stream=stream)
        models = (await running.get("/v1/models")).body["data"]
        ready = (await running.get("/health/readiness")).body
        async with running.session.get(running.url + "/metrics") as response:
            metrics = await response.text()
    assert [model["id"] for model in models] == ["other"]
    assert ready["models"] == {"ready": 1, "total": 1}
    assert 'unisono_requests_total{error="",model="other",outcome="completed",surface="chat"} 1.0' in metrics
    assert 'unisono_backend_requests_total{backend="vllm-1",model="other",outcome="ok"} 1.0' in metrics


async def test_a_failing_server_makes_its_model_unready() -> None:
    async with passed() as (running, fake):
        fake.listing = Refusal(500)
        assert running.app is not None
        [live] = running.app.state.gateway.pool.members()["other"]
        live.known = None
        with pytest.raises(Exception, match="backend failed"):
            await live.check()
        assert (await running.get("/health/readiness")).status == 503


async def test_a_recording_is_stored_for_a_pass_through_response() -> None:
    async with passed(unisono={"traces": {"mode": "all"}}) as (running, _):
        answer = await running.chat(model="other")
        assert running.app is not None
        store = running.app.state.gateway.store
        async with asyncio.timeout(5):
            while not (recordings := await store.traces(LOCAL_TENANT, 10)):
                await asyncio.sleep(0.02)
    assert recordings[0].id.startswith(answer.headers["x-request-id"])


BLOCKED = {"hooks": [{"blocklist": {"patterns": {"word": "forbidden"}}}]}


@MODES
async def test_hooks_check_the_request_text(stream: bool) -> None:
    async with passed(unisono=BLOCKED) as (running, fake):
        messages = [{"role": "user", "content": [{"type": "text", "text": "this is forbidden"}]}]
        refused = await running.chat(model="other", stream=stream, messages=messages)
        fine = await running.chat(model="other", stream=stream)
    assert refused.status == 400
    assert fine.status == 200
    assert len(fake.requests) == 1


async def test_hooks_check_the_text_of_a_complete_response() -> None:
    async with passed(OpenAiScript(words=("a ", "forbidden word")), unisono=BLOCKED) as (running, _):
        assert (await running.chat(model="other")).status == 400


@pytest.mark.slow
async def test_a_stream_cut_by_shutdown_ends_with_an_error(tmp_path: Path) -> None:
    script = OpenAiScript(words=("a",) * 9, faults=(stall_at(4),))
    async with FakeOpenAi(script) as fake:
        store = {"url": f"sqlite://{tmp_path}/state.db"}
        config = {"model_list": [entry(fake.url)], "store": store, "unisono": {"shutdown_grace_s": 1}}
        async with replica(tmp_path, config) as gateway, aiohttp.ClientSession() as session:
            body = {"model": "other", "messages": [], "stream": True}
            async with session.post(gateway.url + "/v1/chat/completions", json=body) as answer:
                await answer.content.readuntil(b"\n\n")
                gateway.signal(signal.SIGTERM)
                rest = to_answer(200, answer.headers, await asyncio.wait_for(answer.read(), 15))
            await fake.gone()
            assert await asyncio.wait_for(gateway.ended(), 10) == 0
            assert "Traceback" not in gateway.log
    assert rest.events[-1]["error"]["code"] == "shutting_down"
    assert not rest.done


async def test_model_info_claims_no_capabilities_of_pass_through_models() -> None:
    async with passed() as (running, _):
        [model] = (await running.get("/model/info")).body["data"]
    assert model["model_name"] == "other"
    assert {name: value for name, value in model["model_info"].items() if name.startswith("supports")} == {
        "supports_function_calling": None,
        "supports_reasoning": None,
        "supports_vision": None,
    }


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "mp3"}}
FILE = {"type": "file", "file": {"file_data": "data:application/pdf;base64,QUJD", "filename": "a.pdf"}}


@pytest.mark.parametrize(
    ("part", "tokens"), [(IMAGE, 1_536), (AUDIO, 600), (FILE, 3_000)], ids=["image", "audio", "file"]
)
async def test_parallel_requests_reserve_an_estimate_for_media(
    part: dict[str, Any], tokens: int, tmp_path: Path
) -> None:
    script = OpenAiScript(prompt_tokens=tokens, delay_s=0.3)
    async with FakeOpenAi(script) as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        record, key = await keys.issue(limits=KeyLimits(token_budget=3 * tokens + 1000))
        content = [{"type": "text", "text": "Look"}, part]
        messages = [{"role": "user", "content": content}]
        answers = await asyncio.gather(*(chat(running, key, messages=messages, max_tokens=5) for _ in range(10)))
        used = await used_by(running, record.tenant, record.id)
    assert 1 <= sum(answer.status == 200 for answer in answers) <= 4
    assert used.input + used.output <= 3 * tokens + 1000
