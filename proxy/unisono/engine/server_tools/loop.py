"""Runner of server tools: lists the tools of servers, and runs each accepted call once.

If a call fails, the model reads the error as the result and continues. Cancelling the task that waits for a call
cancels the call.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from unisono.core.observer import ToolDone, ToolEnd
from unisono.core.server_tool_arguments import ToolArguments
from unisono.core.tool_host import SEARCH_LABEL, HostedTool, ServerToolCall, ToolHost, ToolOutcome, ToolServer
from unisono.core.trace_context import DOING, TraceContext, tool_span
from unisono.engine.request import GenerationReport, ServerTools
from unisono.engine.server_tools.calls import CallOutcome, PendingCall, ToolRound
from unisono.engine.server_tools.tools import OfferedServerTools, ServerOffer
from unisono.errors import InvalidRequest, ToolServerError, ToolServerNotAllowed, ToolServerTimeout

DEADLINE_GRACE_S: Final = 2.0  # extra time before a tool host that exceeds its deadline is cancelled
OFF_LOOP_CHARS: Final = 16 * 1024  # longer arguments of a call are parsed in a thread


class ToolLoop:
    """Runner of the server tools of one answer; their time limit begins at construction.

    Each call is added to the facts of `report`. `span` is the parent of the trace spans that are sent to tool servers;
    None if the request is not traced. If `is_journal_complete` is False, only idempotent tools are called, because an
    earlier stream may have made the same calls.
    """

    def __init__(
        self,
        host: ToolHost | None,
        server_tools: ServerTools,
        report: GenerationReport,
        span: TraceContext | None = None,
        *,
        is_journal_complete: bool = True,
    ) -> None:
        self._host = host
        self._server_tools = server_tools
        self._is_journal_complete = is_journal_complete
        self._report = report
        self._span = span
        self._deadline = asyncio.get_running_loop().time() + server_tools.total_s

    async def offers(self) -> tuple[ServerOffer, ...]:
        """List the tools of all servers concurrently.

        Raises ToolServerNotAllowed if the address of a server is refused. Raises ToolServerError if a server cannot
        list its tools and `ServerTools.optional` is False.
        """
        listings = [self._offer(server) for server in self._server_tools.servers]
        offers: list[ServerOffer] = []
        for offer in await asyncio.gather(*listings, return_exceptions=True):
            if isinstance(offer, BaseException):
                raise offer
            offers.append(offer)
        return tuple(offers)

    async def _offer(self, server: ToolServer) -> ServerOffer:
        if (search := self._server_tools.search) is not None and server.label == SEARCH_LABEL:
            return ServerOffer(server.label, (search.tool,))
        assert self._host is not None
        until = min(self._deadline, asyncio.get_running_loop().time() + server.timeouts.list_s)
        try:
            async with asyncio.timeout_at(until + DEADLINE_GRACE_S):
                listed = await self._host.list_tools(server, deadline=until)
        except TimeoutError:
            error: ToolServerError = ToolServerTimeout(
                f"The tool server {server.label!r} did not list its tools before the time limit expired."
            )
        except ToolServerError as failure:
            error = failure
        except ToolServerNotAllowed as refused:
            if not server.at:
                raise
            # The address is resolved only now, so the request field could not be named before.
            raise ToolServerNotAllowed(f"'{server.at}': {refused.message}", param=server.at) from None
        else:
            tools = tuple(replace(tool, server=server.label) for tool in listed.tools)
            return ServerOffer(server.label, tools, left_out=listed.left_out)
        if not self._server_tools.optional:
            raise error
        return ServerOffer(server.label, error=error.message)

    async def parse_arguments(self, calls: ToolRound) -> ToolArguments:
        """Return the arguments of the next call; long arguments are parsed in a thread."""
        is_long = len(calls.calls[0].arguments) > OFF_LOOP_CHARS
        return await asyncio.to_thread(calls.parse_next) if is_long else calls.parse_next()

    async def run(self, calls: ToolRound, pending: PendingCall, *, is_possible_repeat: bool = False) -> CallOutcome:
        """Run a call of the round, unless the round refuses the call, and return the outcome.

        `is_possible_repeat` is True if an earlier stream may have run this call already. The call then runs only if the
        tool is idempotent; otherwise the outcome is unknown.
        """
        if (refused := calls.refusal(pending)) is not None:
            return refused
        tool = calls.tools.tool(pending.call.name)
        # If calls may be missing from the journal, this call may be one of them.
        is_possible_repeat = is_possible_repeat or not self._is_journal_complete
        if is_possible_repeat and (tool is None or tool.name not in calls.tools.server(tool).idempotent):
            return CallOutcome.unknown()
        assert tool is not None
        if pending.call.approval and self._server_tools.claim_approval is not None:
            await self._server_tools.claim_approval(pending.call.approval)
        outcome = await self._made(pending.call, calls.tools, tool, pending.arguments)
        return CallOutcome.of(outcome, is_late=self.is_late)

    async def _made(
        self, call: ServerToolCall, tools: OfferedServerTools, tool: HostedTool, arguments: ToolArguments
    ) -> ToolOutcome:
        facts, began_s, end = self._report.facts, self._report.now_s(), ToolEnd.LEFT
        below = DOING.set(None if self._span is None else self._span.child(tool_span(len(facts.tools))))
        try:
            async with asyncio.timeout_at(self._deadline + DEADLINE_GRACE_S):
                outcome = await self._outcome(call, tools, tool, arguments)
            end = ToolEnd.UNKNOWN if outcome.outcome_unknown else ToolEnd.ERROR if outcome.is_error else ToolEnd.OK
        except TimeoutError:
            outcome, end = CallOutcome.unknown().outcome, ToolEnd.UNKNOWN
        except (ToolServerNotAllowed, InvalidRequest, ToolServerError) as failure:
            outcome, end = ToolOutcome(failure.message, is_error=True), ToolEnd.ERROR
        finally:
            DOING.reset(below)
            facts.tools.append(ToolDone(tool.server, tool.name, call.call_id, began_s, self._report.now_s(), end))
        return outcome

    async def _outcome(
        self, call: ServerToolCall, tools: OfferedServerTools, tool: HostedTool, arguments: ToolArguments
    ) -> ToolOutcome:
        if (search := self._server_tools.search) is not None and tool.server == SEARCH_LABEL:
            # The search may compare the words of hundreds of tools. The thread lets other streams continue.
            return tools.with_servers_of_found(await asyncio.to_thread(search.run, arguments.members, tools.deferred))
        assert self._host is not None
        return await self._host.call(
            tools.server(tool),
            tool.name,
            arguments,
            deadline=self._deadline,
            answer=call.answer,
            can_ask=self._server_tools.can_ask,
        )

    @property
    def is_late(self) -> bool:
        """Return whether the time for tools has passed."""
        return asyncio.get_running_loop().time() >= self._deadline
