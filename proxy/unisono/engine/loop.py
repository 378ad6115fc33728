"""The tool loop's hands: asks servers for their tools, makes the calls that were decided on, and makes each of them
once.

What a call does wrong is told to the model, which goes on. Cancelling whoever waits here cancels the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Final

from unisono.core.events import Event
from unisono.core.tools import ToolHost, ToolOutcome, ToolServer
from unisono.engine.hosted import Offer
from unisono.engine.judging import NO_TIME_LEFT, NOT_REPEATED, OUTCOME_UNKNOWN, arguments_of
from unisono.engine.reading import Reading
from unisono.engine.round import Calling, Told
from unisono.engine.turn import Hosting
from unisono.errors import InvalidRequest, ToolServerError, ToolServerNotAllowed, ToolServerTimeout

GRACE_S: Final = 2.0
"""How much later than its deadline a host is given up that does not keep to it."""


class ToolLoop:
    """For one run; its time begins now."""

    def __init__(self, host: ToolHost, hosting: Hosting) -> None:
        self._host = host
        self._hosting = hosting
        self._deadline = asyncio.get_running_loop().time() + hosting.total_s

    async def offers(self) -> tuple[Offer, ...]:
        """What the servers offer, all asked at once. Raises what is wrong with the request, and what is wrong with a
        server that is not optional."""
        asked = [self._offer(server) for server in self._hosting.servers]
        offers: list[Offer] = []
        for came in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(came, BaseException):
                raise came
            offers.append(came)
        return tuple(offers)

    async def _offer(self, server: ToolServer) -> Offer:
        bound_s = server.timeouts.connect_s + server.timeouts.list_s
        until = min(self._deadline, asyncio.get_running_loop().time() + bound_s)
        try:
            async with asyncio.timeout_at(until + GRACE_S):
                listed = await self._host.list_tools(server, deadline=until)
        except TimeoutError:
            error: ToolServerError = ToolServerTimeout(f"The tool server {server.label!r} did not list its tools.")
        except ToolServerError as failure:
            error = failure
        else:
            return Offer(server.label, tuple(replace(tool, server=server.label) for tool in listed.tools))
        if not self._hosting.optional:
            raise error
        return Offer(server.label, error=error.message)

    async def batches(self, reading: Reading) -> AsyncGenerator[list[Event]]:
        """The round of tools that is to be run, or what is left of it. A call is made when the batch behind the one
        that shows it is asked for."""
        assert reading.round is not None
        if (calling := reading.round.calling) is not None:
            yield reading.ran(await self._told_late(reading, calling))
        while reading.round.calls:
            yield reading.call(late=self._late())
            if (calling := reading.round.calling) is not None:
                yield reading.ran(await self._told(reading, calling))

    async def _told_late(self, reading: Reading, calling: Calling) -> Told:
        """Of a call that an earlier run showed, and may have made."""
        assert reading.round is not None
        tool = reading.round.tools.tool(calling.call.name)
        told = reading.round.told(calling)
        if told is not None or (tool is not None and tool.name in reading.round.tools.server(tool).idempotent):
            return await self._told(reading, calling)
        outcome = ToolOutcome(OUTCOME_UNKNOWN, is_error=True, outcome_unknown=True)
        return Told(outcome, OUTCOME_UNKNOWN, NOT_REPEATED)

    async def _told(self, reading: Reading, calling: Calling) -> Told:
        assert reading.round is not None
        if (told := reading.round.told(calling)) is not None:
            return told
        tool = reading.round.tools.tool(calling.call.name)
        arguments = arguments_of(calling.call)
        assert tool is not None
        assert arguments is not None
        server = reading.round.tools.server(tool)
        try:
            async with asyncio.timeout_at(self._deadline + GRACE_S):
                outcome = await self._host.call(server, tool.name, arguments, deadline=self._deadline)
        except TimeoutError:
            outcome = ToolOutcome(OUTCOME_UNKNOWN, is_error=True, outcome_unknown=True)
        except (ToolServerNotAllowed, InvalidRequest, ToolServerError) as failure:
            outcome = ToolOutcome(failure.message, is_error=True)
        unknown = NOT_REPEATED if outcome.outcome_unknown else ""
        return Told(outcome, outcome.text, NO_TIME_LEFT if self._late() else unknown)

    def _late(self) -> bool:
        return asyncio.get_running_loop().time() >= self._deadline
