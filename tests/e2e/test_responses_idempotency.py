"""Idempotency keys: repeated requests to any replica create one response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.contract.servers import Server
from tests.e2e.gateway import Answer, gateway
from tests.e2e.responses import ANSWER, CALL, OK, TOOL, Json, Line, refusal, streamed
from tests.e2e.wires import WIRES, asked, deployment
from tests.fakes import close_at

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAM_MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CUSTOM = {"type": "custom", "name": "look"}


@dataclass
class GatewayPair:
    """Two gateways that share only a Redis and a backend."""

    first: Line
    second: Line
    keys: int = 0

    def key(self) -> dict[str, str]:
        """Return a header with a key that was never sent before."""
        self.keys += 1
        return {"idempotency-key": f"key {self.keys}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayPair]:
    server = Server(tmp_path_factory.mktemp("redis"), ("appendonly yes", "maxmemory-policy noeviction"))
    wire = WIRES["vllm"]
    async with AsyncExitStack() as stack:
        stack.callback(server.end)
        await asyncio.to_thread(server.start)
        fake = wire.fake()
        await stack.enter_async_context(fake)
        config = {
            "model_list": [deployment("gpt-oss", wire, fake)],
            "router_settings": {"allowed_fails": 1_000_000, "num_retries": 0},
            "store": {"url": server.url, "deadline_s": 3.0, "log_ttl_s": 0.5},
        }
        first, second = [Line(wire, fake, await stack.enter_async_context(gateway(config))) for _ in range(2)]
        yield GatewayPair(first, second)


def generations(pair: GatewayPair) -> int:
    return len(asked(pair.first.fake))


def response_of(response: Answer) -> Json:
    """Return the final response of a reply, streamed or not."""
    return streamed(response).last if response.events else dict(response.body)


@STREAM_MODES
async def test_a_repeated_request_gets_the_same_response_during_and_after(pair: GatewayPair, stream: bool) -> None:
    key = pair.key()
    pair.first.say(ANSWER, delay_s=0.03)
    first = asyncio.create_task(pair.first.post(stream=stream, headers=key))
    await pair.first.fake.asked()
    joined = asyncio.create_task(pair.second.post(stream=stream, headers=key))
    replies = [await first, await joined, await pair.second.post(stream=stream, headers=key)]
    assert {reply.status for reply in replies} == {200}
    assert len({reply.raw for reply in replies}) == 1
    response = response_of(replies[0])
    assert response["status"] == "completed"
    assert await pair.second.kept(response) == response
    assert generations(pair) == 1


@STREAM_MODES
async def test_fifty_parallel_requests_to_two_gateways_create_one_response(pair: GatewayPair, stream: bool) -> None:
    key = pair.key()
    pair.first.say(ANSWER, delay_s=0.01)
    gateways = (pair.first, pair.second)
    replies = await asyncio.gather(*(gateways[n % 2].post(stream=stream, headers=key) for n in range(50)))
    assert {reply.status for reply in replies} == {200}
    assert len({reply.raw for reply in replies}) == 1
    assert generations(pair) == 1


async def test_fifty_parallel_requests_extend_a_conversation_once(pair: GatewayPair) -> None:
    key = pair.key()
    pair.first.say(ANSWER)
    conversation = await pair.first.conversation()
    gateways = (pair.first, pair.second)
    posts = (gateways[n % 2].post(conversation=conversation, headers=key, stream=False) for n in range(50))
    replies = await asyncio.gather(*posts)
    assert len({reply.raw for reply in replies}) == 1
    assert [item["type"] for item in await pair.second.items(conversation)] == ["message", "reasoning", "message"]


@STREAM_MODES
async def test_a_key_is_rejected_with_another_body_and_accepted_on_other_paths(pair: GatewayPair, stream: bool) -> None:
    key = pair.key()
    pair.first.say(ANSWER)
    first = response_of(await pair.first.post(stream=stream, headers=key))
    changes: tuple[Json, ...] = ({"input": "Something else"}, {"stream": not stream}, {"metadata": {"a": "b"}})
    for change in changes:
        fields: Json = {"stream": stream, **change}
        reply = await pair.second.post(headers=key, **fields)
        refusal(reply, 409, code="idempotency_key_reused")
    for root in ("", "/open-responses/v1"):
        gateway_at_root = Line(pair.second.wire, pair.second.fake, pair.second.gateway, root)
        repeated = response_of(await gateway_at_root.post(stream=stream, headers=key))
        assert repeated["id"] == first["id"]
    assert generations(pair) == 1


INVALID_KEYS: dict[str, tuple[str, Json]] = {
    "empty key": ("", {}),
    "long key": ("k" * 256, {}),
    "non-ASCII key": ("schlüssel", {}),
}


@pytest.mark.parametrize(("key", "fields"), INVALID_KEYS.values(), ids=INVALID_KEYS)
async def test_an_invalid_key_is_rejected(pair: GatewayPair, key: str, fields: Json) -> None:
    assert "Idempotency-Key" in refusal(await pair.first.post(headers={"idempotency-key": key}, **fields), 400)


@STREAM_MODES
async def test_a_failed_response_frees_the_key(pair: GatewayPair, stream: bool) -> None:
    key = pair.key()
    pair.first.say(OK[:-10] + " and so on", faults=(close_at(5),))
    replies = [await pair.first.post(stream=stream, headers=key), await pair.second.post(stream=stream, headers=key)]
    for reply in replies:
        if stream:
            assert response_of(reply)["status"] == "failed"
        else:
            refusal(reply, 502)
    assert generations(pair) == 2
    pair.first.say(ANSWER)
    response = response_of(await pair.second.post(stream=stream, headers=key, metadata={"another": "body"}))
    assert response["status"] == "completed"
    assert generations(pair) == 1


async def test_a_failure_after_the_client_disconnected_frees_the_key(pair: GatewayPair) -> None:
    key = pair.key()
    pair.first.say(OK[:-10] + " and so on", faults=(close_at(5),), delay_s=0.02)
    task = asyncio.create_task(pair.first.post(headers=key))
    await pair.first.fake.asked()
    task.cancel()
    await asyncio.sleep(0.5)
    pair.first.say(ANSWER)
    assert response_of(await pair.second.post(headers=key))["status"] == "completed"
    assert generations(pair) == 1


@STREAM_MODES
async def test_a_rejected_request_frees_the_key(pair: GatewayPair, stream: bool) -> None:
    key = pair.key()
    pair.first.say(ANSWER)
    missing = {"previous_response_id": "resp_" + "0" * 32}
    for gateway_line in (pair.first, pair.second):
        refusal(await gateway_line.post(stream=stream, headers=key, **missing), 404, "previous_response_id")
    assert response_of(await pair.first.post(stream=stream, headers=key))["status"] == "completed"


@STREAM_MODES
async def test_a_client_that_disconnects_finds_its_response_again(pair: GatewayPair, stream: bool) -> None:
    key = pair.key()
    pair.first.say(ANSWER, delay_s=0.05)
    task = asyncio.create_task(pair.first.post(stream=stream, headers=key))
    await pair.first.fake.asked()
    task.cancel()
    await asyncio.sleep(0.05)
    response = response_of(await pair.second.post(stream=stream, headers=key))
    assert response["status"] == "completed"
    assert generations(pair) == 1


OUTCOMES: dict[str, tuple[str, Json]] = {
    "answer": (ANSWER, {}),
    "empty answer": ("<|channel|>final<|message|><|return|>", {}),
    "call": (CALL, {"tools": [TOOL]}),
    "custom call": (CALL.replace('{"at":"sky"}', '{"input":"sky"}'), {"tools": [CUSTOM]}),
    "truncated answer": (ANSWER, {"max_output_tokens": 4}),
    "sealed reasoning": (ANSWER, {"include": ["reasoning.encrypted_content"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("root", ["/v1", "/open-responses/v1"])
@pytest.mark.parametrize(("output", "fields"), OUTCOMES.values(), ids=OUTCOMES)
async def test_a_stream_is_rebuilt_from_the_stored_response(
    pair: GatewayPair, output: str, fields: Json, root: str
) -> None:
    key = pair.key()
    harness = Line(pair.first.wire, pair.first.fake, pair.first.gateway, root)
    harness.say(output)
    first = streamed(await harness.post(stream=True, headers=key, **fields))
    async with asyncio.timeout(10):
        # Events expire earlier than keys.
        while (await harness.get(f"/responses/{first.last['id']}?stream=true")).status == 200:
            await asyncio.sleep(0.1)
    rebuilt = streamed(await harness.post(stream=True, headers=key, **fields))
    assert rebuilt.last == first.last
    assert set(rebuilt.types) == set(first.types) - {"response.queued"}
    assert generations(pair) == 1


@STREAM_MODES
async def test_a_key_on_an_unstored_response_has_no_effect_and_is_noted(pair: GatewayPair, stream: bool) -> None:
    pair.first.say(ANSWER)
    key = pair.key()
    for _ in range(2):
        reply = await pair.first.post(stream=stream, store=False, headers=key)
        response = streamed(reply).last if stream else reply.body
        assert response["unisono"]["notes"] == ["Idempotency-Key: no effect, because 'store' is false"]
    assert generations(pair) == 2
    for reply_without_note in (
        await pair.first.post(stream=stream, headers=key),
        await pair.first.post(stream=stream, store=False),
    ):
        response = streamed(reply_without_note).last if stream else reply_without_note.body
        assert "notes" not in response["unisono"]
