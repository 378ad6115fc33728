"""Dependencies shared by all generations, and preparation of a request before rendering."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from unisono.core.conversation import DeveloperMessage
from unisono.core.route_protocol import DeploymentPool
from unisono.core.tools import LeftOutTool, ToolHost
from unisono.engine.counted import CountedPrompts, PreparedPrompt
from unisono.engine.hosted import OfferedServerTools, ServerOffer
from unisono.engine.loop import ToolLoop
from unisono.engine.memory import ConversationCache
from unisono.engine.refused_constraints import RefusedConstraints
from unisono.engine.turn import ForbiddenTools, GenerationReport, GenerationRequest, ServerTools
from unisono.engine.wishes import Violation
from unisono.errors import UnsupportedValue
from unisono.harmony.encoding import Encoding
from unisono.harmony.render import Renderer
from unisono.harmony.tools import plan_tools

NO_CALLS: Final = "Do not call any tool now. Answer the last message directly."

LeftOutLog: TypeAlias = Callable[[str, Sequence[LeftOutTool]], None]
"""Callback that logs the tools of a server that the model is not offered."""


@dataclass(frozen=True, slots=True)
class EngineDeps:
    """Dependencies of the engine's generations."""

    encoding: Encoding
    renderer: Renderer
    pool: DeploymentPool
    memory: ConversationCache
    new_call_id: Callable[[], str]
    tools: ToolHost | None = None
    violation: Violation | None = None
    log_left_out: LeftOutLog | None = None
    refused_constraints: RefusedConstraints = field(default_factory=RefusedConstraints)
    counted_prompts: CountedPrompts = field(default_factory=CountedPrompts)

    async def prepared(self, turn: GenerationRequest, hosted: OfferedServerTools | None) -> PreparedPrompt:
        """Return the conversation to render and the declared tools."""
        conversation = self.memory.recall(turn.tenant, turn.conversation, dated=turn.dated)
        if turn.form is not None:
            conversation = replace(conversation, preamble=replace(conversation.preamble, form=turn.form))
        client, at = turn.conversation.preamble.tools, (turn.tools_at, turn.schema_field)
        if client and not turn.calls_allowed:
            # A model that reads about tools plans a call, which then shows up in its reasoning instead of an answer.
            if turn.forbidden_tools is ForbiddenTools.REMOVE:
                client = ()
            elif turn.forbidden_tools is ForbiddenTools.NOTE:
                conversation = replace(conversation, items=(*conversation.items, DeveloperMessage(NO_CALLS)))
        # Reading a schema may take half a second; the thread lets other streams continue.
        if hosted is not None:
            tools, whole = await asyncio.to_thread(hosted.plan, client, *at)
            if hosted.builtins:
                preamble = replace(conversation.preamble, builtins=hosted.builtins)
                conversation = replace(conversation, preamble=preamble)
            return PreparedPrompt(conversation, tools, left_out=not whole, left_out_tools=hosted.left_out)
        if not client:
            return PreparedPrompt(conversation, plan_tools(()))
        return PreparedPrompt(conversation, await asyncio.to_thread(plan_tools, client, at=at[0], schema_field=at[1]))

    def loop(self, turn: GenerationRequest, report: GenerationReport) -> ToolLoop | None:
        """Return the runner of the request's server tools, or None if it has none.

        Raises UnsupportedValue if the gateway runs no tools.
        """
        hosting = turn.hosting
        if hosting is None or not (hosting.servers or hosting.decisions):
            return None
        if self.tools is None:
            raise UnsupportedValue("This gateway runs no tools itself.", param="tools")
        return ToolLoop(self.tools, hosting, report, turn.span)

    def hosted(self, turn: GenerationRequest, offers: Sequence[ServerOffer]) -> OfferedServerTools:
        """Return the server tools of a request, as offered by their servers."""
        return OfferedServerTools(
            turn.hosting or ServerTools(), offers, [tool.name for tool in turn.conversation.preamble.tools]
        )
