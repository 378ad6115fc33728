"""The switch in front of the application: which one answers, and how requests end when one goes.

A configuration that is read again becomes an application of its own. What comes from then on is its to answer; what has
begun ends where it began, and the old application closes behind its last request. When the process ends, readiness says
so at once, answers close their connections, and what cannot finish in time is told so in the shape of its surface.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from time import monotonic

import orjson
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from unisono.api.error_responses import to_event, to_response
from unisono.app import Gateway
from unisono.middleware.drain import OPEN, OpenRequest, leaving

READINESS = "/health/readiness"
LONGEST_S = 2 * 3600.0
"""How long an application that was replaced goes on with what it has begun, in seconds: longer than any answer and any
WebSocket may take."""
SERVICE_RESTART = 1012
LAST_WORDS_S = 1.5
"""How long requests have to say why they end."""
LOOK_S = 0.05

log = logging.getLogger("unisono.serve")


class Application:
    """One application from its start to its end, with the requests it answers."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.gateway: Gateway = app.state.gateway
        self.open: set[OpenRequest] = set()
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises what its start raises."""
        self._life = asyncio.create_task(self._live(), name="application")
        begun = asyncio.create_task(self._begun.wait())
        await asyncio.wait({self._life, begun}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if self._life.done():
            await self._life

    async def close(self) -> None:
        """Free what it holds; whatever it still answers breaks. Called again, wait for the same end."""
        self._over.set()
        if self._life is not None:
            # What is freed is freed whole, also where its caller gives up.
            await asyncio.shield(self._life)

    async def _live(self) -> None:
        async with self.app.router.lifespan_context(self.app):
            self._begun.set()
            await self._over.wait()


class AppSwitch:
    """An ASGI application. `first` is built and not started; it starts and ends with the server."""

    def __init__(self, first: FastAPI) -> None:
        self._current = Application(first)
        self._replaced: dict[Application, asyncio.Task[None]] = {}
        self._leaving = False
        self.asked_at = float("-inf")
        """When somebody last asked for readiness, by the monotonic clock."""

    @property
    def gateway(self) -> Gateway:
        return self._current.gateway

    def leave(self) -> None:
        """The process is going to end: say so to whoever asks whether it is ready."""
        self._leaving = True

    async def replace(self, build: Callable[[Gateway], FastAPI], patience_s: float) -> None:
        """Let another application answer what comes from now on, once its backends were looked at, but no later than
        `patience_s` seconds. `build` gets the gateway whose parts it may keep and runs in a thread. Raises what it
        raises, and then nothing has changed."""
        new = Application(await asyncio.to_thread(build, self.gateway))
        await new.start()
        await new.gateway.pool.settled(patience_s)
        old, self._current = self._current, new
        self._replaced[old] = asyncio.create_task(self._retire(old), name="application that was replaced")

    async def finished(self, within_s: float) -> bool:
        """Whether nothing is being answered any more, after `within_s` seconds at the latest. WebSockets on which
        nothing is are closed meanwhile."""
        for request in self._open():
            if request.quiet():
                request.end()
        return await _over(self._open(), within_s)

    async def end(self) -> None:
        """End every request that is left: what is generated for it fails first, in the shape of its surface."""
        for request in self._open():
            request.fail_runs()
        until = monotonic() + LAST_WORDS_S
        while (open_ := self._open()) and monotonic() < until:
            for request in open_:
                if request.quiet():
                    request.end()
            await _over(open_, LOOK_S)
        for request in self._open():
            request.end()
        await _over(self._open(), LAST_WORDS_S)

    async def hand_over(self, grace_s: float) -> None:
        """Hand over the background responses of every application."""
        await asyncio.gather(*(each.gateway.hand_over(grace_s) for each in (self._current, *self._replaced)))

    def _open(self) -> list[OpenRequest]:
        return [request for each in (self._current, *self._replaced) for request in each.open]

    async def _retire(self, old: Application) -> None:
        await old.gateway.hand_over(old.gateway.config.unisono.shutdown_grace_s)
        until = monotonic() + LONGEST_S
        while old.open and (left_s := until - monotonic()) > 0:
            await _over(old.open, left_s)
        for request in list(old.open):
            request.end()
        await old.close()
        del self._replaced[old]
        # The collector looks only at what came after the start, of which the old application may have been a part.
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http" if scope["path"] == READINESS:
                self.asked_at = monotonic()
                await (_not_ready(send) if self._leaving else self._current.app(scope, receive, send))
            case "http":
                await self._http(self._current, scope, receive, send)
            case "websocket":
                await self._websocket(self._current, scope, receive, send)
            case _:
                await self._lifespan(receive, send)

    async def _http(self, application: Application, scope: Scope, receive: Receive, send: Send) -> None:
        begun, stream = False, False

        async def watched(message: Message) -> None:
            nonlocal begun, stream
            if not begun and message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                stream = headers.get("content-type", "").startswith("text/event-stream")
                if self._leaving:
                    headers["connection"] = "close"
            await send(message)

        with _Opened(application) as request:
            try:
                await application.app(scope, receive, watched)
            except asyncio.CancelledError:
                if not request.ended or request.task.uncancel() or (begun and not stream):
                    raise
                if begun:
                    await send({"type": "http.response.body", "body": to_event(leaving(), scope), "more_body": False})
                else:
                    await to_response(leaving(), scope)(scope, receive, watched)

    async def _websocket(self, application: Application, scope: Scope, receive: Receive, send: Send) -> None:
        with _Opened(application, socket=True) as request:

            async def heard() -> Message:
                message = await receive()
                request.active_at = monotonic()
                return message

            async def said(message: Message) -> None:
                request.active_at = monotonic()
                await send(message)

            try:
                await application.app(scope, heard, said)
            except asyncio.CancelledError:
                if not request.ended or request.task.uncancel():
                    raise
                await send({"type": "websocket.close", "code": SERVICE_RESTART, "reason": leaving().code})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self._current.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        retiring = list(self._replaced.values())
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        async with AsyncExitStack() as closing:
            # One that cannot close keeps no other from it.
            for each in (self._current, *self._replaced):
                closing.push_async_callback(each.close)
        await send({"type": "lifespan.shutdown.complete"})


class _Opened:
    """A request is among those of its application, and is what anything it starts runs for."""

    def __init__(self, application: Application, *, socket: bool = False) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._application = application
        self._request = OpenRequest(task, socket)

    def __enter__(self) -> OpenRequest:
        self._application.open.add(self._request)
        self._token = OPEN.set(self._request)
        return self._request

    def __exit__(self, *error: object) -> None:
        OPEN.reset(self._token)
        self._application.open.discard(self._request)


async def _over(requests: Iterable[OpenRequest], within_s: float) -> bool:
    tasks = {request.task for request in requests}
    return not tasks or not (await asyncio.wait(tasks, timeout=within_s))[1]


async def _not_ready(send: Send) -> None:
    body = {"status": "shutting down", "models": {"ready": 0, "total": 0}, "reasons": [leaving().code]}
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(body)})
