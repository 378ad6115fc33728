"""In-process ASGI client: one request, its disconnect, and the response.

exchange = Exchange(app, "POST", "/v1/chat/completions", json={...})
await exchange.run()                   # or: exchange.start(), exchange.leave(), await exchange.ended()
exchange.status, exchange.headers, exchange.json(), exchange.events()
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message

from unisono.api.route_table import provide
from unisono.core.access import Caller


class Exchange:
    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        *,
        json: object = None,
        body: bytes | Sequence[bytes] | None = None,
        headers: Iterable[tuple[str, str]] = (),
        state: dict[str, Any] | None = None,
        endless: bool = False,
    ) -> None:
        """Prepare a request; `path` may have a query.

        A sequence of pieces as `body` arrives in one message per piece; an empty sequence stands for a body
        that was read already. With `endless`, the last message announces more body data.
        """
        self._app = app
        pieces = [orjson.dumps(json)] if json is not None else [body or b""] if isinstance(body, bytes | None) else body
        self._incoming = [
            {"type": "http.request", "body": piece, "more_body": endless or index + 1 < len(pieces)}
            for index, piece in enumerate(pieces)
        ]
        sent = [("host", "localhost:4000")] if not any(name == "host" for name, _ in headers) else []
        if json is not None:
            sent += [("content-type", "application/json"), ("content-length", str(len(pieces[0])))]
        path, _, query = path.partition("?")
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "server": ("127.0.0.1", 4000),
            "client": ("127.0.0.1", 5),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in [*sent, *headers]],
            "state": dict(state or {}),
        }
        self.sent: list[Message] = []
        self._disconnected = asyncio.Event()
        self._sent_more = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def _receive(self) -> Message:
        if self._incoming:
            return self._incoming.pop(0)
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        async with self._sent_more:
            self.sent.append(message)
            self._sent_more.notify_all()

    async def run(self) -> Exchange:
        await self._app(self.scope, self._receive, self._send)
        return self

    def start(self) -> Exchange:
        self._task = asyncio.create_task(self._app(self.scope, self._receive, self._send))
        return self

    def leave(self) -> None:
        self._disconnected.set()

    def stop(self) -> None:
        """Cancel the request, as a server does at shutdown."""
        assert self._task is not None
        self._task.cancel()

    async def ended(self, within_s: float = 5.0) -> Exchange:
        assert self._task is not None
        async with asyncio.timeout(within_s):
            await self._task
        return self

    async def wrote(self, count: int, within_s: float = 5.0) -> None:
        """Wait until `count` messages were sent."""
        async with asyncio.timeout(within_s), self._sent_more:
            await self._sent_more.wait_for(lambda: len(self.sent) >= count)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def bodies(self) -> list[bytes]:
        return [bytes(message["body"]) for message in self.sent[1:] if message.get("body")]

    @property
    def body(self) -> bytes:
        return b"".join(self.bodies)

    @property
    def complete(self) -> bool:
        last = self.sent[-1] if self.sent else {}
        return last.get("type") == "http.response.body" and not last.get("more_body", False)

    def json(self) -> Any:
        return orjson.loads(self.body)

    def events(self) -> list[Any]:
        return events_of(self.body)


def events_of(stream: bytes) -> list[Any]:
    """Return the JSON of all events, with `[DONE]` as a string and without comments."""
    events: list[Any] = []
    for block in stream.split(b"\n\n")[:-1]:
        if block.startswith(b":"):
            continue
        assert block.startswith(b"data: "), block
        data = block.removeprefix(b"data: ")
        events.append("[DONE]" if data == b"[DONE]" else orjson.loads(data))
    assert stream.endswith(b"\n\n") or not stream
    return events


def mount(app: FastAPI, routes: Iterable[BaseRoute], *dependencies: object) -> None:
    """Add routes to an application, and the objects that their endpoints need."""
    app.router.routes.extend(routes)
    provide(app.state, *dependencies)


async def by_name(key: str | None) -> Caller:
    """Return a caller whose tenant is the key."""
    return Caller(key or "")
