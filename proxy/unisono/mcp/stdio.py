"""Tool server as a child process: one JSON message per line on standard input and output.

The SDK's own transport accepts lines of any length, copies the partial line at every read, and ignores invalid answers.
With this transport, an answer that is invalid or too large makes its call fail at once. A process that writes many
consecutive lines that are not messages is ended. Of a line that is too long, only the beginning and the end are kept,
which contain the id of the request that it answers. The process leads its own process group, and the whole group is
ended at shutdown, even if the gateway is killed. The process sees only the configured environment and a few harmless
variables. The beginning of its standard error is logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.message import SessionMessage
from mcp_types import (
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCRequest,
    RequestId,
    jsonrpc_message_adapter,
)

from unisono.core.frozen import dataclass
from unisono.core.log_rate import RateLimitedWarning
from unisono.core.tool_host import Command
from unisono.mcp.limits import McpLimits
from unisono.mcp.messages import Exchange, OutgoingMessage, encoded
from unisono.mcp.response_filter import TrimLimitReached, too_large, trim
from unisono.mcp.subprocess_reaper import WATCH

# Maximum length of a line that is read to its end, as a multiple of the size limit for answers.
MAX_EXCESS: Final = 16
# If a line exceeds the size limit, only this many bytes of its beginning and of its end are kept.
KEPT_BYTES: Final = 1024

_VERSION: Final = rb'"jsonrpc"\s*:\s*"2\.0"'
_ID: Final = rb'"id"\s*:\s*(\d{1,18}|"[^"\\]{1,64}")'
_OUTCOME: Final = rb'"(?:result|error)"'
_BEGIN: Final = rb"\s*\{\s*(?:" + _VERSION + rb"\s*,\s*)?"
# Servers write `id` before or after the result. If a message begins with any other member, it is not treated as an
# answer. The last brace of a line closes the message, so an `id` just before this brace belongs to the message itself.
_BEGINS_WITH_ID: Final = re.compile(_BEGIN + _ID + rb"\s*(?:\}|,\s*" + _OUTCOME + rb")")
_BEGINS_WITH_OUTCOME: Final = re.compile(_BEGIN + _OUTCOME)
_ENDS_WITH_ID: Final = re.compile(_ID + rb"\s*(?:,\s*" + _VERSION + rb"\s*)?\}\s*\Z")


class EndlessLine(Exception):
    """The server wrote a line that is longer than `MAX_EXCESS` times the size limit."""


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a server.

    If the line exceeds the size limit, `is_too_large` is True, and `data` contains only its beginning and its end.
    """

    data: bytes
    is_too_large: bool = False


async def read_line(stream: asyncio.StreamReader, most: int) -> Line:
    """Return the next line, which is empty at the end of the stream.

    `most` is the size limit in bytes, which must also be the limit of `stream`. Raises `EndlessLine` if the line is
    longer than `MAX_EXCESS` times this limit.
    """
    begin, end, size = b"", b"", 0
    while True:
        try:
            rest = await stream.readuntil()
        except asyncio.IncompleteReadError as error:
            rest = error.partial
        except asyncio.LimitOverrunError as error:
            piece = await stream.readexactly(error.consumed)
            begin, end, size = begin or piece[:KEPT_BYTES], piece[-KEPT_BYTES:], size + len(piece)
            if size > MAX_EXCESS * most:
                raise EndlessLine from None
            continue
        return Line(begin + (end + rest)[-KEPT_BYTES:], is_too_large=True) if begin else Line(rest)


def answered_request(line: bytes) -> RequestId | None:
    """Return the id of the request that a line answers, even if the line is not a valid message.

    Returns None if the line is not an answer, or if this is uncertain.
    """
    if not line.rstrip().endswith(b"}"):
        return None
    found = _BEGINS_WITH_ID.match(line)
    if found is None and _BEGINS_WITH_OUTCOME.match(line):
        found = _ENDS_WITH_ID.search(line, max(len(line) - KEPT_BYTES, 0))
    return None if found is None else coerce_request_id(json.loads(found[1]))


log = logging.getLogger(__name__)

# Time in seconds for which a server may continue after its input is closed, and again after SIGTERM.
GRACE_S: Final = 1.0
# Maximum number of logged lines of a server's standard error. Further lines are read and discarded.
LOGGED_LINES: Final = 200
LOGGED_CHARACTERS: Final = 500
# Number of ignored lines of standard output after which other tasks run. A line takes up to a millisecond.
IGNORED_LINES_PER_TURN: Final = 16
# Error message instead of an answer that the gateway cannot read. The module `calls` recognises this message by its
# beginning, which is the same in the SDK's own errors.
UNREADABLE: Final = "Failed to parse the answer."

# Exchanges by request id. An entry disappears when the caller of the request no longer refers to the exchange.
Exchanges: TypeAlias = WeakValueDictionary[RequestId, Exchange]
Inbox = MemoryObjectReceiveStream[SessionMessage | Exception]
Outbox = MemoryObjectSendStream[SessionMessage]


@asynccontextmanager
async def process(command: Command, label: str, limits: McpLimits) -> AsyncIterator[tuple[Inbox, Outbox]]:
    """Start the server and yield the streams for the SDK.

    Raises OSError if the process cannot be started.
    """
    child = await asyncio.create_subprocess_exec(
        *command.argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=get_default_environment() | dict(command.environment),
        cwd=command.directory,
        limit=limits.answer_bytes,
        start_new_session=True,
    )
    assert child.stdout is not None
    to_session, inbox = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outbox, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    exchanges = Exchanges()
    reader = StdoutReader(label, limits, exchanges, partial(_signal, child, signal.SIGTERM))
    pumps = (
        asyncio.create_task(reader.read(child.stdout, to_session)),
        asyncio.create_task(_write(child, from_session, to_session, exchanges)),
        asyncio.create_task(_log(child, label)),
    )
    try:
        # There must be no await before this line: after a cancellation there, the group would be registered after its
        # end.
        WATCH.add(child.pid)
        yield inbox, outbox
    finally:
        # Cancellation must not leave a process alive; every wait here is bounded.
        with anyio.CancelScope(shield=True):
            await _end(child)
            await asyncio.to_thread(WATCH.end, child.pid)
            # The pumps end now, because no process has the other ends of the pipes, unless a process left the group.
            await asyncio.wait(pumps, timeout=GRACE_S / 2)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            _close_pipes(child)
            for stream in (inbox, outbox, to_session, from_session):
                stream.close()


class StdoutReader:
    """Reader of a server's standard output that passes the messages to the session."""

    def __init__(self, label: str, limits: McpLimits, exchanges: Exchanges, terminate: Callable[[], None]) -> None:
        self._terminate = terminate  # ends the server
        self._about = {"tool_server": label}
        self._limits = limits
        self._exchanges = exchanges
        self._ignored_line, self._invalid_answer = RateLimitedWarning(log), RateLimitedWarning(log)

    async def read(
        self, stdout: asyncio.StreamReader, to_session: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._pass_messages(stdout, to_session)
        to_session.close()
        # Read the rest, because a server that is blocked on its output does not notice that its input was closed.
        while await stdout.read(1 << 16):
            pass

    async def _pass_messages(
        self, stdout: asyncio.StreamReader, to_session: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        ignored = 0
        while True:
            try:
                line = await read_line(stdout, self._limits.answer_bytes)
            except EndlessLine:
                self._end_session("it wrote an extremely long line to standard output")
                return
            if not line.data:
                return
            if (message := await self._to_message(line)) is not None:
                ignored = 0
                await to_session.send(SessionMessage(message))
                continue
            ignored += 1
            if ignored == self._limits.ignored_lines:
                self._end_session(
                    f"it wrote {ignored:,} consecutive lines to standard output that are not MCP messages; a tool "
                    "server must write its log to standard error"
                )
                return
            # `read_line` does not suspend while a line is buffered, and millions of lines may be buffered.
            if ignored % IGNORED_LINES_PER_TURN == 0:
                await asyncio.sleep(0)

    def _end_session(self, problem: str) -> None:
        """End the server, log the reason, and report the reason to callers that wait for an answer."""
        log.warning("the gateway ends the tool server: %s", problem, extra=self._about)
        for exchange in list(self._exchanges.values()):
            exchange.problem = exchange.problem or problem
        self._terminate()

    async def _to_message(self, line: Line) -> JSONRPCMessage | None:
        """Return the message in a line.

        If the line is an answer that is invalid or too large, returns an error answer to the same request instead.
        Returns None for any other line that is not a message.
        """
        problem = too_large(self._limits.answer_bytes) if line.is_too_large else ""
        if not problem:
            try:
                return jsonrpc_message_adapter.validate_json(await trim(line.data, self._limits), by_name=False)
            except TrimLimitReached as error:
                problem = too_large(error.limit, "JSON tokens")
            except ValueError:
                pass
        request_id = answered_request(line.data)
        if request_id is None:
            self._ignored_line.warn(
                "tool server wrote a line that is too large or not a JSON-RPC message; line ignored", **self._about
            )
            return None
        self._invalid_answer.warn(
            f"tool server sent an invalid answer: {problem or 'it is not a JSON-RPC message'}", **self._about
        )
        if problem and (exchange := self._exchanges.get(request_id)) is not None:
            exchange.is_too_large, exchange.problem = True, problem
        return JSONRPCError(jsonrpc="2.0", id=request_id, error=ErrorData(code=PARSE_ERROR, message=UNREADABLE))


async def _write(
    child: asyncio.subprocess.Process,
    from_session: MemoryObjectReceiveStream[SessionMessage],
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
    exchanges: Exchanges,
) -> None:
    assert child.stdin is not None
    try:
        async for item in from_session:
            exchange = item.exchange if isinstance(item, OutgoingMessage) else Exchange()
            if exchange.is_aborted:
                # The caller no longer waits, and treats the message as unsent.
                continue
            if isinstance(item.message, JSONRPCRequest):
                exchanges[item.message.id] = exchange
            message = item.message.model_dump(by_alias=True, mode="json", exclude_unset=True)
            exchange.sent = not child.stdin.is_closing()
            child.stdin.write(encoded(message, exchange.arguments) + b"\n")
            await child.stdin.drain()
    except OSError:
        # The server no longer reads: end the session now, instead of waiting for a timeout.
        to_session.close()


async def _log(child: asyncio.subprocess.Process, label: str) -> None:
    """Log the beginning of standard error and discard the rest, so that the server never blocks."""
    assert child.stderr is not None
    for _ in range(LOGGED_LINES):
        try:
            line = await child.stderr.readline()
        except ValueError:
            continue
        if not line:
            return
        text = line.decode("utf-8", "replace").rstrip()[:LOGGED_CHARACTERS]
        log.info("tool server wrote to standard error: %s", text, extra={"tool_server": label})
    while await child.stderr.read(1 << 16):
        pass


async def _end(child: asyncio.subprocess.Process) -> None:
    """End a server: close its input, then send SIGTERM, then SIGKILL to its process group."""
    assert child.stdin is not None
    child.stdin.close()
    for signum in (None, signal.SIGTERM, signal.SIGKILL):
        if signum is not None:
            _signal(child, signum)
        if await _has_ended_in_time(child):
            break
    # The server's own child processes may still run.
    _signal(child, signal.SIGKILL)


async def _has_ended_in_time(child: asyncio.subprocess.Process) -> bool:
    """Return True if the process ends within `GRACE_S`.

    Only the process itself is watched, because other processes may hold its pipes open.
    """
    for _ in range(int(GRACE_S / 0.01)):
        if child.returncode is not None:
            return True
        await asyncio.sleep(0.01)
    return child.returncode is not None


def _signal(child: asyncio.subprocess.Process, signum: signal.Signals) -> None:
    # The group id equals the leader's process id for as long as the group has a member.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signum)


def _close_pipes(child: asyncio.subprocess.Process) -> None:
    """Close the pipes of the process through asyncio's private transport object.

    If another process still holds a pipe, asyncio never sees the pipe's end, and has no public way to release the pipe.
    """
    transport = getattr(child, "_transport", None)
    if transport is not None:
        with suppress(ProcessLookupError, PermissionError):
            transport.close()
