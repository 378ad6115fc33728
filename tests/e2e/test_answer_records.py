"""Request records of answers that have a record of their own: in the background and on WebSockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from websockets.asyncio.client import connect

from tests.e2e.gateway import Answer, Gateway, config_of
from tests.e2e.keyed import MASTER, bearing, keyed
from tests.fakes import FakeVllm, Refusal, VllmScript
from unisono.api.responses.background import takeover
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
ANSWER = ENCODING.encode_marked("<|channel|>final<|message|>Hello, canary.<|return|>")
PRICE = 0.00001


@asynccontextmanager
async def priced(fake: FakeVllm, folder: Path, model: str = "gpt-oss") -> AsyncIterator[Gateway]:
    config = config_of(f"vllm@{fake.url}")
    config["model_list"][0]["model_name"] = model
    config["model_list"][0]["litellm_params"]["output_cost_per_token"] = PRICE
    async with keyed(config, folder) as (running, _):
        yield running


async def create(running: Gateway, key: str = "", **fields: Any) -> Answer:
    headers = bearing(MASTER) | ({"idempotency-key": key} if key else {})
    body = {"model": "gpt-oss", "input": "Hi", "user": "eve", **fields}
    return await running.post("/v1/responses", json.dumps(body).encode(), **headers)


async def records(running: Gateway, count: int = 1) -> list[dict[str, Any]]:
    """Return the records of requests to models, once there are `count` and no more follow."""
    async with asyncio.timeout(15):
        while True:
            answer = await running.get("/v1/requests?model=gpt-oss&limit=200", **bearing(MASTER))
            if len(found := answer.body["data"]) >= count:
                break
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    answer = await running.get("/v1/requests?model=gpt-oss&limit=200", **bearing(MASTER))
    found = answer.body["data"]
    return list(found)


async def counted(running: Gateway) -> tuple[int, int, int, float]:
    points = (await running.get("/v1/requests/stats?model=gpt-oss", **bearing(MASTER))).body["data"]
    names = ("requests", "errors", "output_tokens", "cost")
    requests, errors, tokens, cost = (sum(point[name] for point in points) for name in names)
    return requests, errors, tokens, round(cost, 9)


async def test_a_background_response_has_one_record_with_its_facts(tmp_path: Path) -> None:
    async with FakeVllm(script=lambda _: VllmScript(tokens=ANSWER)) as fake, priced(fake, tmp_path) as running:
        created = await create(running, background=True)
        [record] = await records(running)
        cost = round(PRICE * len(ANSWER), 9)
        assert (record["id"], record["route"]) == (created.headers["x-request-id"], "background")
        assert (record["output_tokens"], record["cost"]) == (len(ANSWER), cost)
        assert (record["deployment"], record["finish"], record["user"]) == ("vllm-1", "stop", "eve")
        assert await counted(running) == (1, 0, len(ANSWER), cost)
        for query in ("summarize=false", f"request_id={record['id']}"):
            [row] = (await running.get(f"/spend/logs?{query}", **bearing(MASTER))).body
            assert (row["spend"], row["completion_tokens"], row["status"]) == (cost, len(ANSWER), "success")
            assert (row["model_id"], row["end_user"]) == ("vllm-1", "eve")


async def test_a_failed_background_response_is_listed_as_failed(tmp_path: Path) -> None:
    async with FakeVllm(script=lambda _: Refusal(400, b"{}")) as fake, priced(fake, tmp_path) as running:
        await create(running, background=True)
        [record] = await records(running)
        assert record["error"] == "backend_rejected_request"
        assert (await counted(running))[:2] == (1, 1)
        [row] = (await running.get("/spend/logs?summarize=false", **bearing(MASTER))).body
        assert (row["status"], row["metadata"]["error_code"]) == ("failure", "backend_rejected_request")


async def test_a_repeated_idempotent_request_has_a_record_without_tokens(tmp_path: Path) -> None:
    async with FakeVllm(script=lambda _: VllmScript(tokens=ANSWER)) as fake, priced(fake, tmp_path) as running:
        first, second = [await create(running, "once") for _ in range(2)]
        assert first.body["id"] == second.body["id"]
        found = {record["id"]: record for record in await records(running, 2)}
    answered, replayed = (found.pop(answer.headers["x-request-id"]) for answer in (first, second))
    assert not found
    assert (answered["route"], answered["output_tokens"]) == ("background", len(ANSWER))
    assert (replayed["route"], replayed.get("output_tokens"), replayed.get("cost")) == ("/v1/responses", None, None)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_response_that_another_process_continues_has_one_record(tmp_path: Path, is_cancelled: bool) -> None:
    script = VllmScript(tokens=ANSWER, delay_s=0.3)
    async with FakeVllm(script=lambda _: script) as fake:
        async with priced(fake, tmp_path) as running:
            created = await create(running, background=True)
            await asyncio.sleep(0.8)
        async with priced(fake, tmp_path) as running:
            if is_cancelled:
                path = f"/v1/responses/{created.body['id']}/cancel"
                assert (await running.post(path, b"", **bearing(MASTER))).status == 200
            [record] = await records(running)
    assert (record["id"], record["user"]) == (created.headers["x-request-id"], "eve")
    if is_cancelled:
        assert record["finish"] == "left"
    else:
        assert (record["finish"], record["output_tokens"]) == ("stop", len(ANSWER))
        assert record["cost"] == pytest.approx(PRICE * len(ANSWER))


async def test_a_response_that_no_process_can_continue_has_a_failed_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "MAX_LEFT_S", -1.0)
    script = VllmScript(tokens=ANSWER, delay_s=0.3)
    async with FakeVllm(script=lambda _: script) as fake:
        async with priced(fake, tmp_path) as running:
            created = await create(running, background=True)
            events = f"{running.url}/v1/responses/{created.body['id']}?stream=true"
            async with aiohttp.ClientSession(headers=bearing(MASTER)) as session, session.get(events) as stream:
                while b"output_text.delta" not in await stream.content.readline():
                    pass
        async with priced(fake, tmp_path, "another") as running:
            [record] = await records(running)
    assert (record["id"], record["error"]) == (created.headers["x-request-id"], "internal_error")
    assert (record["route"], record["user"]) == ("background", "eve")
    assert 0 < record["output_tokens"] < len(ANSWER)


async def test_a_compaction_and_its_answer_are_one_record(tmp_path: Path) -> None:
    compacting: dict[str, Any] = {
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        "input": [
            {"role": "user", "content": "word " * 1500},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Hi"},
        ],
    }
    async with FakeVllm(script=lambda _: VllmScript(tokens=ANSWER)) as fake, priced(fake, tmp_path) as running:
        created = await create(running, **compacting, background=True)
        [record] = await records(running)
        assert record["output_tokens"] == 2 * len(ANSWER)
        assert record["id"] == created.headers["x-request-id"]
        url = running.url.replace("http", "ws", 1) + "/v1/responses"
        async with connect(url, additional_headers=bearing(MASTER)) as socket:
            for fields in (compacting, {"input": "Hi"}):
                await socket.send(json.dumps({"type": "response.create", "model": "gpt-oss", "store": False, **fields}))
                while (event := json.loads(await socket.recv()))["type"] != "response.completed":
                    assert event["type"] not in ("error", "response.failed"), event
        found = await records(running, 3)
    sockets = sorted((record["id"], record["output_tokens"]) for record in found if record["route"] == "websocket")
    assert [tokens for _, tokens in sockets] == [2 * len(ANSWER), len(ANSWER)]
    assert sockets[1][0] == f"{sockets[0][0]}.2"
    assert len(found) == 3
