"""A client of the Responses WebSocket, in process, and a gateway in front of scripted turns for it to talk to.

async with site(script, script) as there:
    ann = await there.connect()
    ann.send(input="Hi")
    events = await ann.answer()
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

from tests.api.asgi import Exchange, by_name
from tests.api.responses.folding import TERMINAL
from tests.api.scripted import ScriptedTurns, Step, final, finished
from unisono.api.asgi_layers import asgi_layers
from unisono.api.error_responses import register
from unisono.api.responses.background.runner import BackgroundRunner
from unisono.api.responses.deps import ResponsesDeps, ResponsesModel
from unisono.api.responses.outbound.dialects import OPENAI
from unisono.api.responses.routes import OPEN_RESPONSES_ROUTES, RESPONSES
from unisono.api.responses.routes.responses_api import ResponsesApi
from unisono.api.responses.websocket.connection import Connection
from unisono.api.route_table import mount
from unisono.api.sealing import Sealer
from unisono.core.access import Caller
from unisono.core.state_store import Store
from unisono.engine.request import GenerationRequest
from unisono.errors import UnknownModel
from unisono.store import open_store

HOSTNAME = (b"host", b"localhost")
SHORT = "/short"
"""A socket like any other, whose durations are those of the site."""

HELLO: list[Step] = [[*final(0, "Hel", "lo"), finished()]]


class CountingTurns(ScriptedTurns):
    """Counts characters for tokens."""

    async def count(self, turn: GenerationRequest) -> int:
        return sum(len(str(item)) for item in turn.conversation.items)


@dataclass
class Site:
    app: FastAPI
    store: Store
    turns: CountingTurns

    async def connect(self, path: str = "/v1/responses", *, key: str = "ann") -> Client:
        return await Client(self.app, path, key).opened()

    async def post(self, path: str, json: Any = None, *, key: str = "ann", method: str = "POST") -> Exchange:
        return await Exchange(self.app, method, path, json=json, headers=[("authorization", f"Bearer {key}")]).run()


@asynccontextmanager
async def site(*scripts: Sequence[Step], lasts_s: float = 3600.0) -> AsyncIterator[Site]:
    """Turn number k plays script k. Durations are those of a socket at `SHORT`."""
    turns = CountingTurns(*(scripts or (HELLO,)))
    store = open_store("memory://")
    await store.start()
    means = means_of(turns, store)
    app = FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        middleware=asgi_layers(authenticate=by_name, keyless=False, new_id=lambda: "0"),
    )
    register(app)
    api = ResponsesApi(means, BackgroundRunner(means, process="here"))
    mount(app, [*RESPONSES.routes, *OPEN_RESPONSES_ROUTES.routes], api)

    async def short(socket: WebSocket) -> None:
        await Connection(means, OPENAI, socket, lasts_s=lasts_s).run()

    app.router.routes.append(WebSocketRoute(SHORT, short))
    yield Site(app, store, turns)
    await store.aclose()


def means_of(turns: CountingTurns, store: Store) -> ResponsesDeps:
    sealer = Sealer(b"a salt for tests, long enough")
    numbers = count(1)

    async def seals() -> Sealer:
        return sealer

    def resolve(name: str, _: Caller) -> ResponsesModel:
        if name != "gpt-oss":
            raise UnknownModel(f"There is no model '{name}'.", param="model")
        return ResponsesModel("gpt-oss")

    return ResponsesDeps(
        service=turns,
        store=store,
        resolve=resolve,
        seals=seals,
        today=lambda: "2026-11-20",
        new_id=lambda prefix: f"{prefix}{next(numbers):032x}",
        clock=lambda: 1_790_000_000.5,
    )


class Client:
    """`reading` may be cleared: then nothing is taken from the server any more."""

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
        self.reading = asyncio.Event()
        self.reading.set()

    async def opened(self) -> Client:
        self._incoming.put_nowait({"type": "websocket.connect"})
        self._task = asyncio.create_task(self._app(self._scope, self._incoming.get, self._take))
        assert (await self._outgoing.get())["type"] == "websocket.accept"
        return self

    async def _take(self, message: Message) -> None:
        await self.reading.wait()
        self._outgoing.put_nowait(message)

    def send(self, *, text: str | bytes | None = None, **fields: Any) -> None:
        """A frame: `text` as it is, or a request for a response."""
        if text is None:
            text = orjson.dumps({"type": "response.create", "model": "gpt-oss", **fields}).decode()
        kind = "text" if isinstance(text, str) else "bytes"
        self._incoming.put_nowait({"type": "websocket.receive", kind: text})

    async def event(self, within_s: float = 5.0) -> Any:
        async with asyncio.timeout(within_s):
            message = await self._outgoing.get()
        assert message["type"] == "websocket.send", message
        return orjson.loads(message["text"])

    async def answer(self) -> list[Any]:
        """Events up to the end of a response, or to an error that is none of a response."""
        events = [await self.event()]
        while events[-1]["type"] not in TERMINAL and "status" not in events[-1]:
            events.append(await self.event())
        return events

    async def asked(self, **fields: Any) -> Any:
        """The finished response to a request."""
        self.send(**fields)
        return (await self.answer())[-1]["response"]

    async def refused(self, **fields: Any) -> Any:
        """The error frame a frame is answered with."""
        self.send(**fields)
        [error] = await self.answer()
        assert error["type"] == "error"
        return error

    async def quiet(self) -> bool:
        """Whether the server has nothing to say."""
        await asyncio.sleep(0.02)
        return self._outgoing.empty()

    async def closed(self, within_s: float = 5.0) -> int:
        """The code the server closes with."""
        async with asyncio.timeout(within_s):
            message = await self._outgoing.get()
        assert message["type"] == "websocket.close", message
        return int(message["code"])

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "websocket.disconnect", "code": 1005})

    async def ended(self, within_s: float = 5.0) -> None:
        """Return when nothing is done for this client any more."""
        assert self._task is not None
        async with asyncio.timeout(within_s):
            await self._task
