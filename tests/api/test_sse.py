"""Event streams to clients that read, stall or disconnect."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import orjson
import pytest
from starlette.requests import Request
from starlette.types import Message, Receive

from tests.api.asgi import Exchange, events_of
from unisono.api.disconnects import WATCH_DISCONNECT, until_disconnect
from unisono.api.error_responses import ClientGone
from unisono.api.json_response import BODY_WRITER
from unisono.api.sse import COMMENTS, DONE, KEEP_ALIVE, EventSource, EventStream, EventWriter, KeepAlives
from unisono.errors import BackendOverloaded, BackendUnavailable

Step = bytes | float | Exception | asyncio.Event


class ScriptedSource:
    """Source that plays bytes, pauses (in seconds, or until an event) and exceptions."""

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
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    await asyncio.sleep(step)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def aclose(self) -> None:
        self.closed += 1


def exchange(source: ScriptedSource, *, keep_alive_s: float = 10.0) -> Exchange:
    stream = EventStream(
        EventSource(source, bytes), headers=lambda: {"x-unisono-backend": "vllm-1"}, keep_alive_s=keep_alive_s
    )
    return Exchange(stream, "POST", "/", body=[])


async def test_each_nonempty_step_is_one_write() -> None:
    source = ScriptedSource(b"data: 1\n\ndata: 2\n\n", b"", b"data: 3\n\n")
    response = await exchange(source).run()
    assert response.status == 200
    assert response.bodies == [b"data: 1\n\ndata: 2\n\n", b"data: 3\n\n"]
    assert response.complete
    assert source.closed == 1


async def test_done_ends_the_response_in_the_same_write() -> None:
    source = ScriptedSource(b"data: 1\n\n", b"data: 2\n\n" + DONE)
    response = await exchange(source).run()
    assert [(message["body"], message["more_body"]) for message in response.sent[1:]] == [
        (b"data: 1\n\n", True),
        (b"data: 2\n\n" + DONE, False),
    ]
    assert source.closed == 1


async def test_comments_follow_done() -> None:
    async def comments() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.01)
        yield b": tokens\n\n"

    response = exchange(ScriptedSource(DONE))
    response.scope["state"][COMMENTS] = comments
    await response.run()
    assert response.bodies == [DONE, b": tokens\n\n"]
    assert response.complete


async def test_an_error_after_done_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    response = await exchange(ScriptedSource(DONE, ValueError("after the end"))).run()
    assert response.bodies == [DONE]
    assert "after the end" in caplog.text


async def test_the_headers_disable_caching_and_proxy_buffering() -> None:
    response = await exchange(ScriptedSource(b"data: 1\n\n")).run()
    assert response.headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        "x-unisono-backend": "vllm-1",
    }


async def test_a_failure_before_the_first_byte_is_an_http_error() -> None:
    response = await exchange(ScriptedSource(0.01, b"", BackendOverloaded("busy", retry_after_s=7))).run()
    assert response.status == 503
    assert response.headers["retry-after"] == "7"
    assert response.json()["error"]["code"] == "backend_overloaded"
    assert response.complete


async def test_a_failure_after_the_first_byte_is_the_last_event() -> None:
    source = ScriptedSource(b"data: 1\n\n", BackendUnavailable("it died"))
    response = await exchange(source).run()
    assert response.status == 200
    assert events_of(response.body) == [
        1,
        {"error": {"message": "it died", "type": "server_error", "param": None, "code": "backend_unavailable"}},
    ]
    assert response.complete
    assert source.closed == 1


async def test_an_internal_error_is_logged_and_not_exposed(caplog: pytest.LogCaptureFixture) -> None:
    response = await exchange(ScriptedSource(b"data: 1\n\n", RuntimeError("the secret"))).run()
    assert b"secret" not in response.body
    assert events_of(response.body)[-1]["error"]["code"] == "internal_error"
    assert "the secret" in caplog.text


async def test_keep_alives_are_sent_during_a_pause() -> None:
    end_of_pause = asyncio.Event()
    response = exchange(ScriptedSource(end_of_pause, b"data: 1\n\n"), keep_alive_s=0.02).start()
    await response.wrote(5)
    assert response.status == 200
    end_of_pause.set()
    await response.ended()
    *keep_alives, last = response.bodies
    assert last == b"data: 1\n\n"
    assert len(keep_alives) >= 4
    assert set(keep_alives) == {KEEP_ALIVE}


async def test_an_active_stream_has_no_keep_alives() -> None:
    steps = [step for n in range(20) for step in (0.01, b"data: %d\n\n" % n)]
    response = await exchange(ScriptedSource(*steps), keep_alive_s=0.1).run()
    assert KEEP_ALIVE not in response.bodies


async def test_a_failure_after_a_keep_alive_is_an_event() -> None:
    response = await exchange(ScriptedSource(0.05, BackendUnavailable("gone")), keep_alive_s=0.02).run()
    assert response.status == 200
    assert events_of(response.body)[-1]["error"]["code"] == "backend_unavailable"


@pytest.mark.parametrize(
    "steps",
    [(60.0,), (b"data: 1\n\n", 60.0), (b"", 60.0)],
    ids=["before the first step", "during the stream", "after an empty step"],
)
async def test_a_client_disconnect_cancels_the_source_at_once(steps: tuple[Step, ...]) -> None:
    source = ScriptedSource(*steps)
    response = exchange(source).start()
    await asyncio.sleep(0.02)
    response.leave()
    await response.ended(within_s=1.0)
    assert source.cancelled
    assert source.closed == 1
    assert not response.complete


async def test_the_source_is_closed_if_the_client_left_before_the_start() -> None:
    source = ScriptedSource(60.0)
    response = exchange(source)
    response.leave()
    await response.start().ended(within_s=1.0)
    assert source.closed == 1


async def test_cancelling_the_response_cancels_the_source() -> None:
    source = ScriptedSource(b"data: 1\n\n", 60.0)
    response = exchange(source).start()
    await response.wrote(2)
    response.stop()
    with pytest.raises(asyncio.CancelledError):
        await response.ended()
    assert source.cancelled
    assert source.closed == 1


async def test_a_blocked_write_is_followed_by_neither_writes_nor_keep_alives() -> None:
    source = ScriptedSource(b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n")
    writes: list[bytes] = []
    resumed, blocked = asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            writes.append(message["body"])
            blocked.set()
            await resumed.wait()

    stream = asyncio.create_task(
        EventStream(EventSource(source, bytes), keep_alive_s=0.02)({"type": "http"}, receive, send)
    )
    await blocked.wait()
    await asyncio.sleep(0.1)
    assert writes == [b"data: 1\n\n"]
    resumed.set()
    async with asyncio.timeout(2):
        await stream
    assert writes == [b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n", b""]


class ScriptedBody:
    """Writer of the server; it is not ready if `is_paused`."""

    def __init__(self) -> None:
        self.is_paused = False
        self.written: list[bytes] = []

    def join_head(self) -> None:
        self.written.append(b"head")

    def is_ready(self) -> bool:
        return not self.is_paused

    def write(self, body: bytes) -> None:
        self.written.append(body)


async def test_a_sink_writes_at_once_or_has_no_effect() -> None:
    resumed = asyncio.Event()
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        if message.get("body") == b"slow":
            await resumed.wait()

    def to_bytes(batch: str) -> bytes:
        encoded.append(batch)
        return batch.encode()

    encoded: list[str] = []
    body = ScriptedBody()
    writer = EventWriter(send, send, lambda: {"type": "http.response.start", "status": 200, "headers": []}, body)
    take = writer.sink_for(to_bytes)
    assert take is not None
    assert not take("before the head")
    await writer.write(b"first")
    assert take("one")
    assert take("")
    assert take("two\u2028")
    body.is_paused = True
    assert not take("while the server is paused")
    body.is_paused = False
    writing = asyncio.create_task(writer.write(b"slow"))
    await asyncio.sleep(0)
    assert not take("during another write")
    resumed.set()
    await writing
    assert take("three")
    assert encoded == ["one", "", "two\u2028", "three"]
    assert body.written == [b"head", b"one", b"two\\u2028", b"three"]


class LostBody(ScriptedBody):
    """Writer of a server that reports a client that is gone, as ASGI allows."""

    def write(self, body: bytes) -> None:
        raise OSError("the client is gone")


@pytest.mark.parametrize("direct", [False, True], ids=["through ASGI", "to the writer of the server"])
async def test_a_client_that_is_gone_at_a_write_counts_as_a_disconnect(
    direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[type[BaseException] | None] = []
    sinks: list[Callable[[bytes], bool]] = []

    async def generation() -> AsyncIterator[bytes]:
        try:
            for batch in (b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"):
                # Like the engine, yield a batch that the sink does not accept.
                if not (sinks and sinks[0](batch)):
                    yield batch
            ends.append(None)
        except BaseException as error:
            ends.append(type(error))
            raise

    def connect(writer: EventWriter) -> None:
        if (sink := writer.sink_for(bytes)) is not None:
            sinks.append(sink)

    async def send(message: Message) -> None:
        if message.get("body") == b"data: 2\n\n":
            raise OSError("the client is gone")

    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    scope = {"type": "http", "state": {BODY_WRITER: LostBody()} if direct else {}}
    # Typed as a generator, which has `aclose`.
    await EventStream(EventSource(cast("Any", generation()), bytes, connect=connect))(scope, receive, send)
    assert ends == [GeneratorExit]
    assert caplog.text == ""


async def test_there_is_no_sink_without_a_writer_of_the_server() -> None:
    async def send(message: Message) -> None: ...

    assert EventWriter(send, send, lambda: {"type": "http.response.start"}).sink_for(bytes) is None


async def test_no_task_is_left_running() -> None:
    before = asyncio.all_tasks()
    await exchange(ScriptedSource(b"data: 1\n\n")).run()
    response = exchange(ScriptedSource(60.0)).start()
    await asyncio.sleep(0)
    response.leave()
    await response.ended()
    assert asyncio.all_tasks() == before


def request_with(receive: Receive) -> Request:
    """Return a request whose client disconnects when `receive` reports it."""
    return Request({"type": "http", "state": {}}, receive)


async def test_work_is_cancelled_when_the_client_disconnects() -> None:
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
        await until_disconnect(request_with(receive), work())
    assert cancelled.is_set()


async def test_work_that_finishes_before_a_disconnect_returns_or_raises() -> None:
    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def good() -> int:
        return 5

    async def bad() -> int:
        raise BackendUnavailable("no")

    assert await until_disconnect(request_with(receive), good()) == 5
    with pytest.raises(BackendUnavailable):
        await until_disconnect(request_with(receive), bad())


async def test_a_server_can_report_the_disconnect_without_a_reader() -> None:
    watching: list[Callable[[], None]] = []

    def watch(notify: Callable[[], None]) -> Callable[[], None]:
        watching.append(notify)
        return lambda: watching.remove(notify)

    # Reading from this request would fail.
    request = Request({"type": "http", "state": {WATCH_DISCONNECT: watch}})
    assert await until_disconnect(request, asyncio.sleep(0, 5)) == 5
    assert not watching
    before = asyncio.all_tasks()
    waiting = asyncio.create_task(until_disconnect(request, asyncio.sleep(60)))
    await asyncio.sleep(0)
    watching[0]()
    with pytest.raises(ClientGone):
        await waiting
    assert not watching
    assert asyncio.all_tasks() == before


async def test_unicode_line_separators_are_escaped() -> None:
    text = "a\u0085b\u2028c\u2029d\u2027\u00e9"
    body = orjson.dumps({"text": text})
    response = await exchange(ScriptedSource(b"data: " + body + b"\n\n", BackendUnavailable(text))).run()
    lines = b"".join(response.bodies).decode().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["data", "", "data", ""]
    assert orjson.loads(lines[0].removeprefix("data: ")) == {"text": text}


async def test_a_write_that_was_cancelled_while_it_waited_does_not_block_others() -> None:
    gate, sent = asyncio.Event(), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and message["body"] == b"first":
            await gate.wait()
            # Runs after the end of this write has woken the waiting ones, and before they continue.
            asyncio.get_running_loop().call_soon(second.cancel)

    writer = EventWriter(send, send, lambda: {"type": "http.response.start", "status": 200, "headers": []})
    first = asyncio.create_task(writer.write(b"first"))
    await asyncio.sleep(0)
    second, third = (asyncio.create_task(writer.write(data)) for data in (b"second", b"third"))
    await asyncio.sleep(0)
    gate.set()
    await first
    await asyncio.wait_for(third, 1)
    assert second.cancelled()
    assert [message["body"] for message in sent if "body" in message] == [b"first", b"third"]
    assert not writer.is_writing


async def test_keep_alives_survive_a_failed_write_and_end_with_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        if "body" in message:
            sent.append(message["body"])
            raise OSError("the client is gone")

    writer = EventWriter(send, send, lambda: {"type": "http.response.start", "status": 200, "headers": []})
    keep_alives = KeepAlives(writer, lambda: KEEP_ALIVE, 0.02)
    keep_alives.probe()
    # Without a head, only silence starts the response.
    assert sent == []
    await asyncio.sleep(0.1)
    keep_alives.probe()
    await keep_alives.stop()
    count = len(sent)
    assert count >= 2
    await asyncio.sleep(0.05)
    assert len(sent) == count
    gc.collect()
    assert "never retrieved" not in caplog.text
