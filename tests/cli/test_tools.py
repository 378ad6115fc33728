"""`unisono mcp list` and `unisono mcp call`, with a real tool server behind them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.mcp.conftest import Upstream, start_upstream
from unisono.cli import main


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with start_upstream(tmp_path_factory.mktemp("upstream")) as (_, found):
        yield found


SAYING = """
import json, sys
ANSWERS = {{
    "initialize": {{
        "protocolVersion": "2025-06-18",
        "capabilities": {{"tools": {{}}}},
        "serverInfo": {{"name": "a", "version": "1"}}
    }},
    "tools/list": {{"tools": [{tool!r}]}},
    "tools/call": {{"content": [{{"type": "text", "text": {text!r}}}]}},
}}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        found = ANSWERS.get(asked["method"])
        said = {{"error": {{"code": -32601, "message": "no"}}}} if found is None else {{"result": found}}
        print(json.dumps({{"jsonrpc": "2.0", "id": asked["id"], **said}}), flush=True)
"""
"""A tool server that says what is put in."""


def run(folder: Path, servers: dict[str, Any], *arguments: str) -> Result:
    path = folder / "config.json"
    path.write_text(json.dumps({"mcp_servers": servers}))
    return CliRunner().invoke(main, ["mcp", arguments[0], "--config", str(path), *arguments[1:]])


def test_tools_are_listed_with_what_needs_approval(upstream: Upstream, tmp_path: Path) -> None:
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


def test_a_server_that_is_not_there_is_said_beside_the_others(upstream: Upstream, tmp_path: Path) -> None:
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


def test_what_a_server_says_does_not_steer_the_terminal(tmp_path: Path) -> None:
    steering = "\x1b]0;owned\x07 \u202eback\u009b2J"
    tool = {"name": "act", "description": f"{steering}\nmore", "inputSchema": {"type": "object"}}
    told = tmp_path / "server.py"
    told.write_text(SAYING.format(tool=tool, text=f"{steering}\n\tnext"))
    docs = {"transport": "stdio", "command": sys.executable, "args": [str(told)], "require_approval": "never"}
    spelled = r"\x1b]0;owned\x07 \u202eback\x9b2J"
    result = run(tmp_path, {"docs": docs}, "list")
    assert (result.exit_code, result.output) == (0, f"docs\n  act  no approval     {spelled}\n")
    result = run(tmp_path, {"docs": docs}, "call", "docs", "act")
    assert (result.exit_code, result.output) == (0, f"{spelled}\n\tnext\n")


WRONG: dict[str, tuple[list[str], str]] = {
    "no such server": (["call", "other", "echo"], "unknown tool server `other`; servers: docs"),
    "no JSON": (["call", "docs", "echo", "{"], "not a JSON object"),
    "no object": (["call", "docs", "echo", "[]"], "not a JSON object"),
    "no such server to list": (["list", "other"], "unknown tool server `other`"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_told(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run(tmp_path, {"docs": {"url": "http://127.0.0.1:9/mcp"}}, *arguments)
    assert result.exit_code != 0
    assert message in result.output
