"""MCP server of the browser, with the tool definitions that gpt-oss was trained on.

Arguments are parsed leniently: numbers may be strings, a link may be written as `3` or `【3†...】`, and some arguments
have alternative names. A connection has one session with its own pages. A client that serves several conversations over
one connection names the session in the call's `_meta`, under `unisono/session`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

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
from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationError

from unisono.toolservers.browser.actions import Browser, View
from unisono.toolservers.browser.visited_pages import BrowserSession, BrowserSessions, BrowsingError
from unisono.toolservers.transports import ToolServer

log = logging.getLogger(__name__)

SESSION_META: Final = "unisono/session"
MAX_KEY_LENGTH: Final = 256
ENDLESS: Final = 2**31

INSTRUCTIONS: Final = """\
Tool for browsing.
The `cursor` appears in brackets before each browsing display: `[{{cursor}}]`.
Cite information from the tool using the following format:
`【{{cursor}}†L{{line_start}}(-L{{line_end}})?】`, for example: `【6†L9-L11】` or `【8†L3】`.
Do not quote more than 10 words directly from the tool output.
sources={source} (default: {source})"""

_NUMBER: Final[dict[str, Any]] = {"type": "number", "default": -1}

TOOLS: Final = {
    "search": (
        "Searches for information related to `query` and displays `topn` results.",
        {"query": {"type": "string"}, "topn": {"type": "number", "default": 10}, "source": {"type": "string"}},
        ["query"],
    ),
    "open": (
        "Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, showing `num_lines` "
        "lines.\n"
        "Valid link ids are displayed with the formatting: `【{id}†.*】`.\n"
        "If `cursor` is not provided, the most recent page is implied.\n"
        "If `id` is a string, it is treated as a fully qualified URL associated with `source`.\n"
        "If `loc` is not provided, the viewport will be positioned at the beginning of the document or centered on the "
        "most relevant passage, if available.\n"
        "Use this function without `id` to scroll to a new location of an opened page.",
        {
            "id": {"type": ["number", "string"], "default": -1},
            "cursor": _NUMBER,
            "loc": _NUMBER,
            "num_lines": _NUMBER,
            "view_source": {"type": "boolean", "default": False},
            "source": {"type": "string"},
        },
        [],
    ),
    "find": (
        "Finds exact matches of `pattern` in the current page, or the page given by `cursor`.",
        {"pattern": {"type": "string"}, "cursor": _NUMBER},
        ["pattern"],
    ),
}


def _to_integer(value: Any) -> Any:
    """Convert whole numbers such as 3.0 and "3" to int, and empty values to -1.

    Other values are returned unchanged and fail in the later validation.
    """
    if value is None or value == "":
        return -1
    if isinstance(value, str):
        try:
            value = float(value[:32])
        except ValueError:
            return value
    if isinstance(value, float) and abs(value) < ENDLESS:
        return int(value)
    return value


def _link(value: Any) -> Any:
    """Convert an argument to a link number or a URL."""
    if isinstance(value, str):
        number = value.strip().strip("【】").split("†")[0]
        return int(number) if number.isdecimal() and len(number) < 9 else value or -1
    return _to_integer(value)


Whole = Annotated[int, BeforeValidator(_to_integer), Field(ge=-ENDLESS, le=ENDLESS)]


class SearchCall(BaseModel):
    query: str
    topn: Whole = Field(default=10, validation_alias=AliasChoices("topn", "top_n"))


class OpenCall(BaseModel):
    id: Annotated[int | str, BeforeValidator(_link)] = Field(default=-1, validation_alias=AliasChoices("id", "url"))
    cursor: Whole = -1
    loc: Whole = -1
    num_lines: Whole = -1
    view_source: bool = False


class FindCall(BaseModel):
    pattern: str
    cursor: Whole = -1


async def run(browser: Browser, session: BrowserSession, name: str, arguments: dict[str, Any]) -> View:
    """Perform one call.

    Raises `BrowsingError` for failures and `ValidationError` for invalid arguments.
    """
    if name == "search":
        search = SearchCall.model_validate(arguments)
        return await browser.search(session, search.query, search.topn if search.topn > 0 else 10)
    if name == "open":
        call = OpenCall.model_validate(arguments)
        return await browser.open(session, call.id, call.cursor, call.loc, call.num_lines, call.view_source)
    if name == "find":
        find = FindCall.model_validate(arguments)
        return await browser.find(session, find.pattern, find.cursor)
    raise BrowsingError(f"Unknown function: {name}")


def session_key(context: ServerRequestContext[Any, Any]) -> str:
    """Return the key of the browser session in which a call runs."""
    connection = context.request.headers.get("mcp-session-id", "") if context.request is not None else ""
    named = (context.meta or {}).get(SESSION_META)
    return f"{connection}/{named[:MAX_KEY_LENGTH]}" if isinstance(named, str) else str(connection)


def browser_server(browser: Browser) -> ToolServer:
    """Return an MCP server for `browser`. The browser is closed when the server ends."""
    sessions = BrowserSessions()

    @asynccontextmanager
    async def life(_: ToolServer) -> AsyncIterator[dict[str, Any]]:
        try:
            yield {}
        finally:
            await browser.aclose()

    async def list_tools(_: ServerRequestContext[Any, Any], __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[_tool(name) for name in TOOLS])

    async def call_tool(context: ServerRequestContext[Any, Any], params: CallToolRequestParams) -> CallToolResult:
        session = sessions.get(session_key(context))
        try:
            async with session.lock:
                view = await run(browser, session, params.name, params.arguments or {})
        except BrowsingError as error:
            return _failed(str(error))
        except ValidationError as error:
            wrong = sorted({f"`{'.'.join(map(str, fault['loc'][:1]))}`" for fault in error.errors()})
            return _failed(f"Invalid function arguments: {', '.join(wrong)}")
        return CallToolResult(content=[TextContent(text=view.text)], structured_content=view.facts)

    return Server(
        "browser",
        version="1",
        instructions=INSTRUCTIONS.format(source=browser.search_source.name),
        lifespan=life,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _tool(name: str) -> Tool:
    description, properties, required = TOOLS[name]
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return Tool(
        name=name,
        description=description,
        input_schema=schema | ({"required": required} if required else {}),
        annotations=ToolAnnotations(read_only_hint=True, open_world_hint=True),
    )


def _failed(sentence: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=sentence)], is_error=True)
