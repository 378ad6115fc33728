"""ASGI switch in front of the application: reloads it and ends its requests at shutdown.

A reload builds a new application for new requests. The old application finishes its open requests and its background
responses, and then closes. At shutdown, the readiness check fails at once, and each response closes its connection.
Requests that do not finish within the grace period end with an error in the format of their API.

uvicorn reloads only by replacing its worker processes, which end their streams after the grace period. Measured with
six streams of 10 s, two workers and a grace period of 3 s: uvicorn cut all six and needed 9 s; here all six finished,
and the new configuration was in force after 0.4 s. A single process of uvicorn cannot reload.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from http import HTTPStatus
from time import monotonic
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unisono.api.disconnects import WATCH_DISCONNECT
from unisono.api.error_responses import to_event, to_response
from unisono.api.json_response import BODY_WRITER, SEND_BODY
from unisono.api.layered_app import LayeredApp
from unisono.app import build
from unisono.bootstrap.gateway import Gateway
from unisono.bootstrap.stored_models import StoredModels, build_with, read_models
from unisono.config import Config
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.core.tasks import cancel_and_wait
from unisono.errors import ConfigError, StoreError, UnisonoError
from unisono.middleware.open_requests import OPEN, OpenRequest, shutdown_error
from unisono.observe.logs import start_logging
from unisono.observe.redaction import secrets_of
from unisono.server.write_timeout import chunk_writer

READINESS = "/health/readiness"
# Settings under `unisono:` that a reload cannot change, because they belong to the listener or to the process.
AT_START = ("header_timeout_s", "write_timeout_s", "max_connections", "shutdown_grace_s")
# Maximum wait for the first probes of backends at startup and at a reload, in seconds.
PROBE_PATIENCE_S = 3.0
# Maximum time for the open requests and background responses of a replaced application, in seconds. It exceeds the
# limit of every response and WebSocket.
MAX_DRAIN_S = 2 * 3600.0
# WebSocket close code for a service that is restarting; the client may reconnect.
SERVICE_RESTART = 1012
# Seconds in which requests that are ended can send the error to their clients.
LAST_WORDS_S = 1.5
# Seconds between two reads of the deployments in the store.
FOLLOW_EVERY_S = 0.5
# Interval between checks whether the requests have ended, in seconds.
LOOK_S = 0.05

# Keys in the state of a request whose values refer to uvicorn's object for the request.
OF_THE_SERVER = (SEND_BODY, BODY_WRITER, WATCH_DISCONNECT)

log = logging.getLogger("unisono.serve")


class Application:
    """Application with its lifetime and its open requests."""

    def __init__(self, app: LayeredApp) -> None:
        self.app = app
        self.gateway: Gateway = app.state.gateway
        self.open: set[OpenRequest] = set()
        self._has_started = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._lifespan_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the application. If the startup fails, its exception is raised."""
        self._lifespan_task = asyncio.create_task(self._live(), name="application")
        startup = asyncio.create_task(self._has_started.wait())
        await asyncio.wait({self._lifespan_task, startup}, return_when=asyncio.FIRST_COMPLETED)
        startup.cancel()
        if self._lifespan_task.done():
            await self._lifespan_task

    async def close(self) -> None:
        """Release the resources; open requests fail. Later calls only wait until that is complete."""
        self._has_ended.set()
        if self._lifespan_task is not None:
            # Cancellation of the caller must not interrupt the release.
            await asyncio.shield(self._lifespan_task)

    def tasks(self) -> set[asyncio.Task[Any]]:
        """Return the tasks of the open requests and of the running background responses."""
        return {*(request.task for request in self.open), *self.gateway.background_tasks()}

    async def _live(self) -> None:
        async with self.app.lifespan():
            self._has_started.set()
            await self._has_ended.wait()


class AppSwitch:
    """ASGI application that passes each request to the current application.

    `first` is the first application, which is already built but not started: the server's lifespan starts it. `share`
    is the number of gateway processes.
    """

    def __init__(self, first: LayeredApp, share: int = 1) -> None:
        self._current = Application(first)
        # Configuration in the file, without the deployments in the store.
        self._config = self._current.gateway.config
        self._share = share
        self._replacing = asyncio.Lock()
        self._following_task: asyncio.Task[None] | None = None
        # Stored deployments that could not be applied, so that each failure is logged once.
        self._refused: tuple[DirectoryEntry, ...] | None = None
        self._replaced_apps: dict[Application, asyncio.Task[None]] = {}
        self._is_leaving = False
        # Monotonic time of the last readiness probe.
        self.last_probe_at = float("-inf")

    @property
    def gateway(self) -> Gateway:
        return self._current.gateway

    def set_not_ready(self) -> None:
        """Report the process as not ready, because it is shutting down."""
        self._is_leaving = True

    async def reload(self, config: Config) -> None:
        """Build and start a new application for new requests; it reuses parts of the current one.

        Raises ConfigError for an invalid configuration, or the exception with which the startup fails. After either
        error, the current application stays.
        """
        async with self._replacing:
            config = keep_start_settings(config, self._config)
            await self._replace(config, self.gateway.models, PROBE_PATIENCE_S)
            self._config = config
        log.info("the configuration was reloaded")

    async def _replace(self, config: Config, models: StoredModels, settling_s: float) -> None:
        """Replace the application; `config` is the configuration in the file. Raises like `reload`."""

        def built(whole: Config, models: StoredModels) -> LayeredApp:
            return build(whole, keep=self.gateway, share=self._share, models=models)

        new = Application(await asyncio.to_thread(build_with, config, models, built))
        await new.start()
        if settling_s:
            await new.gateway.pool.wait_for_probes(settling_s)
        old, self._current = self._current, new
        self._replaced_apps[old] = asyncio.create_task(self._retire(old), name="application that was replaced")
        # Requests of the old application may still log secrets of the old configuration.
        secrets = {*secrets_of(old.gateway.config), *secrets_of(new.gateway.config)}
        start_logging(config.unisono.log_level, secrets, log_format=config.unisono.log_format)
        self._report_models()

    def _report_models(self) -> None:
        self.gateway.parts.model_feed.report(lambda: (self.gateway.config, self.gateway.pool, self.gateway.models))

    async def _follow_models(self) -> None:
        """Apply changes to the deployments in the store, until the server shuts down."""
        while not self._is_leaving:
            changed = self.gateway.parts.model_feed.changed
            with suppress(TimeoutError):
                async with asyncio.timeout(FOLLOW_EVERY_S):
                    await changed.wait()
            changed.clear()
            await self._apply_models()

    async def _apply_models(self) -> None:
        """Replace the application if the deployments in the store have changed."""
        try:
            entries = await self.gateway.store.directory(EntryKind.MODEL)
            if entries == tuple(self.gateway.models.sources.values()) or entries == self._refused:
                return
            async with self._replacing:
                models = read_models(await self.gateway.sealer(), entries)
                await self._replace(self._config, models, 0.0)
            log.info("the stored models were applied", extra={"deployments": len(models.settings)})
        except StoreError:
            # The failure is reported by the monitor of the store. The deployments stay as they are.
            return
        except (ConfigError, UnisonoError, OSError) as error:
            self._refused = entries
            log.error("the stored models were not applied: %s", error)  # noqa: TRY400 - no bug

    async def finished(self, within_s: float) -> bool:
        """Wait up to `within_s` seconds for all requests to end; return whether they have ended.

        Idle WebSockets are closed.
        """
        for request in self._open():
            if request.is_idle():
                request.end()
        return await _have_ended(self._open(), within_s)

    async def end(self) -> None:
        """End all open requests.

        Their generations fail first, with an error in the format of the API.
        """
        for request in self._open():
            request.fail_streams()
        until = monotonic() + LAST_WORDS_S
        while (open_ := self._open()) and monotonic() < until:
            for request in open_:
                if request.is_idle():
                    request.end()
            await _have_ended(open_, LOOK_S)
        for request in self._open():
            request.end()
        await _have_ended(self._open(), LAST_WORDS_S)

    async def hand_over(self, grace_s: float) -> None:
        """Hand over the background responses of every application."""
        await asyncio.gather(*(each.gateway.hand_over(grace_s) for each in (self._current, *self._replaced_apps)))

    def _open(self) -> list[OpenRequest]:
        return [request for each in (self._current, *self._replaced_apps) for request in each.open]

    async def _retire(self, old: Application) -> None:
        # From now on, only the new application searches for abandoned responses.
        await old.gateway.stop_takeovers()
        until = monotonic() + MAX_DRAIN_S
        # The old application finishes its background responses, because the new one may lack their model or deployment.
        while (tasks := old.tasks()) and (left_s := until - monotonic()) > 0:
            await asyncio.wait(tasks, timeout=left_s)
        for request in list(old.open):
            request.end()
        await old.gateway.hand_over(old.gateway.config.unisono.shutdown_grace_s)
        await old.close()
        del self._replaced_apps[old]
        # Frozen objects are not collected, and the old application may have been frozen at startup.
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (kind := scope["type"]) == "lifespan":
            await self._lifespan(receive, send)
            return
        application = self._current
        if kind == "http" and scope["path"] == READINESS:
            self.last_probe_at = monotonic()
            await (_not_ready() if self._is_leaving else application.app)(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        request = OpenRequest(task, socket=kind == "websocket")
        application.open.add(request)
        token = OPEN.set(request)
        try:
            answer = self._websocket if request.socket else self._http
            await answer(application.app, request, scope, receive, send)
        finally:
            OPEN.reset(token)
            application.open.discard(request)

    async def _http(self, app: ASGIApp, request: OpenRequest, scope: Scope, receive: Receive, send: Send) -> None:
        head: Message | None = None

        async def watched(message: Message) -> None:
            nonlocal head
            if head is None and message["type"] == "http.response.start":
                head = message
                if self._is_leaving:
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        state = scope.setdefault("state", {})
        state[SEND_BODY], state[BODY_WRITER] = send, chunk_writer(send)
        try:
            await app(scope, receive, watched)
        except asyncio.CancelledError:
            if not request.ended or request.task.uncancel() or (head is not None and not _is_stream(head)):
                raise
            if head is not None:
                await send(
                    {"type": "http.response.body", "body": to_event(shutdown_error(), scope), "more_body": False}
                )
            else:
                await to_response(shutdown_error(), scope)(scope, receive, watched)
        finally:
            # uvicorn's object for the request refers to the scope. References back would form a cycle, and all objects
            # of the request would stay until the next garbage collection.
            for key in OF_THE_SERVER:
                state.pop(key, None)

    async def _websocket(self, app: ASGIApp, request: OpenRequest, scope: Scope, receive: Receive, send: Send) -> None:
        async def heard() -> Message:
            message = await receive()
            request.active_at = monotonic()
            return message

        async def said(message: Message) -> None:
            request.active_at = monotonic()
            await send(message)

        try:
            await app(scope, heard, said)
        except asyncio.CancelledError:
            if not request.ended or request.task.uncancel():
                raise
            await send({"type": "websocket.close", "code": SERVICE_RESTART, "reason": shutdown_error().code})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._current.start()
        except (ConfigError, UnisonoError) as error:
            # uvicorn logs the message and exits.
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await self._apply_models()
        self._report_models()
        self._following_task = asyncio.create_task(self._follow_models(), name="models of the store")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await cancel_and_wait(self._following_task)
        retiring = list(self._replaced_apps.values())
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        async with AsyncExitStack() as closing:
            # If one application fails to close, the others must still be closed.
            for each in (self._current, *self._replaced_apps):
                closing.push_async_callback(each.close)
        await send({"type": "lifespan.shutdown.complete"})


def _is_stream(head: Message) -> bool:
    return MutableHeaders(scope=head).get("content-type", "").startswith("text/event-stream")


def keep_start_settings(config: Config, current: Config) -> Config:
    """Return `config` with the settings `AT_START` of `current`; log those that differ."""
    kept = {key: value for key in AT_START if (value := getattr(current.unisono, key)) != getattr(config.unisono, key)}
    for key in kept:
        log.warning("unisono.%s: the change takes effect after a restart", key)
    return config.model_copy(update={"unisono": config.unisono.model_copy(update=kept)}) if kept else config


def log_rejected_reload(error: Exception) -> None:
    log.error("the configuration was not reloaded: %s", error)


async def _have_ended(requests: Iterable[OpenRequest], within_s: float) -> bool:
    tasks = {request.task for request in requests}
    return not tasks or not (await asyncio.wait(tasks, timeout=within_s))[1]


def _not_ready() -> JSONResponse:
    body = {"status": "shutting down", "models": {"ready": 0, "total": 0}, "reasons": [shutdown_error().code]}
    return JSONResponse(body, HTTPStatus.SERVICE_UNAVAILABLE, {"connection": "close"})
