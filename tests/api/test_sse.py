"""A stream to a client that is there, slow, silent or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest
from starlette.types import Message

from tests.api.asgi import Exchange, events_of
from unisono.api.sse import KEEP_ALIVE, ClientGone, EventStream, until_disconnect
from unisono.errors import BackendOverloaded, BackendUnavailable

Step = bytes | float | Exception


class Scripted:
    """A source that plays bytes, pauses (seconds) and failures, and tells how it ended."""

    def __init__(self, *steps: Step) -> None:
        self.closed = 0
        self.cancelled = False
        self._steps = steps

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            for step in self._steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, bytes):
                    yield step
                else:
                    await asyncio.sleep(step)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def aclose(self) -> None:
        self.closed += 1


def exchange(source: Scripted, *, keep_alive_s: float = 10.0) -> Exchange:
    stream = EventStream(source, headers=lambda: {"x-unisono-backend": "vllm-1"}, keep_alive_s=keep_alive_s)
    return Exchange(stream, "POST", "/", body=[])


async def test_one_write_per_step_and_none_for_a_silent_one() -> None:
    source = Scripted(b"data: 1\n\ndata: 2\n\n", b"", b"data: 3\n\n")
    sent = await exchange(source).run()
    assert sent.status == 200
    assert sent.bodies == [b"data: 1\n\ndata: 2\n\n", b"data: 3\n\n"]
    assert sent.complete
    assert source.closed == 1


async def test_the_head_says_what_proxies_must_know() -> None:
    sent = await exchange(Scripted(b"data: 1\n\n")).run()
    assert sent.headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        "x-unisono-backend": "vllm-1",
    }


async def test_a_failure_before_the_first_byte_is_a_real_error() -> None:
    sent = await exchange(Scripted(0.01, b"", BackendOverloaded("busy", retry_after_s=7))).run()
    assert sent.status == 503
    assert sent.headers["retry-after"] == "7"
    assert sent.json()["error"]["code"] == "backend_overloaded"
    assert sent.complete


async def test_a_failure_after_it_is_the_last_event_and_no_done() -> None:
    source = Scripted(b"data: 1\n\n", BackendUnavailable("it died"))
    sent = await exchange(source).run()
    assert sent.status == 200
    assert events_of(sent.body) == [
        1,
        {"error": {"message": "it died", "type": "server_error", "param": None, "code": "backend_unavailable"}},
    ]
    assert sent.complete
    assert source.closed == 1


async def test_a_fault_of_the_gateway_says_nothing_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    sent = await exchange(Scripted(b"data: 1\n\n", RuntimeError("the secret"))).run()
    assert b"secret" not in sent.body
    assert events_of(sent.body)[-1]["error"]["code"] == "internal_error"
    assert "the secret" in caplog.text


async def test_silence_is_filled_and_sends_the_head() -> None:
    sent = exchange(Scripted(0.3, b"data: 1\n\n"), keep_alive_s=0.02).start()
    await sent.wrote(2)
    assert sent.status == 200
    assert sent.bodies == [KEEP_ALIVE]
    await sent.ended()
    assert sent.bodies[-1] == b"data: 1\n\n"
    assert set(sent.bodies[:-1]) == {KEEP_ALIVE}
    assert 3 < len(sent.bodies) < 20


async def test_a_stream_that_talks_needs_no_keep_alive() -> None:
    steps = [step for n in range(20) for step in (0.01, b"data: %d\n\n" % n)]
    sent = await exchange(Scripted(*steps), keep_alive_s=0.1).run()
    assert KEEP_ALIVE not in sent.bodies


async def test_a_failure_after_a_keep_alive_is_an_event() -> None:
    sent = await exchange(Scripted(0.05, BackendUnavailable("gone")), keep_alive_s=0.02).run()
    assert sent.status == 200
    assert events_of(sent.body)[-1]["error"]["code"] == "backend_unavailable"


@pytest.mark.parametrize("steps", [(60.0,), (b"data: 1\n\n", 60.0), (b"", 60.0)], ids=["before", "amid", "silent"])
async def test_a_client_that_leaves_ends_the_source_at_once(steps: tuple[Step, ...]) -> None:
    source = Scripted(*steps)
    sent = exchange(source).start()
    await asyncio.sleep(0.02)
    sent.leave()
    await sent.ended(within_s=1.0)
    assert source.cancelled
    assert source.closed == 1
    assert not sent.complete


async def test_a_source_that_never_began_is_closed_too() -> None:
    source = Scripted(60.0)
    sent = exchange(source)
    sent.leave()
    await sent.start().ended(within_s=1.0)
    assert source.closed == 1


async def test_a_server_that_stops_ends_the_source() -> None:
    source = Scripted(b"data: 1\n\n", 60.0)
    sent = exchange(source).start()
    await sent.wrote(2)
    sent.stop()
    with pytest.raises(asyncio.CancelledError):
        await sent.ended()
    assert source.cancelled
    assert source.closed == 1


async def test_a_write_that_waits_for_the_client_is_no_silence_and_asks_nothing_of_the_source() -> None:
    source = Scripted(b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n")
    taken: list[bytes] = []
    taking, stuck = asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            taken.append(message["body"])
            stuck.set()
            await taking.wait()

    stream = asyncio.create_task(EventStream(source, keep_alive_s=0.02)({"type": "http"}, receive, send))
    await stuck.wait()
    await asyncio.sleep(0.1)
    assert taken == [b"data: 1\n\n"]
    taking.set()
    async with asyncio.timeout(2):
        await stream
    assert taken == [b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n", b""]


async def test_nothing_is_left_running() -> None:
    before = asyncio.all_tasks()
    await exchange(Scripted(b"data: 1\n\n")).run()
    sent = exchange(Scripted(60.0)).start()
    await asyncio.sleep(0)
    sent.leave()
    await sent.ended()
    assert asyncio.all_tasks() == before


async def test_work_nobody_waits_for_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def work() -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        await until_disconnect(receive, work())
    assert cancelled.is_set()


async def test_work_that_ends_first_gives_its_result_or_its_failure() -> None:
    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def good() -> int:
        return 5

    async def bad() -> int:
        raise BackendUnavailable("no")

    assert await until_disconnect(receive, good()) == 5
    with pytest.raises(BackendUnavailable):
        await until_disconnect(receive, bad())


async def test_characters_that_end_a_line_for_some_clients_are_escaped() -> None:
    text = "a\u0085b\u2028c\u2029d\u2027\u00e9"
    body = orjson.dumps({"text": text})
    sent = await exchange(Scripted(b"data: " + body + b"\n\n", BackendUnavailable(text))).run()
    lines = b"".join(sent.bodies).decode().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["data", "", "data", ""]
    assert orjson.loads(lines[0].removeprefix("data: ")) == {"text": text}
