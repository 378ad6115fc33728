"""A stream whose head went out before anything was known: keep-alives first, and one proper end whatever happens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.api.responses.folding import fold
from tests.api.responses.mounted import Mounted, mounted
from tests.e2e.gateway import config_of
from tests.fakes import FakeVllm, VllmScript, close_at
from unisono.harmony.encoding import load_encoding

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>ok<|return|>")
KEEP_ALIVE = ": keep-alive"


@pytest.fixture
async def fake() -> AsyncIterator[FakeVllm]:
    async with FakeVllm(tokens=ANSWER) as fake:
        yield fake


@pytest.fixture
async def desk(fake: FakeVllm) -> AsyncIterator[Mounted]:
    config = config_of(f"vllm@{fake.url}", router_settings={"num_retries": 0})
    async with mounted(config, keep_alive_s=0.05) as here:
        yield here


async def frames(desk: Mounted, path: str = "/v1/responses", **fields: Any) -> list[str]:
    body = {"model": "gpt-oss", "input": "Hi", "stream": True, **fields}
    answer = await desk.ask("POST", path, body)
    assert answer.status == 200, answer.body
    *found, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    return found


def folded(found: list[str]) -> dict[str, Any]:
    """The response a stream ends with, keep-alives left out."""
    told = [frame for frame in found if frame != KEEP_ALIVE]
    assert told.pop() == "data: [DONE]"
    return fold([json.loads(frame.split("\ndata: ")[1]) for frame in told]).response


async def test_a_silent_stream_is_kept_alive_between_events(desk: Mounted, fake: FakeVllm) -> None:
    fake.script = lambda asked: VllmScript(tokens=ANSWER, first_delay_s=0.2, delay_s=0.12)
    found = await frames(desk)
    assert found[0] == KEEP_ALIVE
    assert KEEP_ALIVE in found[found.index(next(f for f in found if f.startswith("event:"))) :]
    assert folded(found)["status"] == "completed"


@pytest.mark.parametrize("path", ["/v1/responses", "/open-responses/v1/responses"])
@pytest.mark.parametrize("store", [True, False], ids=["kept", "not kept"])
async def test_a_failure_behind_a_keep_alive_is_a_failed_response(
    desk: Mounted, fake: FakeVllm, store: bool, path: str
) -> None:
    fake.script = lambda asked: VllmScript(tokens=ANSWER, first_delay_s=0.2, faults=(close_at(0),))
    found = await frames(desk, path, store=store)
    assert found[0] == KEEP_ALIVE
    response = folded(found)
    assert (response["status"], response["output"]) == ("failed", [])
    kept = await desk.ask("GET", f"{path}/{response['id']}")
    assert kept.status == (200 if store else 404)
    if store:
        assert kept.json() == response


async def test_what_is_refused_behind_a_keep_alive_is_a_failed_response(fake: FakeVllm) -> None:
    # So many items take a thread a moment, and only the last of them is wrong.
    items = [{"role": "user", "content": f"{n} " + "word " * 20} for n in range(15_000)]
    wrong = {"type": "function_call_output", "call_id": "call_x", "output": "o"}
    async with mounted(config_of(f"vllm@{fake.url}"), keep_alive_s=0.002) as desk:
        found = await frames(desk, input=[*items, wrong])
        assert found[0] == KEEP_ALIVE
        response = folded(found)
        assert (response["status"], response["error"]["code"]) == ("failed", "invalid_prompt")
        assert "call_x" in response["error"]["message"]
        assert fake.requests == []
        assert (await desk.ask("GET", f"/v1/responses/{response['id']}")).status == 404
