"""Servers that are processes of ours: what they see, what they may say, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.processes import lives
from tests.mcp.arguments import sent
from tests.mcp.conftest import Upstream
from unisono.core.tools import Command, ToolServer, ToolTimeouts, ToolTransport
from unisono.errors import ToolServerNotAllowed, ToolServerTimeout, ToolServerUnavailable
from unisono.mcp import McpHost, McpLimits
from unisono.mcp.subprocess_reaper import Watch
from unisono.net.ssrf_guard import AllowedHost, SsrfGuard

HARMLESS = {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}


def script(text: str) -> Command:
    return Command((sys.executable, "-c", text))


async def test_a_process_sees_what_it_was_given_and_little_else(
    host: McpHost, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_MASTER_KEY", "canary-key")
    seen = json.loads((await host.call(upstream.server("stdio"), "environment", sent({}))).text)
    # What a Python sets for itself is not inherited.
    assert set(seen) - {"LC_CTYPE", "__CF_USER_TEXT_ENCODING"} <= HARMLESS | {"UPSTREAM_NOTES"}
    assert "canary-key" not in json.dumps(seen)


async def test_at_the_end_the_process_and_its_children_are_gone(upstream: Upstream) -> None:
    host = McpHost()
    server = upstream.server("stdio")
    pids = [int(pid) for pid in (await host.call(server, "child", sent({}))).text.split()]
    assert all(lives(pid) for pid in pids)
    await host.aclose()
    async with asyncio.timeout(1):  # a signal takes its moment
        while any(lives(pid) for pid in pids):
            await asyncio.sleep(0.01)


async def test_a_connection_that_is_not_ready_is_closed_at_once(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    silent = f"""
import os, time
open({str(told)!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""
    host = McpHost(limits=McpLimits(closing_s=60.0))
    timeouts = ToolTimeouts(connect_s=300.0, list_s=300.0)
    server = ToolServer(
        "silent", command=script(silent), transport=ToolTransport.STDIO, configured=True, timeouts=timeouts
    )
    listing = asyncio.create_task(host.list_tools(server))
    async with asyncio.timeout(60):
        while not (told.exists() and told.read_text()):
            await asyncio.sleep(0.01)
    # Far below all of the times above.
    async with asyncio.timeout(30):
        await host.aclose()
    assert not lives(int(told.read_text()))
    with pytest.raises(ToolServerUnavailable, match="was disconnected before it was ready"):
        await listing


@pytest.mark.slow
async def test_a_process_that_will_not_end_is_ended(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    stubborn = f"""
import json, os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(told)!r}, "w").write(str(os.getpid()))
signal.pause()
"""
    host = McpHost()
    timeouts = ToolTimeouts(connect_s=1)
    server = ToolServer(
        "a", command=script(stubborn), transport=ToolTransport.STDIO, configured=True, timeouts=timeouts
    )
    with pytest.raises(ToolServerTimeout):
        await host.list_tools(server)
    await host.aclose()
    assert not lives(int(told.read_text()))


async def test_a_command_that_does_not_exist_is_an_unavailable_server(host: McpHost) -> None:
    server = ToolServer("a", command=Command(("/nonexistent/x",)), transport=ToolTransport.STDIO, configured=True)
    with pytest.raises(ToolServerUnavailable) as raised:
        await host.list_tools(server)
    assert "nonexistent" not in raised.value.message


async def test_a_process_that_ends_at_once_is_noticed_at_once(host: McpHost) -> None:
    server = ToolServer("a", command=script("pass"), transport=ToolTransport.STDIO, configured=True)
    async with asyncio.timeout(8):
        with pytest.raises(ToolServerUnavailable):
            await host.list_tools(server)


async def test_what_is_no_message_is_passed_over(host: McpHost, upstream: Upstream) -> None:
    real = upstream.server("stdio").command
    assert real is not None
    chatty = f"""
import os, sys
print("Welcome!")
print('{{"jsonrpc": "2.0", "id": 1, "result": NaN')
print("[]", flush=True)
os.execv(sys.executable, {list(real.argv)!r})
"""
    command = Command((sys.executable, "-c", chatty), real.environment)
    server = ToolServer("a", command=command, transport=ToolTransport.STDIO, configured=True)
    assert (await host.call(server, "echo", sent({"text": "heard"}))).text == "heard"


async def test_complaints_are_logged_in_bounds(
    host: McpHost, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "unisono.mcp.stdio"):
        assert (await host.call(upstream.server("stdio"), "complain", sent({"lines": 400}))).text == "complained"
    said = [record for record in caplog.records if "tool server wrote to standard error" in record.message]
    assert 0 < len(said) <= 200
    assert all(len(record.message) < 600 for record in said)


async def test_an_endless_line_ends_the_server(upstream: Upstream) -> None:
    host = McpHost(limits=McpLimits(answer_bytes=100_000))
    endless = "import sys\nwhile True: sys.stdout.write('x' * 1000)"
    server = ToolServer("a", command=script(endless), transport=ToolTransport.STDIO, configured=True)
    async with asyncio.timeout(8):
        with pytest.raises(ToolServerUnavailable):
            await host.list_tools(server)
    await host.aclose()


_STARTED: list[str] = []
_LISTENING = False


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _LISTENING and event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.system"):
        _STARTED.append(f"{event} {arguments}")


@contextmanager
def starts_nothing() -> Iterator[None]:
    """Fails when a process is started inside."""
    global _LISTENING
    if _hook not in _HOOKED:
        sys.addaudithook(_hook)
        _HOOKED.append(_hook)
    _STARTED.clear()
    _LISTENING = True
    try:
        yield
    finally:
        _LISTENING = False
    assert _STARTED == []


_HOOKED: list[object] = []

FROM_REQUESTS = {
    "a command": ToolServer("a", command=Command(("/bin/true",)), transport=ToolTransport.STDIO),
    "a command behind another transport": ToolServer("a", "https://b.example/", command=Command(("/bin/true",))),
    "an address for stdio": ToolServer("a", "https://b.example/", transport=ToolTransport.STDIO),
    "a file": ToolServer("a", "file:///bin/true"),
    "a command as an address": ToolServer("a", "stdio:/bin/true"),
}


@pytest.mark.parametrize("server", FROM_REQUESTS.values(), ids=FROM_REQUESTS)
async def test_no_request_starts_a_process(server: ToolServer) -> None:
    host = McpHost(guard=SsrfGuard([AllowedHost("*", frozenset(), plain_http=True, private=True)]))
    with starts_nothing():
        with pytest.raises(ToolServerNotAllowed):
            await host.list_tools(server)
        with pytest.raises(ToolServerNotAllowed):
            await host.call(server, "echo", sent({}))
    await host.aclose()


def test_the_audit_would_notice() -> None:
    with pytest.raises(AssertionError), starts_nothing():
        subprocess.run(["/bin/true"], check=True)


STUBBORN = """
import os, pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
signal.pause()
"""

GATEWAY = """
import asyncio, sys
from unisono.core.tools import Command
from unisono.mcp import McpLimits
from unisono.mcp.stdio import process

async def main():
    commands = [Command((sys.executable, "-c", sys.argv[1], told)) for told in sys.argv[2:]]
    async with process(commands[0], "a", McpLimits()), process(commands[1], "b", McpLimits()):
        print("begun", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_processes_do_not_outlive_a_gateway_that_is_killed(tmp_path: Path) -> None:
    told = [tmp_path / "a", tmp_path / "b"]
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, "-c", GATEWAY, STUBBORN, *map(str, told), stdout=asyncio.subprocess.PIPE
    )
    assert gateway.stdout is not None
    await gateway.stdout.readline()
    async with asyncio.timeout(10):
        while not all(path.exists() and " " in path.read_text() for path in told):
            await asyncio.sleep(0.01)
    pids = [int(pid) for path in told for pid in path.read_text().split()]
    assert all(lives(pid) for pid in pids)
    gateway.kill()
    await gateway.wait()
    async with asyncio.timeout(5):
        while any(lives(pid) for pid in pids):
            await asyncio.sleep(0.01)


def test_nobody_watches_where_nothing_is_left_to_watch() -> None:
    watch = Watch()
    first, second = (subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2))
    try:
        watch.add(first.pid)
        watcher = watch._watcher
        watch.add(second.pid)
        watch.end(first.pid)
        assert watcher is watch._watcher
        assert watcher is not None
        # A watcher that was ended from outside is replaced by one that knows as much.
        watcher.kill()
        watcher.wait()
        watch.add(first.pid)
        replaced = watch._watcher
        assert replaced is not None
        watch._end()
        assert {first.wait(5), second.wait(5)} == {-signal.SIGKILL}
        assert replaced.returncode == 0
        watch.add(first.pid)
        watch.end(second.pid)
        last = watch._watcher
        watch.end(first.pid)
        assert last is not None
        assert last.returncode == 0
        assert watch._watcher is None
    finally:
        for child in (first, second):
            child.kill()
            child.wait()
