"""What passes through is counted, limited, watched, asked about and ended like everything else."""

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
from unisono.core.access import LOCAL_TENANT, KeyLimits
from unisono.core.quotas import Account, TokenUsage

MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def priced(base: str) -> dict[str, Any]:
    return {"model_list": [{**entry(base), "unisono": {"price": {"input": 100_000, "output": 200_000}}}]}


async def used_by(running: Gateway, tenant: str, key: str) -> TokenUsage:
    assert running.app is not None
    today = datetime.now(UTC).date().isoformat()
    entries = await running.app.state.gateway.store.ledger(today, today, Account(tenant, key))
    assert {one.model for one in entries} <= {"other"}
    return sum((one.used for one in entries), TokenUsage())


async def asked(running: Gateway, key: str, **fields: Any) -> Any:
    body = {"model": "other", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return await running.post("/v1/chat/completions", json.dumps(body).encode(), **bearing(key))


@MODES
async def test_what_the_server_says_it_took_is_in_the_ledger_when_the_answer_is_there(
    stream: bool, tmp_path: Path
) -> None:
    async with FakeOpenAi() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        record, key = await keys.issue()
        answer = await asked(running, key, stream=stream)
        used = await used_by(running, record.tenant, record.id)
    assert answer.status == 200
    assert used == TokenUsage(requests=1, input=7, output=2, cost=700_000 + 400_000)


@MODES
async def test_what_a_server_does_not_count_is_guessed_and_never_free(stream: bool, tmp_path: Path) -> None:
    script = OpenAiScript(words=("some words ",) * 20, counts=False)
    async with FakeOpenAi(script) as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        record, key = await keys.issue()
        await asked(running, key, stream=stream)
        used = await used_by(running, record.tenant, record.id)
    assert used.input >= 1
    assert used.output >= 20


async def test_a_count_beyond_belief_keeps_nobody_out(tmp_path: Path) -> None:
    async with (
        FakeOpenAi(OpenAiScript(prompt_tokens=2**63)) as fake,
        keyed(priced(fake.url), tmp_path) as (running, keys),
    ):
        record, key = await keys.issue()
        assert [(await asked(running, key)).status for _ in range(2)] == [200, 200]
        used = await used_by(running, record.tenant, record.id)
    assert used.requests == 2
    assert 0 < used.input < 100


async def test_a_client_that_leaves_pays_for_what_came(tmp_path: Path) -> None:
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


async def test_requests_over_a_limit_reach_nobody(tmp_path: Path) -> None:
    async with FakeOpenAi() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(rpm=1))
        first, second = await asked(running, key), await asked(running, key)
    assert (first.status, second.status) == (200, 429)
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(fake.requests) == 1


BOUNDS: dict[str, tuple[dict[str, Any], str]] = {
    "none asked for": ({}, "max_tokens"),
    "one": ({"max_tokens": 100_000}, "max_tokens"),
    "the newer one": ({"max_completion_tokens": 100_000}, "max_completion_tokens"),
    "a small one beside": ({"max_completion_tokens": 1, "max_tokens": 100_000}, "max_tokens"),
}


@pytest.mark.parametrize(("fields", "name"), BOUNDS.values(), ids=BOUNDS)
async def test_an_answer_may_have_no_more_tokens_than_the_budget_has(
    fields: dict[str, Any], name: str, tmp_path: Path
) -> None:
    async with FakeOpenAi() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(token_budget=2000))
        answer = await asked(running, key, **fields)
    assert answer.status == 200
    assert 0 < fake.requests[0].json[name] < 2000


async def test_choices_share_what_the_budget_has(tmp_path: Path) -> None:
    async with FakeOpenAi() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(token_budget=2000))
        assert (await asked(running, key, n=10, max_tokens=1000)).status == 200
    assert 0 < fake.requests[0].json["max_tokens"] < 200


async def test_a_key_of_other_models_may_not_ask(tmp_path: Path) -> None:
    async with FakeOpenAi() as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(models=frozenset({"another"}))
        answer = await asked(running, key)
    assert (answer.status, answer.body["error"]["code"]) == (403, "model_not_allowed")
    assert fake.requests == []


@MODES
async def test_metrics_and_readiness_tell_of_it(stream: bool) -> None:
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


async def test_a_server_that_is_not_there_makes_its_model_unready() -> None:
    async with passed() as (running, fake):
        fake.listing = Refusal(500)
        assert running.app is not None
        [live] = running.app.state.gateway.pool.members()["other"]
        live.known = None
        with pytest.raises(Exception, match="backend failed"):
            await live.check()
        assert (await running.get("/health/readiness")).status == 503


async def test_answers_are_recorded_without_a_token() -> None:
    async with passed(unisono={"traces": {"mode": "all"}}) as (running, _):
        answer = await running.chat(model="other")
        assert running.app is not None
        store = running.app.state.gateway.store
        async with asyncio.timeout(5):
            while not (kept := await store.traces(LOCAL_TENANT, 10)):
                await asyncio.sleep(0.02)
    assert kept[0].id.startswith(answer.headers["x-request-id"])


BLOCKED = {"hooks": [{"blocklist": {"patterns": {"word": "forbidden"}}}]}


@MODES
async def test_hooks_are_asked_about_what_the_body_says(stream: bool) -> None:
    async with passed(unisono=BLOCKED) as (running, fake):
        said = [{"role": "user", "content": [{"type": "text", "text": "this is forbidden"}]}]
        refused = await running.chat(model="other", stream=stream, messages=said)
        fine = await running.chat(model="other", stream=stream)
    assert refused.status == 400
    assert fine.status == 200
    assert len(fake.requests) == 1


async def test_hooks_see_what_a_whole_answer_says() -> None:
    async with passed(OpenAiScript(words=("a ", "forbidden word")), unisono=BLOCKED) as (running, _):
        assert (await running.chat(model="other")).status == 400


@pytest.mark.slow
async def test_what_does_not_end_before_the_gateway_says_why(tmp_path: Path) -> None:
    script = OpenAiScript(words=("a",) * 9, faults=(stall_at(4),))
    async with FakeOpenAi(script) as fake:
        store = {"url": f"sqlite://{tmp_path}/state.db"}
        config = {"model_list": [entry(fake.url)], "store": store, "unisono": {"shutdown_grace_s": 1}}
        async with replica(tmp_path, config) as one, aiohttp.ClientSession() as session:
            body = {"model": "other", "messages": [], "stream": True}
            async with session.post(one.url + "/v1/chat/completions", json=body) as answer:
                await answer.content.readuntil(b"\n\n")
                one.signal(signal.SIGTERM)
                rest = to_answer(200, answer.headers, await asyncio.wait_for(answer.read(), 15))
            await fake.gone()
            assert await asyncio.wait_for(one.ended(), 10) == 0
            assert "Traceback" not in one.log
    assert rest.events[-1]["error"]["code"] == "shutting_down"
    assert not rest.done


async def test_nothing_is_claimed_of_what_a_model_that_passes_can_do() -> None:
    async with passed() as (running, _):
        [model] = (await running.get("/model/info")).body["data"]
    assert model["model_name"] == "other"
    assert {name: value for name, value in model["model_info"].items() if name.startswith("supports")} == {
        "supports_function_calling": None,
        "supports_reasoning": None,
        "supports_vision": None,
    }
