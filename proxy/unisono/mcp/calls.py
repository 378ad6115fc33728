"""List and call operations on an open MCP session, mapped to `core.tool_host` types.

The SDK's own call method also lists the tools and validates results against the server's schemas, including regular
expressions. This module sends only the call, and reads the answer without this validation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import mcp_types as types
from mcp.client import ClientSession
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, InputRequiredResult
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, use_span
from pydantic import TypeAdapter, ValidationError

from unisono.core.frozen import dataclass
from unisono.core.server_tool_arguments import ToolArguments
from unisono.core.tool_host import HostedTool, LeftOutTool, Progress, ToolOutcome, ToolServer, UserAnswer
from unisono.core.trace_context import DOING, TraceContext
from unisono.errors import ToolServerError, ToolServerProtocolError
from unisono.mcp.connection_errors import credentials_error
from unisono.mcp.content import cut, to_outcome
from unisono.mcp.elicitation import Dialogue, note_of, outcome_of
from unisono.mcp.fingerprints import size_of
from unisono.mcp.limits import McpLimits
from unisono.mcp.messages import Exchange, NoAnswer, mirrorable
from unisono.mcp.response_filter import too_large
from unisono.mcp.session import McpSession
from unisono.mcp.tool_lists import INVALID


@contextmanager
def child_of(trace: TraceContext | None) -> Iterator[None]:
    """Make `trace` the parent of requests sent in this context and in tasks started in it."""
    if trace is None:
        yield
        return
    flags = TraceFlags(TraceFlags.SAMPLED if trace.sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([trace.state]) if trace.state else None
    ids = int(trace.trace_id, 16), int(trace.span_id, 16)
    context = SpanContext(*ids, is_remote=False, trace_flags=flags, trace_state=state)
    with use_span(NonRecordingSpan(context)):
        yield


RESULT: Final[TypeAdapter[CallToolResult | InputRequiredResult]] = TypeAdapter(CallToolResult | InputRequiredResult)

ERROR_BYTES: Final = 4096
# Pause in seconds before a call is repeated for a server that requests a repetition without a question to the user. The
# pause doubles with each repetition, up to `MAX_STATE_PAUSE_S`.
STATE_PAUSE_S: Final = 0.05
MAX_STATE_PAUSE_S: Final = 1.0
INVALID_ANSWER: Final = "The tool server sent an invalid answer."
UNKNOWN: Final = "The tool may or may not have run."
# Prefixes of messages that the SDK writes itself when it cannot parse the server's answer. The text after the prefix
# describes SDK parsing and quotes the answer.
NOT_UNDERSTOOD: Final = ("Failed to parse", "Unexpected content type")
# Part of the error that `http_dispatcher` raises if a server answers a request with HTTP status 202, so that no result
# follows. The status alone does not show this: the older (SSE) transport answers every message with 202, and sends the
# result on a different stream.
ACCEPTED: Final = "answered a request with 202 Accepted"
# Prefixes of the SDK's messages about a lost answer. The error code is not enough, because servers also use it for
# their own errors.
LOST: Final = ("Connection closed", "SSE stream ended")

# HTTP statuses >= 500 that prove that the call was not executed. Other ones may be sent by a proxy after the execution.
NOT_DONE: Final = frozenset({501, 503, 505, 507, 511})


@dataclass(frozen=True, slots=True)
class CallAttempt:
    """Result of a call over one connection.

    `can_repeat` is True if the server provably did not execute the call. The call can then be repeated on a new
    connection.
    """

    outcome: ToolOutcome
    can_repeat: bool = False


async def tools(
    session: McpSession, server: ToolServer, limits: McpLimits, until: float
) -> tuple[tuple[HostedTool, ...], tuple[LeftOutTool, ...]]:
    """Return the tools of the server, and its invalid tools.

    Raises `ToolServerError` or a subclass if the server fails or exceeds a limit, and `TimeoutError` if the list is not
    complete at `until` (time of the event loop).
    """
    name, exchange = f"The tool server {server.label!r}", Exchange()

    async def work(client: ClientSession) -> tuple[tuple[HostedTool, ...], tuple[LeftOutTool, ...]]:
        found: list[HostedTool] = []
        invalid: list[LeftOutTool] = []
        room = limits.list_bytes
        async for page in _pages(client, limits.pages):
            for tool in page.tools:
                hosted, reason = _to_hosted_tool(server.label, tool), (tool.meta or {}).get(INVALID)
                room -= size_of(hosted)
                if reason is None:
                    found.append(hosted)
                else:
                    invalid.append(LeftOutTool(hosted, str(reason)))
            if room < 0 or len(found) + len(invalid) > limits.tools:
                raise ToolServerProtocolError(
                    f"{name} lists too many tools; the limits are {limits.tools} tools and {limits.list_bytes} bytes."
                )
        return tuple(found), tuple(invalid)

    try:
        return await session.request(work, exchange, until)
    except (MCPError, ValidationError, NoAnswer) as error:
        raise _listing_failed(name, exchange, error) from None


async def _send_call(
    client: ClientSession, params: types.CallToolRequestParams, until: float, on_progress: Progress | None
) -> CallToolResult | InputRequiredResult:
    async def report(progress: float, total: float | None, message: str | None) -> None:
        if on_progress is not None:
            on_progress(progress, total, message or "")

    return await client.send_request(
        types.CallToolRequest(params=params),
        RESULT,
        # This timeout of the SDK never ends the call, because `until` is earlier.
        request_read_timeout_seconds=until - asyncio.get_running_loop().time() + 60.0,
        progress_callback=None if on_progress is None else report,
    )


@dataclass(frozen=True, slots=True)
class Call:
    """Call to a tool.

    `until` is the deadline as a time of the event loop. `within` expresses this limit as the end of an error message,
    such as "within 30 s". `answer` is the user's answer to the tool's previous question, or None. With `can_ask`, the
    tool may ask the user a question.
    """

    tool: str
    arguments: ToolArguments
    until: float
    within: str
    progress: Progress | None = None
    answer: UserAnswer | None = None
    can_ask: bool = False


async def call(session: McpSession, made: Call, limits: McpLimits) -> CallAttempt:
    """Run a tool. Every failure is returned as an outcome; only a cancellation is raised."""
    dialogue = Dialogue(made.answer, can_ask=made.can_ask)
    if dialogue.is_waiting():
        # The server sent several questions at once, and the user has not answered all of them yet.
        return CallAttempt(outcome_of(dialogue))
    try:
        async with session.dialogues.open(dialogue, made.until):
            attempt = await _attempt(session, made, limits, dialogue)
            dialogue.has_result = not attempt.outcome.outcome_unknown
    except TimeoutError:
        return CallAttempt(_failed(f"The tool server was busy with other calls, and was not ready {made.within}."))
    # The tool asks a new question. The call will be repeated with the answer, so its current result is dropped.
    if dialogue.is_waiting():
        return CallAttempt(outcome_of(dialogue))
    if not (note := note_of(dialogue)):
        return attempt
    text = "\n".join(filter(None, (attempt.outcome.text, note)))
    return replace(attempt, outcome=replace(attempt.outcome, text=text))


async def _attempt(session: McpSession, made: Call, limits: McpLimits, dialogue: Dialogue) -> CallAttempt:
    exchange, until = Exchange(arguments=made.arguments.text), made.until
    # From these arguments, the SDK only copies values into headers, if the tool requests it. The body contains the
    # arguments as the unchanged text of the model.
    params = types.CallToolRequestParams(name=made.tool, arguments=mirrorable(made.arguments.members))

    async def work(client: ClientSession) -> CallToolResult | InputRequiredResult:
        result = await send_once(client)
        pause_s = STATE_PAUSE_S
        # An answer without questions requests the same call again, with the state that the server has sent.
        while isinstance(result, InputRequiredResult) and dialogue.read(result) and not dialogue.is_waiting():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_STATE_PAUSE_S)
            result = await send_once(client)
        return result

    async def send_once(client: ClientSession) -> CallToolResult | InputRequiredResult:
        send = partial(_send_call, client, dialogue.params(params), until, made.progress)
        try:
            return await send()
        except MCPError as error:
            if error.code != types.HEADER_MISMATCH or client.protocol_version not in MODERN_PROTOCOL_VERSIONS:
                raise
        # Newer servers require copies of some arguments in headers. The SDK finds their names in the tool list, which
        # is therefore read before the call is repeated.
        async for _ in _pages(client, limits.pages):
            pass
        return await send()

    try:
        with child_of(DOING.get()):
            return CallAttempt(to_outcome(await session.request(work, exchange, until), limits.output_bytes))
    except TimeoutError:
        if not exchange.sent:
            return CallAttempt(_failed(f"The tool server was not ready {made.within}."))
        return CallAttempt(_failed(f"The tool did not answer {made.within}.", unknown=True))
    except ValidationError:
        return CallAttempt(_failed(INVALID_ANSWER, unknown=True))
    except NoAnswer:
        if exchange.status >= 300 or not exchange.sent:
            return _refused(exchange, MCPError(types.INTERNAL_ERROR, ""), limits)
        return CallAttempt(_failed("The tool server ended its answer without a result for this call.", unknown=True))
    except MCPError as error:
        if error.code == types.URL_ELICITATION_REQUIRED and dialogue.read_pages(error.error):
            return CallAttempt(outcome_of(dialogue))
        return _refused(exchange, error, limits)


async def _pages(client: ClientSession, most: int) -> AsyncIterator[types.ListToolsResult]:
    """Yield the pages of the server's list of tools.

    Raises `ToolServerProtocolError` if a cursor repeats or there are more than `most` pages.
    """
    cursor: str | None = None
    seen: set[str] = set()
    while True:
        page = await client.list_tools(params=types.PaginatedRequestParams(cursor=cursor) if cursor else None)
        yield page
        cursor = page.next_cursor
        if not cursor:
            return
        if cursor in seen or len(seen) + 1 >= most:
            raise ToolServerProtocolError(
                f"The tool server's list of tools repeats a page or has more than {most} pages."
            )
        seen.add(cursor)


def _to_hosted_tool(label: str, tool: types.Tool) -> HostedTool:
    hints = (
        {} if tool.annotations is None else tool.annotations.model_dump(by_alias=True, mode="json", exclude_none=True)
    )
    return HostedTool(label, tool.name, tool.description or "", tool.input_schema, hints)


def _listing_failed(name: str, exchange: Exchange, error: Exception) -> ToolServerError:
    if (refusal := credentials_error(name, exchange)) is not None:
        return refusal
    if exchange.problem:
        return ToolServerError(f"{name} did not list its tools: {exchange.problem}.")
    if exchange.status >= 300:
        return ToolServerError(f"{name} did not list its tools: HTTP {exchange.status}.")
    if isinstance(error, MCPError) and not error.message.startswith(NOT_UNDERSTOOD):
        return ToolServerError(f"{name} did not list its tools: {cut(error.message, ERROR_BYTES)}")
    return ToolServerProtocolError(f"{name} sent an invalid list of tools.")


def _refused(exchange: Exchange, error: MCPError, limits: McpLimits) -> CallAttempt:
    """Convert an error into the outcome of a call.

    The outcome states whether the server refused the call, the tool failed, the call was never sent, or it is unknown
    whether the tool ran.
    """
    status, problem = exchange.status, exchange.problem
    # The SDK reports an event that exceeds its size limit without a specific error code.
    if exchange.is_too_large or (error.message.startswith("SSE stream failed") and "byte limit" in error.message):
        return CallAttempt(
            _failed(
                f"The result of the tool cannot be read: {exchange.problem or too_large(limits.answer_bytes)}; "
                "request a smaller result."
            )
        )
    if not exchange.sent:
        return CallAttempt(
            _failed(f"The tool server could not be reached: {problem or 'the connection was closed'}."), True
        )
    if status == 404:
        # The server has dropped the session; the protocol requires a new one.
        return CallAttempt(_failed("The tool server answered with HTTP 404."), True)
    if 300 <= status < 500 or status in NOT_DONE:
        # The SDK's message about a redirect contains its address.
        message = _message_of(error) if status >= 400 else ""
        return CallAttempt(_failed(f"The tool server refused the call: HTTP {status}. {message}"))
    if status >= 500 and error.code == types.INTERNAL_ERROR:
        return CallAttempt(_failed(f"The tool server answered with HTTP {status}.", unknown=True))
    if problem or (error.code == types.CONNECTION_CLOSED and error.message.startswith(LOST)):
        return CallAttempt(
            _failed(f"The tool server did not answer: {problem or 'the connection was lost'}.", unknown=True)
        )
    if error.message.startswith(NOT_UNDERSTOOD) or (status == 202 and ACCEPTED in error.message):
        return CallAttempt(_failed(INVALID_ANSWER, unknown=True))
    return CallAttempt(_failed(_message_of(error) or f"The tool server reported error {error.code}."))


def _message_of(error: MCPError) -> str:
    return cut(error.message, ERROR_BYTES)


def _failed(text: str, *, unknown: bool = False) -> ToolOutcome:
    return ToolOutcome(f"{text} {UNKNOWN}" if unknown else text.strip(), is_error=True, outcome_unknown=unknown)
