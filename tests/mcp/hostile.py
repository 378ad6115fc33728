"""Raw MCP server for invalid messages: a regular handshake, then scripted behaviour."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from tests.fakes.wire import Seen, Step, WireServer, Write
from unisono.core.tool_host import ToolServer

TOOL = {"name": "act", "description": "Acts.", "inputSchema": {"type": "object"}}


def plain(status: int, body: bytes = b"", kind: str = "application/json", *headers: str) -> Write:
    lines = [f"HTTP/1.1 {status} Status", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers]
    return Write("\r\n".join([*lines, "", ""]).encode() + body)


def message(**fields: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **fields}).encode()


METHOD, ID = re.compile(rb'"method":"([^"]*)"'), re.compile(rb'"id":(\d+)')


def method_of(seen: Seen) -> str:
    """Return the method of a request, even if no library can parse its arguments."""
    found = METHOD.search(seen.body)
    return found[1].decode() if found else ""


def id_of(seen: Seen) -> int:
    found = ID.search(seen.body)
    assert found is not None
    return int(found[1])


def answer(seen: Seen, result: Any, **more: Any) -> Write:
    return plain(200, message(id=id_of(seen), result=result, **more))


def text(seen: Seen, words: str = "acted") -> Write:
    return answer(seen, {"content": [{"type": "text", "text": words}]})


EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(data: bytes, **fields: str) -> Write:
    lines = b"".join(f"{name}: {value}\n".encode() for name, value in fields.items())
    return Write(lines + b"data: " + data + b"\n\n")


Acting = Callable[[Seen], Iterable[Step]]


class Hostile(WireServer):
    """MCP server of an earlier revision: regular until a tool is called, then as `act` says.

    `calls` contains the tool calls, `notifications` the methods of notifications. `listing` answers `tools/list`.
    """

    def __init__(self, act: Acting, *, version: str = "2025-06-18", listing: Acting | None = None) -> None:
        super().__init__(self._respond)
        self._act = act
        self._listing = listing
        self._version = version
        self.calls: list[Seen] = []
        self.notifications: list[str] = []

    def server(self, **more: Any) -> ToolServer:
        return ToolServer("hostile", f"{self.url}/mcp", configured=True, **more)

    def _respond(self, seen: Seen) -> Iterable[Step]:
        if seen.method == "DELETE":
            return [plain(200)]
        if seen.method == "GET":
            return [plain(405)]
        match method_of(seen):
            case "server/discover":
                return [plain(400)]
            case "initialize":
                about = {
                    "protocolVersion": self._version,
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "hostile", "version": "1"},
                }
                session = f"Mcp-Session-Id: s{len(self.calls)}"
                return [plain(200, message(id=id_of(seen), result=about), "application/json", session)]
            case "tools/list":
                return self._listing(seen) if self._listing else [answer(seen, {"tools": [TOOL]})]
            case "tools/call":
                self.calls.append(seen)
                return self._act(seen)
            case method:
                self.notifications.append(method)
                return [plain(202)]


# Members that results of protocol version 2026-07-28 need.
COMPLETE = {"resultType": "complete"}
CACHEABLE = {**COMPLETE, "ttlMs": 0, "cacheScope": "private"}


class ModernHostile(Hostile):
    """MCP server of protocol version 2026-07-28, which has neither a session nor notifications of the client."""

    def _respond(self, seen: Seen) -> Iterable[Step]:
        match method_of(seen):
            case "server/discover":
                about = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
                return [answer(seen, {**CACHEABLE, **about})]
            case "tools/list" if self._listing is None:
                return [answer(seen, {**CACHEABLE, "tools": [TOOL]})]
            case _:
                return super()._respond(seen)
