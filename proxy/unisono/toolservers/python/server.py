"""MCP server of the `python` tool: code in, printed output out."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from mcp.server import Server, ServerRequestContext
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from unisono.toolservers.python.executor import Busy, CodeRunner, RunOutcome
from unisono.toolservers.transports import ToolServer

MAX_CODE_LENGTH: Final = 200_000
# Argument names that models use for the code.
NAMES: Final = ("code", "input", "script", "source")

DESCRIPTION: Final = (
    "Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. This tool "
    "should be used for internal reasoning, but not for code that is intended to be visible to the user (e.g. when "
    "creating plots, tables, or files).\n"
    "When you send a message containing python code to python, it will be executed in a stateless environment, and the "
    "stdout of that process will be returned to you. You have to use print statements to access the output. It is "
    "ended after {seconds:g} seconds. Internet access for this session is {network}."
)

_FENCED = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL)


def code_of(arguments: dict[str, Any]) -> str | None:
    """Return the code of a call, or None if there is none.

    The code may be the argument itself, or inside JSON or a Markdown code block in the argument.
    """
    code = next((arguments[name] for name in NAMES if isinstance(arguments.get(name), str)), None)
    if code is None:
        return None
    if code.lstrip().startswith("{"):
        try:
            inner = json.loads(code)
        except (ValueError, RecursionError):
            inner = None
        if isinstance(inner, dict) and len(inner) == 1 and isinstance(inner.get("code"), str):
            code = inner["code"]
    fenced = _FENCED.fullmatch(code)
    return fenced[1] if fenced else code


def python_server(runner: CodeRunner) -> ToolServer:
    """Return an MCP server for `runner`."""
    description = DESCRIPTION.format(
        seconds=runner.limits.seconds, network="UNKNOWN" if runner.sandbox.has_network else "disabled"
    )
    tool = Tool(
        name="python",
        description=description,
        input_schema={
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The Python code to run."}},
            "required": ["code"],
        },
        annotations=ToolAnnotations(destructive_hint=False, idempotent_hint=True, open_world_hint=False),
    )

    async def list_tools(_: ServerRequestContext[Any, Any], __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[tool])

    async def call_tool(_: ServerRequestContext[Any, Any], params: CallToolRequestParams) -> CallToolResult:
        if params.name != "python":
            return _failed(f"Unknown function: {params.name}")
        code = code_of(params.arguments or {})
        if code is None:
            return _failed("Invalid function arguments: `code`")
        if len(code) > MAX_CODE_LENGTH:
            return _failed(f"`code` must have at most {MAX_CODE_LENGTH} characters")
        try:
            return _to_tool_result(await runner.run(code))
        except Busy:
            return _failed("Too many programs are running; try again later.")
        except OSError as error:
            return _failed(f"The program could not be started: {error.strerror or 'no resources'}")

    return Server("python", version="1", instructions=description, on_list_tools=list_tools, on_call_tool=call_tool)


def _to_tool_result(outcome: RunOutcome) -> CallToolResult:
    """Convert an outcome to a tool result. A failed program is not a failure of the tool."""
    text = outcome.logs
    if outcome.remark:
        text += ("" if not text or text.endswith("\n") else "\n") + outcome.remark
    facts = {
        "logs": outcome.logs,
        "exit_code": outcome.exit_code,
        "timed_out": outcome.timed_out,
        "left_out_bytes": outcome.left_out,
    }
    return CallToolResult(content=[TextContent(text=text)], structured_content=facts)


def _failed(sentence: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=sentence)], is_error=True)
