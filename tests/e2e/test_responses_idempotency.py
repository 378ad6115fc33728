"""Idempotency keys: however often a request is sent, to whichever replica, one response comes of it."""

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

WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CUSTOM = {"type": "custom", "name": "look"}


@dataclass
class Pair:
    """Two gateways that share a Redis and a backend, and nothing else."""

    one: Line
    two: Line
    keys: int = 0

    def key(self) -> dict[str, str]:
        """A header nobody has sent before."""
        self.keys += 1
        return {"idempotency-key": f"key {self.keys}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
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
        one, two = [Line(wire, fake, await stack.enter_async_context(gateway(config))) for _ in range(2)]
        yield Pair(one, two)


def generations(pair: Pair) -> int:
    return len(asked(pair.one.fake))


def response_of(answer: Answer) -> Json:
    """The response at the end of an answer, whichever way it came."""
    return streamed(answer).last if answer.events else dict(answer.body)


@WAYS
async def test_a_repeat_gets_the_same_response_while_it_is_made_and_after(pair: Pair, stream: bool) -> None:
    key = pair.key()
    pair.one.say(ANSWER, delay_s=0.03)
    first = asyncio.create_task(pair.one.post(stream=stream, headers=key))
    await pair.one.fake.asked()
    joined = asyncio.create_task(pair.two.post(stream=stream, headers=key))
    answers = [await first, await joined, await pair.two.post(stream=stream, headers=key)]
    assert {answer.status for answer in answers} == {200}
    assert len({answer.raw for answer in answers}) == 1
    response = response_of(answers[0])
    assert response["status"] == "completed"
    assert await pair.two.kept(response) == response
    assert generations(pair) == 1


@WAYS
async def test_fifty_at_once_on_two_gateways_are_one(pair: Pair, stream: bool) -> None:
    key = pair.key()
    pair.one.say(ANSWER, delay_s=0.01)
    here = (pair.one, pair.two)
    answers = await asyncio.gather(*(here[n % 2].post(stream=stream, headers=key) for n in range(50)))
    assert {answer.status for answer in answers} == {200}
    assert len({answer.raw for answer in answers}) == 1
    assert generations(pair) == 1


async def test_fifty_at_once_grow_a_conversation_once(pair: Pair) -> None:
    key = pair.key()
    pair.one.say(ANSWER)
    conversation = await pair.one.conversation()
    here = (pair.one, pair.two)
    posts = (here[n % 2].post(conversation=conversation, headers=key, stream=False) for n in range(50))
    answers = await asyncio.gather(*posts)
    assert len({answer.raw for answer in answers}) == 1
    assert [item["type"] for item in await pair.two.items(conversation)] == ["message", "reasoning", "message"]


@WAYS
async def test_another_body_is_refused_and_another_path_is_not_another_body(pair: Pair, stream: bool) -> None:
    key = pair.key()
    pair.one.say(ANSWER)
    first = response_of(await pair.one.post(stream=stream, headers=key))
    others: tuple[Json, ...] = ({"input": "Something else"}, {"stream": not stream}, {"metadata": {"a": "b"}})
    for other in others:
        fields: Json = {"stream": stream, **other}
        answer = await pair.two.post(headers=key, **fields)
        refusal(answer, 409, code="idempotency_key_reused")
    for root in ("", "/open-responses/v1"):
        there = Line(pair.two.wire, pair.two.fake, pair.two.gateway, root)
        again = response_of(await there.post(stream=stream, headers=key))
        assert again["id"] == first["id"]
    assert generations(pair) == 1


REFUSED: dict[str, tuple[str, Json]] = {
    "an empty key": ("", {}),
    "a long key": ("k" * 256, {}),
    "a key of other letters": ("schlüssel", {}),
}


@pytest.mark.parametrize(("key", "fields"), REFUSED.values(), ids=REFUSED)
async def test_what_can_be_no_key_is_refused(pair: Pair, key: str, fields: Json) -> None:
    assert "Idempotency-Key" in refusal(await pair.one.post(headers={"idempotency-key": key}, **fields), 400)


@WAYS
async def test_a_failure_frees_the_key(pair: Pair, stream: bool) -> None:
    key = pair.key()
    pair.one.say(OK[:-10] + " and so on", faults=(close_at(5),))
    answers = [await pair.one.post(stream=stream, headers=key), await pair.two.post(stream=stream, headers=key)]
    for answer in answers:
        if stream:
            assert response_of(answer)["status"] == "failed"
        else:
            refusal(answer, 502)
    assert generations(pair) == 2
    pair.one.say(ANSWER)
    response = response_of(await pair.two.post(stream=stream, headers=key, metadata={"another": "body"}))
    assert response["status"] == "completed"
    assert generations(pair) == 1


async def test_a_failure_nobody_heard_of_frees_the_key(pair: Pair) -> None:
    key = pair.key()
    pair.one.say(OK[:-10] + " and so on", faults=(close_at(5),), delay_s=0.02)
    leaving = asyncio.create_task(pair.one.post(headers=key))
    await pair.one.fake.asked()
    leaving.cancel()
    await asyncio.sleep(0.5)
    pair.one.say(ANSWER)
    assert response_of(await pair.two.post(headers=key))["status"] == "completed"
    assert generations(pair) == 1


@WAYS
async def test_what_is_refused_frees_the_key(pair: Pair, stream: bool) -> None:
    key = pair.key()
    pair.one.say(ANSWER)
    nothing = {"previous_response_id": "resp_" + "0" * 32}
    for here in (pair.one, pair.two):
        refusal(await here.post(stream=stream, headers=key, **nothing), 404, "previous_response_id")
    assert response_of(await pair.one.post(stream=stream, headers=key))["status"] == "completed"


@WAYS
async def test_a_client_that_leaves_ends_nothing_and_finds_it_again(pair: Pair, stream: bool) -> None:
    key = pair.key()
    pair.one.say(ANSWER, delay_s=0.05)
    leaving = asyncio.create_task(pair.one.post(stream=stream, headers=key))
    await pair.one.fake.asked()
    leaving.cancel()
    await asyncio.sleep(0.05)
    response = response_of(await pair.two.post(stream=stream, headers=key))
    assert response["status"] == "completed"
    assert generations(pair) == 1


OUTCOMES: dict[str, tuple[str, Json]] = {
    "an answer": (ANSWER, {}),
    "nothing said": ("<|channel|>final<|message|><|return|>", {}),
    "a call": (CALL, {"tools": [TOOL]}),
    "a custom call": (CALL.replace('{"at":"sky"}', '{"input":"sky"}'), {"tools": [CUSTOM]}),
    "an answer that was cut": (ANSWER, {"max_output_tokens": 4}),
    "sealed reasoning": (ANSWER, {"include": ["reasoning.encrypted_content"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("root", ["/v1", "/open-responses/v1"])
@pytest.mark.parametrize(("output", "fields"), OUTCOMES.values(), ids=OUTCOMES)
async def test_a_stream_is_a_sound_stream_again_when_its_events_are_gone(
    pair: Pair, output: str, fields: Json, root: str
) -> None:
    key = pair.key()
    here = Line(pair.one.wire, pair.one.fake, pair.one.gateway, root)
    here.say(output)
    first = streamed(await here.post(stream=True, headers=key, **fields))
    async with asyncio.timeout(10):
        # Events are kept for a while, keys for longer.
        while (await here.get(f"/responses/{first.last['id']}?stream=true")).status == 200:
            await asyncio.sleep(0.1)
    again = streamed(await here.post(stream=True, headers=key, **fields))
    assert again.last == first.last
    assert set(again.types) == set(first.types) - {"response.queued"}
    assert generations(pair) == 1


@WAYS
async def test_a_key_on_what_is_not_kept_has_no_effect_and_is_told_so(pair: Pair, stream: bool) -> None:
    pair.one.say(ANSWER)
    key = pair.key()
    for _ in range(2):
        answer = await pair.one.post(stream=stream, store=False, headers=key)
        response = streamed(answer).last if stream else answer.body
        assert response["unisono"]["notes"] == ["Idempotency-Key: no effect, because 'store' is false"]
    assert generations(pair) == 2
    for kept in (await pair.one.post(stream=stream, headers=key), await pair.one.post(stream=stream, store=False)):
        response = streamed(kept).last if stream else kept.body
        assert "notes" not in response["unisono"]
