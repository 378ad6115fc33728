"""Tests of stdio servers: their environment and output, and that no process is left."""

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
from weakref import WeakValueDictionary

import anyio
import pytest
from mcp.shared.message import SessionMessage

from tests.e2e.processes import lives
from tests.mcp.arguments import sent
from tests.mcp.conftest import Upstream
from unisono.core.tool_host import Command, ToolServer, ToolTimeouts, ToolTransport
from unisono.errors import ToolServerNotAllowed, ToolServerTimeout, ToolServerUnavailable
from unisono.mcp import McpHost, McpLimits
from unisono.mcp.stdio import StdoutReader, answered_request
from unisono.mcp.subprocess_reaper import Watch
from unisono.net.ssrf_guard import AllowedHost, SsrfGuard

INHERITED = {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}


def script(text: str) -> Command:
    return Command((sys.executable, "-c", text))


async def until_ended(*pids: int) -> None:
    # Signals are asynchronous. The limit is far below the time after which the processes would end by themselves.
    async with asyncio.timeout(10):
        while any(map(lives, pids)):
            await asyncio.sleep(0.01)


async def test_process_gets_only_its_own_and_harmless_variables(
    host: McpHost, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_MASTER_KEY", "canary-key")
    environment = json.loads((await host.call(upstream.server("stdio"), "environment", sent({}))).text)
    # Variables that Python sets itself are not inherited.
    assert set(environment) - {"LC_CTYPE", "__CF_USER_TEXT_ENCODING"} <= INHERITED | {"UPSTREAM_NOTES"}
    assert "canary-key" not in json.dumps(environment)


async def test_closing_the_host_ends_the_process_and_its_children(upstream: Upstream) -> None:
    host = McpHost()
    server = upstream.server("stdio")
    pids = [int(pid) for pid in (await host.call(server, "child", sent({}))).text.split()]
    assert all(lives(pid) for pid in pids)
    await host.aclose()
    await until_ended(*pids)


async def test_connection_that_is_not_ready_is_closed_immediately(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    silent = f"""
import os, time
open({str(pid_file)!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""
    host = McpHost(limits=McpLimits(closing_s=60.0))
    timeouts = ToolTimeouts(connect_s=300.0, list_s=300.0)
    server = ToolServer(
        "silent", command=script(silent), transport=ToolTransport.STDIO, configured=True, timeouts=timeouts
    )
    listing = asyncio.create_task(host.list_tools(server))
    async with asyncio.timeout(60):
        while not (pid_file.exists() and pid_file.read_text()):
            await asyncio.sleep(0.01)
    # Far below all timeouts above.
    async with asyncio.timeout(30):
        await host.aclose()
    await until_ended(int(pid_file.read_text()))
    with pytest.raises(ToolServerUnavailable, match="was disconnected before it was ready"):
        await listing


@pytest.mark.slow
async def test_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    stubborn = f"""
import json, os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(pid_file)!r}, "w").write(str(os.getpid()))
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
    await until_ended(int(pid_file.read_text()))


async def test_missing_command_is_an_unavailable_server(host: McpHost) -> None:
    server = ToolServer("a", command=Command(("/nonexistent/x",)), transport=ToolTransport.STDIO, configured=True)
    with pytest.raises(ToolServerUnavailable) as raised:
        await host.list_tools(server)
    assert "nonexistent" not in raised.value.message


async def test_process_that_exits_at_start_is_detected_immediately(host: McpHost) -> None:
    server = ToolServer("a", command=script("pass"), transport=ToolTransport.STDIO, configured=True)
    async with asyncio.timeout(8):
        with pytest.raises(ToolServerUnavailable):
            await host.list_tools(server)


@pytest.mark.slow
async def test_output_that_is_not_a_message_is_ignored(host: McpHost, upstream: Upstream) -> None:
    upstream_command = upstream.server("stdio").command
    assert upstream_command is not None
    chatty = f"""
import os, sys
print("Welcome!")
print('{{"jsonrpc": "2.0", "id": 1, "result": NaN')
print("[]", flush=True)
os.execv(sys.executable, {list(upstream_command.argv)!r})
"""
    command = Command((sys.executable, "-c", chatty), upstream_command.environment)
    server = ToolServer("a", command=command, transport=ToolTransport.STDIO, configured=True)
    assert (await host.call(server, "echo", sent({"text": "heard"}))).text == "heard"


@pytest.mark.slow
async def test_standard_error_is_logged_within_limits(
    host: McpHost, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "unisono.mcp.stdio"):
        assert (await host.call(upstream.server("stdio"), "complain", sent({"lines": 400}))).text == "complained"
    logged = [record for record in caplog.records if "tool server wrote to standard error" in record.message]
    assert 0 < len(logged) <= 200
    assert all(len(record.message) < 600 for record in logged)


async def test_endless_line_makes_the_server_unavailable(upstream: Upstream) -> None:
    host = McpHost(limits=McpLimits(answer_bytes=100_000))
    endless = "import sys\nwhile True: sys.stdout.write('x' * 1000)"
    server = ToolServer("a", command=script(endless), transport=ToolTransport.STDIO, configured=True)
    async with asyncio.timeout(8):
        with pytest.raises(ToolServerUnavailable):
            await host.list_tools(server)
    await host.aclose()


FLOOD = """
import sys
while True:
    sys.stdout.write("progress\\n" * 1000)
"""
FLOODED = (
    "it wrote 2,000 consecutive lines to standard output that are not MCP messages; a tool server must write its log "
    "to standard error."
)


async def test_flood_of_lines_that_are_not_messages_ends_the_process(tmp_path: Path) -> None:
    host = McpHost(limits=McpLimits(ignored_lines=2000))
    pid_file = tmp_path / "pid"
    flood = f"import os\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\n{FLOOD}"
    server = ToolServer("a", command=script(flood), transport=ToolTransport.STDIO, configured=True)
    async with asyncio.timeout(10):
        with pytest.raises(ToolServerUnavailable, match=f"The tool server 'a' cannot be used: {FLOODED}"):
            await host.list_tools(server)
    await until_ended(int(pid_file.read_text()))
    await host.aclose()


async def test_flood_during_a_call_is_reported_to_the_caller() -> None:
    host = McpHost(limits=McpLimits(ignored_lines=2000))
    command = script(RAW_SERVER.format(lines={"loud": b"progress\n" * 3000}))
    server = ToolServer("a", command=command, transport=ToolTransport.STDIO, configured=True)
    async with asyncio.timeout(10):
        outcome = await host.call(server, "loud", sent({}))
        assert outcome.text == f"The tool server did not answer: {FLOODED} The tool may or may not have run."
        # The next call starts the program again.
        assert (await host.call(server, "other", sent({}))).text == "acted"
    await host.aclose()


async def test_buffered_lines_that_are_not_messages_do_not_block_the_event_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stdout = asyncio.StreamReader()
    stdout.feed_data(b"progress\n" * 10_000)
    stdout.feed_eof()
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    reader = StdoutReader("a", McpLimits(ignored_lines=1_000_000), WeakValueDictionary(), lambda: None)
    reading = asyncio.create_task(reader.read(stdout, to_session))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    from_server.close()
    assert turns > 500
    assert len(caplog.records) == 1


# Program of a tool server. For a tool whose name is a key of `LINES`, it answers with the line given there. The tool
# `slow` answers after a second.
RAW_SERVER = """
import json, sys, threading, time

LINES = {lines!r}

def write(line):
    sys.stdout.buffer.write(line + b"\\n")
    sys.stdout.buffer.flush()

def answer(id, result):
    write(json.dumps({{"jsonrpc": "2.0", "id": id, "result": result}}).encode())

def text(words):
    return {{"content": [{{"type": "text", "text": words}}]}}

for line in sys.stdin:
    message = json.loads(line)
    id, method = message.get("id"), message["method"]
    if method == "initialize":
        about = {{"capabilities": {{"tools": {{}}}}, "serverInfo": {{"name": "a", "version": "1"}}}}
        answer(id, {{"protocolVersion": message["params"]["protocolVersion"], **about}})
    elif method != "tools/call":
        if id is not None:
            write(json.dumps({{"jsonrpc": "2.0", "id": id, "error": {{"code": -32601, "message": "no"}}}}).encode())
    elif (name := message["params"]["name"]) == "slow":
        threading.Timer(1.0, answer, (id, text("finished"))).start()
    elif name in LINES:
        line = LINES[name].replace(b"LONG", b"x" * 300_000).replace(b"MANY", b"1," * 80_000)
        write(line.replace(b"ID", str(id).encode()))
    else:
        answer(id, text("acted"))
"""
TEXT = b'"result":{"content":[{"type":"text","text":"%s"}]}'
INVALID = "The tool server sent an invalid answer. The tool may or may not have run."
TOO_LARGE = "The result of the tool cannot be read: the answer exceeds the size limit of {}; request a smaller result."
TOO_LONG = TOO_LARGE.format("100,000 bytes")
# case: (line that the server writes, text that the model reads)
UNREADABLE_ANSWERS = {
    "invalid UTF-8, id last": (b"{" + TEXT % b"\xff" + b',"jsonrpc":"2.0","id":ID}', INVALID),
    "invalid UTF-8": (b'{"jsonrpc":"2.0","id":ID,' + TEXT % b"\xff" + b"}", INVALID),
    "list as a result": (b'{"jsonrpc": "2.0", "id": ID, "result": [1]}', INVALID),
    "text as an error": (b'{"jsonrpc":"2.0","id":"ID","error":"broken"}', INVALID),
    "no result": (b'{"jsonrpc":"2.0","id":ID}', INVALID),
    "deep": (b'{"jsonrpc":"2.0","id":ID,"result":{"a":' + b"[" * 5000 + b"]" * 5000 + b"}}", INVALID),
    "too large": (b'{"jsonrpc":"2.0","id":ID,' + TEXT % b"LONG" + b"}", TOO_LONG),
    "too large, id last": (b"{" + TEXT % b"LONG" + b',"id":ID,"jsonrpc":"2.0"}', TOO_LONG),
    "just too large": (b'{"jsonrpc":"2.0","id":ID,' + TEXT % (b"x" * 100_000) + b"}", TOO_LONG),
}


async def test_unreadable_answer_fails_its_call_at_once_and_no_other_call() -> None:
    host = McpHost(limits=McpLimits(answer_bytes=100_000))
    command = script(RAW_SERVER.format(lines={name: line for name, (line, _) in UNREADABLE_ANSWERS.items()}))
    server = ToolServer("a", command=command, transport=ToolTransport.STDIO, configured=True)
    assert (await host.call(server, "other", sent({}))).text == "acted"
    # The limit here is far below the time limit of a call.
    async with asyncio.timeout(10):
        slow = asyncio.create_task(host.call(server, "slow", sent({})))
        outcomes = {name: await host.call(server, name, sent({})) for name in UNREADABLE_ANSWERS}
        assert (await slow).text == "finished"
    assert {name: outcome.text for name, outcome in outcomes.items()} == {
        name: text for name, (_, text) in UNREADABLE_ANSWERS.items()
    }
    assert all(outcome.is_error for outcome in outcomes.values())
    await host.aclose()


async def test_answer_with_too_many_tokens_fails_only_its_call() -> None:
    host = McpHost(limits=McpLimits(looked_through=50_000))
    line = b'{"jsonrpc":"2.0","id":ID,"result":{"content":[],"structuredContent":{"a":[MANY1]}}}'
    server = ToolServer(
        "a", command=script(RAW_SERVER.format(lines={"many": line})), transport=ToolTransport.STDIO, configured=True
    )
    slow = asyncio.create_task(host.call(server, "slow", sent({})))
    assert (await host.call(server, "many", sent({}))).text == TOO_LARGE.format("50,000 JSON tokens")
    assert (await slow).text == "finished"
    await host.aclose()


NOT_ANSWERS = {
    "request of the server": b'{"jsonrpc":"2.0","id":1,"method":"ping","params":"\xff"}',
    "request of the server, id last": b'{"method":"ping","params":{"result":"\xff"},"jsonrpc":"2.0","id":1}',
    "notification": b'{"jsonrpc":"2.0","method":"x","params":{"id":1}}',
    "id inside the result": b'{"jsonrpc":"2.0","result":{"id":1}}',
    "partial answer": b'{"jsonrpc":"2.0","id":1,"result":{"content":[',
    "no id": b'{"jsonrpc":"2.0","id":null,"error":{}}',
}


@pytest.mark.parametrize("line", NOT_ANSWERS.values(), ids=NOT_ANSWERS)
def test_line_that_is_not_an_answer_belongs_to_no_request(line: bytes) -> None:
    assert answered_request(line + b"\n") is None


_STARTED: list[str] = []
_LISTENING = False


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _LISTENING and event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.system"):
        _STARTED.append(f"{event} {arguments}")


@contextmanager
def assert_no_process_started() -> Iterator[None]:
    """Assert that no process is started inside the context."""
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

REQUEST_SERVERS = {
    "command": ToolServer("a", command=Command(("/bin/true",)), transport=ToolTransport.STDIO),
    "command with another transport": ToolServer("a", "https://b.example/", command=Command(("/bin/true",))),
    "address for stdio": ToolServer("a", "https://b.example/", transport=ToolTransport.STDIO),
    "file URL": ToolServer("a", "file:///bin/true"),
    "command as an address": ToolServer("a", "stdio:/bin/true"),
}


@pytest.mark.parametrize("server", REQUEST_SERVERS.values(), ids=REQUEST_SERVERS)
async def test_request_cannot_start_a_process(server: ToolServer) -> None:
    host = McpHost(guard=SsrfGuard([AllowedHost("*", frozenset(), plain_http=True, private=True)]))
    with assert_no_process_started():
        with pytest.raises(ToolServerNotAllowed):
            await host.list_tools(server)
        with pytest.raises(ToolServerNotAllowed):
            await host.call(server, "echo", sent({}))
    await host.aclose()


def test_audit_hook_detects_a_started_process() -> None:
    with pytest.raises(AssertionError), assert_no_process_started():
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
from unisono.core.tool_host import Command
from unisono.mcp import McpLimits
from unisono.mcp.stdio import process

async def main():
    commands = [Command((sys.executable, "-c", sys.argv[1], path)) for path in sys.argv[2:]]
    async with process(commands[0], "a", McpLimits()), process(commands[1], "b", McpLimits()):
        print("begun", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_processes_end_with_a_killed_gateway(tmp_path: Path) -> None:
    pid_files = [tmp_path / "a", tmp_path / "b"]
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, "-c", GATEWAY, STUBBORN, *map(str, pid_files), stdout=asyncio.subprocess.PIPE
    )
    assert gateway.stdout is not None
    await gateway.stdout.readline()
    async with asyncio.timeout(10):
        while not all(path.exists() and " " in path.read_text() for path in pid_files):
            await asyncio.sleep(0.01)
    pids = [int(pid) for path in pid_files for pid in path.read_text().split()]
    assert all(lives(pid) for pid in pids)
    gateway.kill()
    await gateway.wait()
    await until_ended(*pids)


def test_watcher_runs_only_while_there_are_processes() -> None:
    watch = Watch()
    first, second = (subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2))
    try:
        watch.add(first.pid)
        watcher = watch._watcher
        watch.add(second.pid)
        watch.end(first.pid)
        assert watcher is watch._watcher
        assert watcher is not None
        # A watcher that was killed is replaced by one that watches the same processes.
        watcher.kill()
        watcher.wait()
        watch.add(first.pid)
        new_watcher = watch._watcher
        assert new_watcher is not None
        watch._end()
        assert {first.wait(5), second.wait(5)} == {-signal.SIGKILL}
        assert new_watcher.returncode == 0
        watch.add(first.pid)
        watch.end(second.pid)
        last_watcher = watch._watcher
        watch.end(first.pid)
        assert last_watcher is not None
        assert last_watcher.returncode == 0
        assert watch._watcher is None
    finally:
        for child in (first, second):
            child.kill()
            child.wait()
