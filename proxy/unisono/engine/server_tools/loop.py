"""Runner of server tools: lists the tools of servers, and makes each accepted call once.

Errors of a call are reported to the model, which continues. Cancelling the waiting task cancels the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Final

from unisono.core.events import Event
from unisono.core.observer import ToolDone, ToolEnd
from unisono.core.tool_arguments import ToolArguments
from unisono.core.tools import HostedTool, ToolHost, ToolOutcome, ToolServer
from unisono.core.trace_context import DOING, TraceContext, tool_span
from unisono.engine.output import OutputReader
from unisono.engine.request import GenerationReport, ServerTools
from unisono.engine.server_tools.calls import CallOutcome, PendingCall
from unisono.engine.server_tools.policy import NO_TIME_LEFT, NOT_REPEATED, OUTCOME_UNKNOWN
from unisono.engine.server_tools.tools import ServerOffer, ServerToolCall
from unisono.errors import InvalidRequest, ToolServerError, ToolServerNotAllowed, ToolServerTimeout

GRACE_S: Final = 2.0  # extra time after its deadline, for a tool host that exceeds it
OFF_LOOP_CHARACTERS: Final = 16 * 1024  # longer arguments of a call are parsed in a thread


class ToolLoop:
    """Server tools of one answer; the time limit begins at construction.

    Facts are added to `report`. Servers receive trace spans below `span`.
    """

    def __init__(
        self, host: ToolHost, hosting: ServerTools, report: GenerationReport, span: TraceContext | None = None
    ) -> None:
        self._host = host
        self._hosting = hosting
        self._report = report
        self._span = span
        self._deadline = asyncio.get_running_loop().time() + hosting.total_s

    async def offers(self) -> tuple[ServerOffer, ...]:
        """List the tools of all servers concurrently.

        Raises errors of the request, and errors of servers that are not optional.
        """
        asked = [self._offer(server) for server in self._hosting.servers]
        offers: list[ServerOffer] = []
        for came in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(came, BaseException):
                raise came
            offers.append(came)
        return tuple(offers)

    async def _offer(self, server: ToolServer) -> ServerOffer:
        until = min(self._deadline, asyncio.get_running_loop().time() + server.timeouts.list_s)
        try:
            async with asyncio.timeout_at(until + GRACE_S):
                listed = await self._host.list_tools(server, deadline=until)
        except TimeoutError:
            error: ToolServerError = ToolServerTimeout(f"The tool server {server.label!r} did not list its tools.")
        except ToolServerError as failure:
            error = failure
        except ToolServerNotAllowed as refused:
            if not server.at:
                raise
            # The address of the server is only resolved now.
            at = f"{server.at}.server_url"
            raise ToolServerNotAllowed(f"'{at}': {refused.message}", param=at) from None
        else:
            tools = tuple(replace(tool, server=server.label) for tool in listed.tools)
            return ServerOffer(server.label, tools, left_out=listed.left_out)
        if not self._hosting.optional:
            raise error
        return ServerOffer(server.label, error=error.message)

    async def batches(self, reading: OutputReader) -> AsyncGenerator[list[Event]]:
        """Run the current round of calls, or the rest of it.

        A call is made when the batch after the one that announces it is requested.
        """
        assert reading.round is not None
        if (calling := reading.round.calling) is not None:
            yield reading.ran(await self._told_late(reading, calling))
        while reading.round.calls:
            if len(reading.round.calls[0].arguments) > OFF_LOOP_CHARACTERS:
                await asyncio.to_thread(reading.round.read_next)
            yield reading.call(late=self._late())
            if (calling := reading.round.calling) is not None:
                # A call whose predecessors may be missing from the journal may itself be one that was already made.
                told = self._told if self._hosting.is_journal_complete else self._told_late
                yield reading.ran(await told(reading, calling))

    async def _told_late(self, reading: OutputReader, calling: PendingCall) -> CallOutcome:
        """Return the outcome of a call that an earlier stream may have made.

        Only idempotent tools are called again.
        """
        assert reading.round is not None
        tool = reading.round.tools.tool(calling.call.name)
        told = reading.round.told(calling)
        if told is not None or (tool is not None and tool.name in reading.round.tools.server(tool).idempotent):
            return await self._told(reading, calling)
        outcome = ToolOutcome(OUTCOME_UNKNOWN, is_error=True, outcome_unknown=True)
        return CallOutcome(outcome, OUTCOME_UNKNOWN, NOT_REPEATED)

    async def _told(self, reading: OutputReader, calling: PendingCall) -> CallOutcome:
        assert reading.round is not None
        if (told := reading.round.told(calling)) is not None:
            return told
        tool = reading.round.tools.tool(calling.call.name)
        assert tool is not None
        if calling.call.approval and self._hosting.take is not None:
            await self._hosting.take(calling.call.approval)
        outcome = await self._made(calling.call, reading.round.tools.server(tool), tool, calling.arguments)
        unknown = NOT_REPEATED if outcome.outcome_unknown else ""
        return CallOutcome(outcome, outcome.text, NO_TIME_LEFT if self._late() else unknown)

    async def _made(
        self, call: ServerToolCall, server: ToolServer, tool: HostedTool, arguments: ToolArguments
    ) -> ToolOutcome:
        facts, began_s, end = self._report.facts, self._report.now_s(), ToolEnd.LEFT
        below = DOING.set(None if self._span is None else self._span.child(tool_span(len(facts.tools))))
        try:
            async with asyncio.timeout_at(self._deadline + GRACE_S):
                outcome = await self._host.call(server, tool.name, arguments, deadline=self._deadline)
            end = ToolEnd.UNKNOWN if outcome.outcome_unknown else ToolEnd.ERROR if outcome.is_error else ToolEnd.OK
        except TimeoutError:
            outcome, end = ToolOutcome(OUTCOME_UNKNOWN, is_error=True, outcome_unknown=True), ToolEnd.UNKNOWN
        except (ToolServerNotAllowed, InvalidRequest, ToolServerError) as failure:
            outcome, end = ToolOutcome(failure.message, is_error=True), ToolEnd.ERROR
        finally:
            DOING.reset(below)
            facts.tools.append(ToolDone(server.label, tool.name, call.call_id, began_s, self._report.now_s(), end))
        return outcome

    def _late(self) -> bool:
        return asyncio.get_running_loop().time() >= self._deadline
