"""Records of requests whose clients disconnect."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.e2e.gateway import config_of, gateway
from unisono.api.disconnects import disconnected
from unisono.api.error_responses import ErrorResponses
from unisono.api.request_ids import RequestIds
from unisono.core.request_record import RequestRecord
from unisono.errors import InvalidRequest

HEAD: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
BODY: Message = {"type": "http.response.body", "body": b""}


async def respond(scope: Scope, receive: Receive, send: Send) -> None:
    await send(dict(HEAD))
    await send(dict(BODY))


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    raise InvalidRequest("Missing required field 'model'.")


@pytest.mark.parametrize("endpoint", [respond, refuse])
async def test_a_head_that_cannot_be_written_is_recorded_as_a_client_that_left(endpoint: ASGIApp) -> None:
    records: list[RequestRecord] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise OSError("the client is gone")

    layers = RequestIds(ErrorResponses(endpoint), new_id=lambda: "1", sinks=[records.append])
    scope: Scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [], "state": {}}
    await asyncio.gather(layers(scope, receive, send), return_exceptions=True)
    assert [record.status for record in records] == [499]


@pytest.mark.parametrize(("leaves", "status"), [(False, 200), (True, 499)], ids=["stays", "leaves"])
async def test_the_server_reports_whether_the_head_was_written(leaves: bool, status: int) -> None:
    records: asyncio.Queue[RequestRecord] = asyncio.Queue()

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        if leaves:
            await disconnected(receive)
        await respond(scope, receive, send)

    layers = RequestIds(endpoint, new_id=lambda: "1", sinks=[records.put_nowait])

    def before(app: ASGIApp) -> ASGIApp:
        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            await (layers if scope["type"] == "http" else app)(scope, receive, send)

        return run

    async with gateway(config_of("vllm@http://127.0.0.1:9"), wrap=before) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(running.url).port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await writer.drain()
        if not leaves:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        async with asyncio.timeout(10):
            record = await records.get()
    assert record.status == status
