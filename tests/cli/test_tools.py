"""`unisono mcp list` and `unisono mcp call` with a real tool server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.mcp.conftest import Upstream
from unisono.cli import main

# Source of a tool server with a given tool and result text.
SERVER_SOURCE = """
import json, sys
RESULTS = {{
    "initialize": {{
        "protocolVersion": "2025-06-18",
        "capabilities": {{"tools": {{}}}},
        "serverInfo": {{"name": "a", "version": "1"}}
    }},
    "tools/list": {{"tools": [{tool!r}]}},
    "tools/call": {{"content": [{{"type": "text", "text": {text!r}}}]}},
}}
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = RESULTS.get(request["method"])
        outcome = {{"error": {{"code": -32601, "message": "no"}}}} if result is None else {{"result": result}}
        print(json.dumps({{"jsonrpc": "2.0", "id": request["id"], **outcome}}), flush=True)
"""


def run(folder: Path, servers: dict[str, Any], *arguments: str) -> Result:
    path = folder / "config.json"
    path.write_text(json.dumps({"mcp_servers": servers}))
    return CliRunner().invoke(main, ["mcp", arguments[0], "--config", str(path), *arguments[1:]])


def test_tools_are_listed_with_their_approval(upstream: Upstream, tmp_path: Path) -> None:
    docs = {
        "url": upstream.urls["modern"],
        "allowed_tools": ["echo", "huge"],
        "require_approval": {"never": {"read_only": True}},
    }
    result = run(tmp_path, {"docs": docs}, "list")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "docs",
        "  echo  no approval     Says what it is told.",
        "  huge  needs approval",
    ]


def test_an_unreachable_server_is_reported_beside_the_others(upstream: Upstream, tmp_path: Path) -> None:
    docs = {"url": upstream.urls["modern"], "allowed_tools": ["echo"]}
    result = run(tmp_path, {"gone": {"url": "http://127.0.0.1:9/mcp"}, "docs": docs}, "list")
    assert result.exit_code == 1
    assert "docs\n  echo" in result.output
    assert result.output.startswith("gone\n  ")


def test_a_tool_is_called(upstream: Upstream, tmp_path: Path) -> None:
    docs = {"url": upstream.urls["modern"]}
    result = run(tmp_path, {"docs": docs}, "call", "docs", "echo", '{"text": "hello"}')
    assert (result.exit_code, result.output) == (0, "hello\n")
    result = run(tmp_path, {"docs": docs}, "call", "docs", "broken")
    assert result.exit_code == 1
    assert "broken" in result.output


def test_terminals_from_a_server_are_printed_as_text(tmp_path: Path) -> None:
    escapes = "\x1b]0;owned\x07 \u202eback\u009b2J"
    tool = {"name": "act", "description": f"{escapes}\nmore", "inputSchema": {"type": "object"}}
    script = tmp_path / "server.py"
    script.write_text(SERVER_SOURCE.format(tool=tool, text=f"{escapes}\n\tnext"))
    docs = {"transport": "stdio", "command": sys.executable, "args": [str(script)], "require_approval": "never"}
    escaped = r"\x1b]0;owned\x07 \u202eback\x9b2J"
    result = run(tmp_path, {"docs": docs}, "list")
    assert (result.exit_code, result.output) == (0, f"docs\n  act  no approval     {escaped}\n")
    result = run(tmp_path, {"docs": docs}, "call", "docs", "act")
    assert (result.exit_code, result.output) == (0, f"{escaped}\n\tnext\n")


INVALID_ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "unknown server to call": (["call", "other", "echo"], "unknown tool server `other`; servers: docs"),
    "invalid JSON": (["call", "docs", "echo", "{"], "not a JSON object"),
    "arguments not an object": (["call", "docs", "echo", "[]"], "not a JSON object"),
    "unknown server to list": (["list", "other"], "unknown tool server `other`"),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("arguments", "message"), INVALID_ARGUMENTS.values(), ids=INVALID_ARGUMENTS)
def test_invalid_arguments_are_reported(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run(tmp_path, {"docs": {"url": "http://127.0.0.1:9/mcp"}}, *arguments)
    assert result.exit_code != 0
    assert message in result.output
