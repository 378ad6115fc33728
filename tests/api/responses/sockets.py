"""In-process client of the Responses WebSocket, and a gateway with a scripted generation service.

async with scripted_gateway(script, script) as gateway:
    ann = await gateway.connect()
    ann.send(input="Hi")
    events = await ann.response_events()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.routing import WebSocketRoute
from starlette.types import Message
from starlette.websockets import WebSocket

from tests.api.asgi import Exchange, by_name, mount
from tests.api.responses.all_routes import RESPONSES_ROUTES
from tests.api.responses.folding import TERMINAL
from tests.api.scripted import ScriptedTurns, Step, final, finished
from unisono.api.asgi_layers import asgi_layers
from unisono.api.fastapi_app import register
from unisono.api.responses.background.runner import BackgroundRunner
from unisono.api.responses.deps import ResponsesDeps, ResponsesModel
from unisono.api.responses.outbound.dialects import OPENAI
from unisono.api.responses.routes.responses_api import ResponsesApi
from unisono.api.responses.websocket.connection import Connection
from unisono.api.sealing import Sealer
from unisono.core.access import Caller
from unisono.core.state_store import Store
from unisono.engine.request import GenerationRequest
from unisono.errors import UnknownModel
from unisono.store import open_store

HOSTNAME = (b"host", b"localhost")
# WebSocket path with the connection lifetime given to `scripted_gateway`.
SHORT_LIVED_PATH = "/short"

HELLO: list[Step] = [[*final(0, "Hel", "lo"), finished()]]


class CountingTurns(ScriptedTurns):
    """Scripted service that counts characters as tokens."""

    async def count(self, turn: GenerationRequest) -> int:
        return sum(len(str(item)) for item in turn.conversation.items)


@dataclass
class ScriptedGateway:
    app: FastAPI
    store: Store
    service: CountingTurns

    async def connect(self, path: str = "/v1/responses", *, key: str = "ann") -> Client:
        return await Client(self.app, path, key).open()

    async def post(self, path: str, json: Any = None, *, key: str = "ann", method: str = "POST") -> Exchange:
        return await Exchange(self.app, method, path, json=json, headers=[("authorization", f"Bearer {key}")]).run()


@asynccontextmanager
async def scripted_gateway(*scripts: Sequence[Step], lifetime_s: float = 3600.0) -> AsyncIterator[ScriptedGateway]:
    """Serve the Responses API; generation request k gets script k.

    `lifetime_s` applies to connections at `SHORT_LIVED_PATH`.
    """
    service = CountingTurns(*(scripts or (HELLO,)))
    store = open_store("memory://")
    await store.start()
    deps = deps_of(service, store)
    app = FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        middleware=asgi_layers(authenticate=by_name, keyless=False, new_id=lambda: "0"),
    )
    register(app)
    api = ResponsesApi(deps, BackgroundRunner(deps, process="here"))
    mount(app, RESPONSES_ROUTES, api)

    async def short(socket: WebSocket) -> None:
        await Connection(deps, OPENAI, socket, lasts_s=lifetime_s).run()

    app.router.routes.append(WebSocketRoute(SHORT_LIVED_PATH, short))
    yield ScriptedGateway(app, store, service)
    await store.aclose()


def deps_of(service: CountingTurns, store: Store) -> ResponsesDeps:
    sealer = Sealer(b"a salt for tests, long enough")
    numbers = count(1)

    async def seals() -> Sealer:
        return sealer

    def resolve(name: str, _: Caller) -> ResponsesModel:
        if name != "gpt-oss":
            raise UnknownModel(f"There is no model '{name}'.", param="model")
        return ResponsesModel("gpt-oss")

    return ResponsesDeps(
        service=service,
        store=store,
        resolve=resolve,
        seals=seals,
        today=lambda: "2026-11-20",
        new_id=lambda prefix: f"{prefix}{next(numbers):032x}",
        clock=lambda: 1_790_000_000.5,
    )


class Client:
    """WebSocket client; clearing `can_receive` stops it from receiving messages."""

    def __init__(self, app: FastAPI, path: str, key: str) -> None:
        self._app = app
        self._scope: dict[str, Any] = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "server": ("127.0.0.1", 4000),
            "client": ("127.0.0.1", 5),
            "headers": [HOSTNAME, (b"authorization", f"Bearer {key}".encode())],
            "subprotocols": [],
            "state": {},
            "extensions": {"websocket.http.response": {}},
        }
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._outgoing: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self.can_receive = asyncio.Event()
        self.can_receive.set()

    async def open(self) -> Client:
        self._incoming.put_nowait({"type": "websocket.connect"})
        self._task = asyncio.create_task(self._app(self._scope, self._incoming.get, self._take))
        assert (await self._outgoing.get())["type"] == "websocket.accept"
        return self

    async def _take(self, message: Message) -> None:
        await self.can_receive.wait()
        self._outgoing.put_nowait(message)

    def send(self, *, text: str | bytes | None = None, **fields: Any) -> None:
        """Send `text` unchanged, or a `response.create` frame with the given fields."""
        if text is None:
            text = orjson.dumps({"type": "response.create", "model": "gpt-oss", **fields}).decode()
        kind = "text" if isinstance(text, str) else "bytes"
        self._incoming.put_nowait({"type": "websocket.receive", kind: text})

    async def next_event(self, within_s: float = 5.0) -> Any:
        async with asyncio.timeout(within_s):
            message = await self._outgoing.get()
        assert message["type"] == "websocket.send", message
        return orjson.loads(message["text"])

    async def response_events(self) -> list[Any]:
        """Return the events up to the end of a response or to a connection-level error."""
        events = [await self.next_event()]
        while events[-1]["type"] not in TERMINAL and "status" not in events[-1]:
            events.append(await self.next_event())
        return events

    async def respond(self, **fields: Any) -> Any:
        """Send a request and return the finished response."""
        self.send(**fields)
        return (await self.response_events())[-1]["response"]

    async def expect_error(self, **fields: Any) -> Any:
        """Send a request and return its error frame."""
        self.send(**fields)
        [error] = await self.response_events()
        assert error["type"] == "error"
        return error

    async def is_silent(self) -> bool:
        """Return whether the server sends nothing for a moment."""
        await asyncio.sleep(0.02)
        return self._outgoing.empty()

    async def close_code(self, within_s: float = 5.0) -> int:
        """Return the code with which the server closes the connection."""
        async with asyncio.timeout(within_s):
            message = await self._outgoing.get()
        assert message["type"] == "websocket.close", message
        return int(message["code"])

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "websocket.disconnect", "code": 1005})

    async def wait_until_done(self, within_s: float = 5.0) -> None:
        """Wait until the server has finished all work for this client."""
        assert self._task is not None
        async with asyncio.timeout(within_s):
            await self._task
