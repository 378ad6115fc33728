"""Mixed traffic on every API: conversations, invalid requests, broken and slow streams."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from tests.api.responses.folding import TERMINAL, fold
from tests.chaos import clients
from tests.chaos.storm import differences
from tests.chaos.talks import CALLING, Talk, talk
from tests.e2e.gateway import Gateway
from tests.e2e.slow_clients import connected, request

GROUPS = ("gpt-oss", "gpt-oss-llamacpp", "gpt-oss-text")
BROKEN = "gpt-oss-broken"
FLOOD = "gpt-oss-flood"
TOPICS = ("plain", "wonders", *CALLING, "schema", "short")
MAX_AT_ONCE = 96
MAX_FAILURES = 40
TIMEOUT_S = 120.0
UNREAD_S = 8.0
DRIP_S = 0.05

Json = dict[str, Any]


@dataclass
class Traffic:
    """Requests to one gateway at a steady rate. `failures` describes wrong answers."""

    gateway: Gateway
    key: str
    dice: Random
    done: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    _number: int = 0
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, rate: float, until_s: float) -> None:
        """Start `rate` requests per second until the loop time `until_s`, then wait for all."""
        loop = asyncio.get_running_loop()
        names, weights = list(WEIGHTS), list(WEIGHTS.values())
        due = loop.time()
        while due < until_s:
            await asyncio.sleep(max(due - loop.time(), 0))
            due = max(due + 1 / rate, loop.time() - 1)
            if len(self._open) < MAX_AT_ONCE:
                self._start(self.dice.choices(names, weights)[0])
        await asyncio.gather(*self._open)

    async def each_once(self) -> None:
        """Send one request of every kind, so that everything is loaded that is loaded on first use."""
        for name in WEIGHTS:
            await self._do(name)

    def _start(self, name: str) -> None:
        task = asyncio.create_task(self._do(name))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _do(self, name: str) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                wrong = await KINDS[name](self)
        except Exception as error:
            wrong = ["".join(traceback.format_exception(error))[-2_000:]]
        self.done += 1
        self.kinds[name] += 1
        if wrong and len(self.failures) < MAX_FAILURES:
            self.failures.append(f"{name}: " + "\n  ".join(wrong))

    def talk(self, topic: str = "") -> Talk:
        self._number += 1
        return talk(topic or self.dice.choice(TOPICS), 1, self._number, "x")

    async def checked(self, surface: clients.Surface, topic: str = "", model: str = "") -> list[str]:
        current = self.talk(topic)
        model = model or self.dice.choice(GROUPS)
        return differences(current, await surface(self.gateway, model, current, self.dice), None)

    def signed(self, sent: bytes) -> bytes:
        """Add the key to a request, and let its connection close after the response."""
        head = b"connection: close\r\nauthorization: Bearer " + self.key.encode() + b"\r\nhost:"
        return sent.replace(b"host:", head, 1)


Kind = Callable[[Traffic], Awaitable[list[str]]]


def on(surface: clients.Surface, topic: str = "") -> Kind:
    return lambda traffic: traffic.checked(surface, topic)


async def websocket(traffic: Traffic) -> list[str]:
    """Two turns over the same connection, the second a continuation of the first."""
    url = traffic.gateway.url.replace("http", "ws", 1) + "/v1/responses"
    wrong: list[str] = []
    previous: Json = {}
    model = traffic.dice.choice(GROUPS)
    async with traffic.gateway.session.ws_connect(url, max_msg_size=0) as socket:
        for _ in range(2):
            current = traffic.talk("short")
            body = clients.of_responses(model, current)
            await socket.send_json({"type": "response.create", "store": False, **body, **previous})
            events: list[Json] = []
            while not events or events[-1]["type"] not in TERMINAL:
                events.append(await socket.receive_json())
                if events[-1]["type"] == "error":
                    return [f"{events[-1]}"]
            response = fold(events).response
            previous = {"previous_response_id": response["id"]}
            if text_of(response) != current.text:
                wrong.append(f"{text_of(response)!r}, not {current.text!r}")
    return wrong


def text_of(response: Json) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


async def websocket_left(traffic: Traffic) -> list[str]:
    """Text that is not JSON, then a client that disconnects in the middle of a response."""
    url = traffic.gateway.url.replace("http", "ws", 1) + "/v1/responses"
    body = clients.of_responses(GROUPS[0], traffic.talk("plain"))
    async with traffic.gateway.session.ws_connect(url, max_msg_size=0) as socket:
        await socket.send_str("{no JSON")
        refused = await socket.receive_json()
        await socket.send_json({"type": "response.create", **body})
        for _ in range(traffic.dice.randrange(1, 20)):
            # The terminal event is the last: nothing more arrives on an open connection.
            if (await socket.receive_json())["type"] in TERMINAL:
                break
    return [] if refused["type"] == "error" else [str(refused)]


async def chained(traffic: Traffic) -> list[str]:
    """Three stored responses, each a continuation of its predecessor; all are deleted."""
    ids: list[str] = []
    wrong: list[str] = []
    model = traffic.dice.choice(GROUPS)
    for _ in range(3):
        current = traffic.talk("short")
        body = clients.of_responses(model, current) | ({"previous_response_id": ids[-1]} if ids else {})
        response = await call(traffic, "POST", "/v1/responses", body)
        ids.append(response["id"])
        wrong += [] if text_of(response) == current.text else [f"{text_of(response)!r}, not {current.text!r}"]
    listed = await call(traffic, "GET", f"/v1/responses/{ids[-1]}/input_items?limit=100")
    wrong += [] if listed["data"] else ["no input items"]
    for each in ids:
        await call(traffic, "DELETE", f"/v1/responses/{each}")
    return wrong


async def cancelled(traffic: Traffic) -> list[str]:
    """A background response that is cancelled."""
    body = clients.of_responses(GROUPS[0], traffic.talk("plain"))
    created = await call(traffic, "POST", "/v1/responses", body | {"background": True})
    status, response = await answer(traffic, "POST", f"/v1/responses/{created['id']}/cancel", {})
    ended = response.get("status")
    return [] if status == 200 and ended in ("cancelled", "completed") else [f"{status} {response}"]


async def idempotent(traffic: Traffic) -> list[str]:
    """The same request twice under one key is one response."""
    body = clients.of_responses(GROUPS[0], traffic.talk("short"))
    headers = {"idempotency-key": f"key-{traffic.dice.getrandbits(64):x}"}
    first = await call(traffic, "POST", "/v1/responses", body, **headers)
    second = await call(traffic, "POST", "/v1/responses", body, **headers)
    return [] if first["id"] == second["id"] else [f"{first['id']} and {second['id']}"]


async def answer(traffic: Traffic, method: str, path: str, body: Json | None = None, **headers: str) -> tuple[int, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = traffic.gateway.url + path
    async with traffic.gateway.session.request(method, url, json=body, headers=named) as response:
        raw = await response.read()
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.status, json.loads(raw) if is_json else raw


async def call(traffic: Traffic, method: str, path: str, body: Json | None = None, **headers: str) -> Any:
    status, found = await answer(traffic, method, path, body, **headers)
    if status != 200:
        raise RuntimeError(f"{method} {path}: {status} {found}")
    return found


async def look(traffic: Traffic) -> list[str]:
    """Requests of monitoring systems."""
    for path in ("/health/liveness", "/health/readiness", "/v1/models", "/metrics"):
        await call(traffic, "GET", path)
    return []


def chat_body(traffic: Traffic, model: str, topic: str = "plain", **fields: Any) -> bytes:
    current = traffic.talk(topic)
    surface = traffic.dice.choice(("chat", "responses"))
    if surface == "chat":
        return request("POST", "/v1/chat/completions", clients.of_chat(model, current) | fields)
    return request("POST", "/v1/responses", clients.of_responses(model, current) | {"store": False} | fields)


async def refused(traffic: Traffic) -> list[str]:
    """A request that is rejected with the expected status."""
    name = traffic.dice.choice(list(REFUSALS))
    sent, status = REFUSALS[name]
    reader, writer = await asyncio.open_connection(*address(traffic))
    try:
        with suppress(ConnectionError):
            writer.write(traffic.signed(sent) if name != "no key" else sent)
            await writer.drain()
        response = await reader.read(4096)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return [] if response.startswith(b"HTTP/1.1 %d" % status) else [f"{name}: {response[:300]!r}"]


def address(traffic: Traffic) -> tuple[str, int]:
    host, _, port = traffic.gateway.url.removeprefix("http://").partition(":")
    return host, int(port)


CHAT_BODY: Json = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
REFUSALS: Mapping[str, tuple[bytes, int]] = {
    "no key": (
        request("POST", "/v1/chat/completions", CHAT_BODY).replace(b"host:", b"connection: close\r\nhost:", 1),
        401,
    ),
    "unknown model": (request("POST", "/v1/chat/completions", CHAT_BODY | {"model": "none"}), 404),
    "unknown path": (request("POST", "/v1/none", {}), 404),
    "no JSON": (request("POST", "/v1/chat/completions", CHAT_BODY).replace(b"{", b"[", 1), 400),
    "no messages": (request("POST", "/v1/chat/completions", CHAT_BODY | {"messages": []}), 400),
    "unknown response": (request("GET", "/v1/responses/resp_none"), 404),
    "no HTTP": (b"GET / HTTP/9.9 or so\r\nhost: x\r\n\r\n", 400),
    "endless header": (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"x" * 70_000 + b"\r\n\r\n", 431),
}


async def aborted(traffic: Traffic) -> list[str]:
    """A client that disconnects at any time of its request or response, with FIN or RST."""
    dice = traffic.dice
    sent = traffic.signed(chat_body(traffic, dice.choice(GROUPS), stream=dice.random() < 0.8))
    part = dice.choice((dice.randrange(1, len(sent)), len(sent), len(sent)))
    reader, writer = await asyncio.open_connection(*address(traffic))
    writer.write(sent[:part])
    if part == len(sent) and dice.random() < 0.7:
        await reader.read(dice.randrange(1, 4000))
    else:
        await asyncio.sleep(dice.random() * 0.02)
    if dice.random() < 0.5:
        writer.transport.abort()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return []


async def slow(traffic: Traffic) -> list[str]:
    """A long stream that is read slowly or not at all, and then closed."""
    sock = await connected(traffic.gateway.url)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(sock, traffic.signed(chat_body(traffic, FLOOD, stream=True)))
        ends = loop.time() + UNREAD_S
        reads = traffic.dice.random() < 0.5
        while loop.time() < ends:
            if reads and not await loop.sock_recv(sock, 64):
                return ["the stream ended early"]
            await asyncio.sleep(DRIP_S)
    finally:
        sock.close()
    return []


async def broken(traffic: Traffic) -> list[str]:
    """A backend that rejects, breaks off or sends garbage: the gateway must send some response."""
    sent = traffic.signed(chat_body(traffic, BROKEN, stream=traffic.dice.random() < 0.5))
    reader, writer = await asyncio.open_connection(*address(traffic))
    try:
        writer.write(sent)
        response = await reader.read()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return [] if response.startswith(b"HTTP/1.1 ") else [f"{response[:300]!r}"]


KINDS: Mapping[str, Kind] = {
    "chat stream": on(clients.chat_stream),
    "chat whole": on(clients.chat_whole),
    "messages": on(clients.messages_stream),
    "responses stream": on(clients.responses_stream),
    "responses whole": on(clients.responses_whole),
    "background": on(clients.background),
    "conversation": on(clients.responses_whole, "follows"),
    "server tool": on(clients.responses_stream, "hosted"),
    "chained": chained,
    "cancelled": cancelled,
    "idempotent": idempotent,
    "websocket": websocket,
    "websocket left": websocket_left,
    "look": look,
    "refused": refused,
    "aborted": aborted,
    "slow": slow,
    "broken": broken,
}
WEIGHTS: Mapping[str, float] = dict.fromkeys(KINDS, 2.0) | {
    "chat stream": 8.0,
    "chat whole": 4.0,
    "messages": 4.0,
    "responses stream": 4.0,
    "refused": 6.0,
    "aborted": 6.0,
    "background": 1.0,
    "server tool": 1.0,
    "slow": 0.3,
    "look": 0.5,
}


def new_session(key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"})
