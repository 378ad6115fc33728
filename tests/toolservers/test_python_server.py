"""The Python server with the MCP client of the SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp.client.client import Client

from tests.toolservers.running import called, served, text_of
from unisono.toolservers.python.executor import CodeRunner, RunLimits
from unisono.toolservers.python.sandbox_probe import Sandbox, find_sandbox
from unisono.toolservers.python.server import MAX_CODE_LENGTH, code_of, python_server


@pytest.fixture(scope="session")
def way() -> Sandbox:
    return find_sandbox()


@asynccontextmanager
async def python(way: Sandbox, limits: RunLimits | None = None) -> AsyncIterator[Client]:
    async with served(python_server(CodeRunner(way, limits))) as url, Client(url) as client:
        yield client


async def test_the_tool_returns_the_output_of_the_code(way: Sandbox) -> None:
    async with python(way) as client:
        (tool,) = (await client.list_tools()).tools
        assert (tool.name, tool.input_schema["required"]) == ("python", ["code"])
        assert tool.description is not None
        assert "You have to use print statements to access the output." in tool.description
        assert ("disabled" in tool.description) is not way.has_network
        result = await called(client, "python", code="print(6 * 7)")
        assert (text_of(result), result.is_error) == ("42\n", False)
        facts = {"logs": "42\n", "exit_code": 0, "timed_out": False, "left_out_bytes": 0}
        assert result.structured_content == facts


async def test_a_time_limit_is_reported_in_a_normal_result(way: Sandbox) -> None:
    async with python(way, RunLimits(seconds=0.5)) as client:
        result = await called(client, "python", code="print(1)\nwhile True: pass")
        assert text_of(result) == "1\n[The program exceeded its time limit of 0.5 s and was stopped.]"
        assert (result.is_error, result.structured_content["timed_out"]) == (False, True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "missing code": ({}, "Invalid function arguments: `code`"),
    "code of the wrong type": ({"code": 3}, "Invalid function arguments: `code`"),
    "code too long": ({"code": "#" * (MAX_CODE_LENGTH + 1)}, f"`code` must have at most {MAX_CODE_LENGTH} characters"),
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.values(), ids=REFUSED)
async def test_invalid_code_arguments_are_explained(way: Sandbox, arguments: dict[str, Any], sentence: str) -> None:
    async with python(way) as client:
        result = await called(client, "python", **arguments)
        assert (text_of(result), result.is_error) == (sentence, True)


WRAPPED: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({"code": "print(1)"}, "print(1)"),
    "other argument name": ({"input": "print(1)"}, "print(1)"),
    "JSON in the argument": ({"code": json.dumps({"code": "print(1)"})}, "print(1)"),
    "code fence": ({"code": "```python\nprint(1)\nprint(2)\n```"}, "print(1)\nprint(2)"),
    "a dictionary is code": ({"code": '{"code": 1}'}, '{"code": 1}'),
    "a set is code": ({"code": "{1, 2}"}, "{1, 2}"),
    "deeply nested braces": ({"code": "{" * 100_000}, "{" * 100_000),
    "a fence inside": ({"code": "x = '''```\n```'''"}, "x = '''```\n```'''"),
    "no code argument": ({"language": "python"}, None),
}


@pytest.mark.parametrize(("arguments", "code"), WRAPPED.values(), ids=WRAPPED)
def test_code_is_extracted_from_its_wrapping(arguments: dict[str, Any], code: str | None) -> None:
    assert code_of(arguments) == code


async def test_several_programs_run_concurrently(way: Sandbox) -> None:
    async with python(way) as client:
        code = "import time; time.sleep(0.3); print({})"
        results = await asyncio.gather(*(called(client, "python", code=code.format(number)) for number in range(4)))
        assert [text_of(result) for result in results] == ["0\n", "1\n", "2\n", "3\n"]
