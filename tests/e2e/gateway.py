"""The whole gateway on a real socket, with real or scripted backends."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import aiohttp
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from unisono.api.json_response import BODY_WRITER, SEND_BODY
from unisono.api.layered_app import LayeredApp
from unisono.app import build
from unisono.config import parse
from unisono.server.config_reload import OF_THE_SERVER
from unisono.server.server import server_config
from unisono.server.write_timeout import chunk_writer


@dataclass(frozen=True)
class Answer:
    """HTTP response of the gateway.

    `body` is the parsed JSON body. `events` are the JSON events of a stream, without `[DONE]`.
    """

    status: int
    headers: Mapping[str, str]
    raw: bytes
    body: Any = None
    events: list[Any] = field(default_factory=list)
    # Whether the stream ended with `[DONE]`.
    done: bool = False


@dataclass(frozen=True)
class Gateway:
    url: str
    session: aiohttp.ClientSession
    # The application, for tests that inspect its state.
    app: LayeredApp | None = None

    async def chat(self, *, path: str = "/v1/chat/completions", **fields: Any) -> Answer:
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.post(path, json.dumps(body).encode())

    async def chat_as(self, key: str, **fields: Any) -> Answer:
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.post("/v1/chat/completions", json.dumps(body).encode(), authorization=f"Bearer {key}")

    async def messages(self, *, path: str = "/v1/messages", **fields: Any) -> Answer:
        body = {"model": "gpt-oss", "max_tokens": 4096, "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.post(path, json.dumps(body).encode())

    async def post(self, path: str, body: bytes, **headers: str) -> Answer:
        all_headers = {"content-type": "application/json", **{name.replace("_", "-"): v for name, v in headers.items()}}
        async with self.session.post(self.url + path, data=BytesIO(body), headers=all_headers) as response:
            return to_answer(response.status, response.headers, await response.read())

    async def get(self, path: str, **headers: str) -> Answer:
        async with self.session.get(self.url + path, headers=headers) as response:
            return to_answer(response.status, response.headers, await response.read())


def to_answer(status: int, headers: Mapping[str, str], raw: bytes) -> Answer:
    if not headers.get("content-type", "").startswith("text/event-stream"):
        return Answer(status, headers, raw, json.loads(raw) if raw else None)
    lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    return Answer(status, headers, raw, None, events, lines[-1:] == ["[DONE]"])


def config_of(*deployments: str, name: str = "gpt-oss", **sections: Any) -> dict[str, Any]:
    """Return a configuration with one model group.

    A deployment is `kind@api_base`, or `kind/model` if it has no address. The store is in memory unless a section says
    otherwise.
    """
    entries = []
    for deployment in deployments:
        kind, at, base = deployment.partition("@")
        params = {"model": f"{kind}/tiny", "api_base": base} if at else {"model": deployment}
        entries.append({"model_name": name, "litellm_params": params})
    return {"model_list": entries, "store": {"url": "memory://"}, **sections}


def with_body_writer(app: ASGIApp) -> ASGIApp:
    """Return `app` with the server's writer of bodies, as `AppSwitch` provides it."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        if scope["type"] == "http":
            state.update({SEND_BODY: send, BODY_WRITER: chunk_writer(send)})
        try:
            await app(scope, receive, send)
        finally:
            for key in OF_THE_SERVER:
                state.pop(key, None)

    return run


class StoppableServer(uvicorn.Server):
    """A server that stops at once. uvicorn looks ten times a second whether it should stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stopping.wait()


@asynccontextmanager
async def gateway(config: Mapping[str, Any], wrap: Callable[[Any], Any] | None = None) -> AsyncIterator[Gateway]:
    """Run a gateway and stop it afterwards, with everything that it opened.

    It shares no state with other gateways unless the configuration says so. `wrap` returns an ASGI application that
    runs in front of the gateway.
    """
    settings = parse({"store": {"url": "memory://"}, **config}, {}).config
    app = build(settings)
    # asyncio disables Nagle's algorithm only if the protocol is given. Otherwise every answer takes 40 ms longer.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = StoppableServer(server_config(with_body_writer(app if wrap is None else wrap(app)), settings))
    serving = asyncio.create_task(server._serve([listener]))
    while not server.started:
        if serving.done():
            serving.result()
        await asyncio.sleep(0.005)
    try:
        # Tests with many parallel requests must not wait for their own client.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Gateway(f"http://127.0.0.1:{listener.getsockname()[1]}", session, app)
    finally:
        server.stopping.set()
        await serving
        listener.close()


@dataclass(frozen=True)
class Message:
    """Content of an answer as a client sees it."""

    content: str | None
    reasoning: str | None
    calls: list[tuple[str, str]]
    finish_reason: str
    note: Any
    usage: Any


def message_of(answer: Answer) -> Message:
    """Return the first choice of a body, or of a stream that is folded as clients do it."""
    if not answer.events:
        choice = answer.body["choices"][0]
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        note, usage = answer.body["unisono"], answer.body["usage"]
        return Message(message["content"], message.get("reasoning"), calls, choice["finish_reason"], note, usage)
    return _folded(answer.events)


def _folded(events: list[Any]) -> Message:
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, list[str]] = {}
    finish, note, usage = "", None, None
    for event in events:
        note = event.get("unisono") or note
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            content += [delta["content"]] if delta.get("content") else []
            reasoning += [delta["reasoning"]] if delta.get("reasoning") else []
            for call in delta.get("tool_calls") or ():
                known = calls.setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"].get("arguments") or ""
            finish = choice["finish_reason"] or finish
    return Message(
        "".join(content) or None,
        "".join(reasoning) or None,
        [(name, arguments) for name, arguments in (calls[i] for i in sorted(calls))],
        finish,
        note,
        usage,
    )
