"""A tool server as a process of ours: one JSON message per line on its standard input and output.

The SDK's own transport takes lines of any length and copies what it has of one with every read; this one ends a
server that writes more than is taken. The process leads a group of its own, and at the end the whole group is gone,
at the end of a gateway that is killed too.
It sees the environment it was given and a few harmless variables. What it writes to standard error is logged, bounded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from unisono.core.tools import Command
from unisono.mcp.json_trim import TrimLimitReached, light
from unisono.mcp.limits import McpLimits
from unisono.mcp.messages import OutgoingMessage, encoded
from unisono.mcp.subprocess_reaper import WATCH

log = logging.getLogger(__name__)

GRACE_S: Final = 1.0
"""Between closing its input, asking it to end, and ending it."""
LOGGED_LINES: Final = 200
LOGGED_CHARACTERS: Final = 500

Inbox = MemoryObjectReceiveStream[SessionMessage | Exception]
Outbox = MemoryObjectSendStream[SessionMessage]


@asynccontextmanager
async def process(command: Command, label: str, limits: McpLimits) -> AsyncIterator[tuple[Inbox, Outbox]]:
    """Start the server and yield the streams the SDK speaks through. Raises OSError when it cannot be started."""
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
    to_session, inbox = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outbox, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    pumps = (
        asyncio.create_task(_read(child, to_session, label, limits)),
        asyncio.create_task(_write(child, from_session, to_session)),
        asyncio.create_task(_log(child, label)),
    )
    try:
        # At once: whoever is cancelled here ends the group below, which is not to be overtaken.
        WATCH.begin(child.pid)
        yield inbox, outbox
    finally:
        # Nobody may keep a process alive by being impatient; every wait in here is bounded.
        with anyio.CancelScope(shield=True):
            await _end(child)
            await asyncio.to_thread(WATCH.end, child.pid)
            # Nobody holds the other ends now, unless somebody escaped the group.
            await asyncio.wait(pumps, timeout=GRACE_S / 2)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            _close_pipes(child)
            for stream in (inbox, outbox, to_session, from_session):
                stream.close()


async def _read(
    child: asyncio.subprocess.Process,
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
    label: str,
    limits: McpLimits,
) -> None:
    assert child.stdout is not None
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        await _messages(child.stdout, to_session, label, limits)
    to_session.close()
    # A server that cannot get rid of its words does not read that it is to end.
    while await child.stdout.read(1 << 16):
        pass


async def _messages(
    stdout: asyncio.StreamReader,
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
    label: str,
    limits: McpLimits,
) -> None:
    while True:
        try:
            line = await stdout.readline()
        except ValueError:
            log.warning("tool server wrote a line longer than is taken", extra={"tool_server": label})
            return
        if not line:
            return
        try:
            line = await light(line, limits)
        except TrimLimitReached:
            log.warning("tool server wrote a message that holds more than is taken", extra={"tool_server": label})
            return
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            log.warning("tool server wrote a line that is no message", extra={"tool_server": label})
            continue
        await to_session.send(SessionMessage(message))


async def _write(
    child: asyncio.subprocess.Process,
    from_session: MemoryObjectReceiveStream[SessionMessage],
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
) -> None:
    assert child.stdin is not None
    try:
        async for item in from_session:
            message = item.message.model_dump(by_alias=True, mode="json", exclude_unset=True)
            arguments = item.arguments if isinstance(item, OutgoingMessage) else ""
            child.stdin.write(encoded(message, arguments) + b"\n")
            await child.stdin.drain()
    except OSError:
        # It no longer reads: the session is to know at once, not when somebody gives up waiting.
        to_session.close()


async def _log(child: asyncio.subprocess.Process, label: str) -> None:
    """Log the beginning of what the server complains about, and read the rest away, so that it never blocks on it."""
    assert child.stderr is not None
    for _ in range(LOGGED_LINES):
        try:
            line = await child.stderr.readline()
        except ValueError:
            continue
        if not line:
            return
        text = line.decode("utf-8", "replace").rstrip()[:LOGGED_CHARACTERS]
        log.info("tool server says: %s", text, extra={"tool_server": label})
    while await child.stderr.read(1 << 16):
        pass


async def _end(child: asyncio.subprocess.Process) -> None:
    """Close its input and wait, then ask, then end it, and with it whatever it started."""
    assert child.stdin is not None
    child.stdin.close()
    for signum in (None, signal.SIGTERM, signal.SIGKILL):
        if signum is not None:
            _signal(child, signum)
        if await _gone(child):
            break
    # What it started may have outlived it.
    _signal(child, signal.SIGKILL)


async def _gone(child: asyncio.subprocess.Process) -> bool:
    """Whether it ended in time. Its pipes may be held open by others, so only the process itself is watched."""
    for _ in range(int(GRACE_S / 0.01)):
        if child.returncode is not None:
            return True
        await asyncio.sleep(0.01)
    return child.returncode is not None


def _signal(child: asyncio.subprocess.Process, signum: signal.Signals) -> None:
    # The group has the number of the process that leads it, for as long as anybody is in it.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signum)


def _close_pipes(child: asyncio.subprocess.Process) -> None:
    """Of a pipe that somebody else still holds asyncio never sees the end, and gives no other way to let go of it."""
    transport = getattr(child, "_transport", None)
    if transport is not None:
        with suppress(ProcessLookupError, PermissionError):
            transport.close()
