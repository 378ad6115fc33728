"""Minimal MCP server with one tool that returns its argument and records its times.

It uses protocol version 2026-07-28 with plain JSON answers. Its own time per call is recorded exactly, so that it can
be subtracted from the time of a step.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

import orjson
import uvloop

from bench import vllm_wire
from bench.calling_backend import TIMES_PATH, TOOL_NAME
from bench.fake_vllm import BackendConnection, BackendState
from bench.prose import Corpus

VERSION = "2026-07-28"
COMPLETE = {"resultType": "complete"}
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NOT_FOUND = -32601

Params = dict[str, Any]


def _discover(params: Params) -> Params:
    del params
    about = {"supportedVersions": [VERSION], "capabilities": {"tools": {}}, "ttlMs": 0, "cacheScope": "private"}
    return {**about, "serverInfo": {"name": "bench", "version": "1"}}


def _list(params: Params) -> Params:
    del params
    tool = {"name": TOOL_NAME, "description": "Returns its argument.", "inputSchema": SCHEMA}
    return {"tools": [tool], "ttlMs": 0, "cacheScope": "private"}


def _call(params: Params) -> Params:
    return {"content": [{"type": "text", "text": params["arguments"]["text"]}], "isError": False}


METHODS: dict[str, Callable[[Params], Params]] = {
    "server/discover": _discover,
    "tools/list": _list,
    "tools/call": _call,
}


class ToolConnection(BackendConnection):
    """Connection to the tool server.

    `times` has, by the text of a call, when it was received and answered, in seconds of `time.monotonic`.
    """

    def __init__(self, server: BackendState, times: dict[str, tuple[float, float]]) -> None:
        super().__init__(server)
        self._times = times

    def on_message_complete(self) -> None:
        received_at = time.monotonic()
        if self._url == TIMES_PATH:
            self._transport.write(vllm_wire.json_response(200, self._times))
            self._times.clear()
            return
        if self._parser.get_method() != b"POST":
            self._transport.write(vllm_wire.failure(405, "MethodNotAllowed", "Method Not Allowed"))
            return
        message = orjson.loads(b"".join(self._body))
        method = METHODS.get(message["method"])
        answer: Params = {"jsonrpc": "2.0", "id": message.get("id")}
        if method is None:
            answer["error"] = {"code": NOT_FOUND, "message": "Method not found"}
        else:
            answer["result"] = {**COMPLETE, **method(message["params"])}
        self._transport.write(vllm_wire.json_response(200, answer))
        if method is _call:
            self._times[message["params"]["arguments"]["text"]] = (received_at, time.monotonic())


async def main(port: int) -> None:
    times: dict[str, tuple[float, float]] = {}
    server = BackendState(Corpus((), (), (0, b""), (0, 0, 0)))
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: ToolConnection(server, times), "127.0.0.1", port, backlog=1024)
    await listening.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
