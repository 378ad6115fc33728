"""Dependencies shared by all generations, and preparation of a request before rendering.

A prompt that was rendered to count its tokens stays in memory as long as its request, so the generation can reuse it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

from unisono.core.conversation import AnswerForm, Conversation, DeveloperMessage
from unisono.core.frozen import dataclass
from unisono.core.ports import Violation
from unisono.core.route_protocol import DeploymentPool
from unisono.core.tool_host import SEARCH_LABEL, LeftOutTool, ToolHost
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.interventions.refused_constraints import RefusedConstraints
from unisono.engine.prompt import RenderedPrompt, render
from unisono.engine.request import ForbiddenTools, GenerationReport, GenerationRequest, RequestKey, ServerTools
from unisono.engine.server_tools.loop import ToolLoop
from unisono.engine.server_tools.tools import (
    LEFT_OUT,
    OfferedServerTools,
    ServerOffer,
    decided_calls,
    notes_on_left_out,
    offers_in,
    with_results,
)
from unisono.engine.truncation import truncate_for
from unisono.errors import UnsupportedValue
from unisono.harmony.encoding import Encoding
from unisono.harmony.render import Renderer
from unisono.harmony.tool_declarations import NO_TOOLS, ToolSet, plan_tools


@dataclass(frozen=True, slots=True)
class PreparedConversation:
    """A request's conversation, ready to be rendered, and its tools under the model's names.

    `has_left_out`: some server tools could not be declared to the model. `left_out_tools` lists these tools by the
    label of their server. `hosted` are the server tools and `loop` runs them; both are None if the request has no
    server tools. `rendered` is the first prompt if it was already rendered to count its tokens, else None.
    """

    conversation: Conversation
    tools: ToolSet
    has_left_out: bool = False
    left_out_tools: Mapping[str, Sequence[LeftOutTool]] = field(default_factory=dict)
    hosted: OfferedServerTools | None = None
    loop: ToolLoop | None = None
    rendered: RenderedPrompt | None = None


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """Prompt that was rendered to count its tokens, with the request fields that determine it."""

    conversation: Conversation
    form: AnswerForm | None
    prepared: PreparedConversation


class CountedPrompts:
    """Table of counted prompts by request.

    A request and its modified copies share one entry. The entry disappears when neither the request nor a copy is in
    use.
    """

    def __init__(self) -> None:
        self._prompts: WeakKeyDictionary[RequestKey, CountedPrompt] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._prompts)

    def record(self, request: GenerationRequest, prepared: PreparedConversation) -> None:
        self._prompts[request.origin.key] = CountedPrompt(request.conversation, request.answer.form, prepared)

    def find(self, request: GenerationRequest) -> PreparedConversation | None:
        """Return the prepared conversation of a request whose prompt was counted.

        Returns None if the prompt was not counted, or if a hook later changed the conversation or the required answer
        format.
        """
        counted = self._prompts.get(request.origin.key)
        if (
            counted is None
            or counted.conversation is not request.conversation
            or counted.form is not request.answer.form
        ):
            return None
        return counted.prepared


NO_CALLS: Final = "Do not call any tool now. Answer the last message directly."

# Callback that logs the tools of one server that are not offered to the model; takes the server's label and the tools.
LeftOutLog: TypeAlias = Callable[[str, Sequence[LeftOutTool]], None]


@dataclass(frozen=True, slots=True)
class EngineDeps:
    """Dependencies of the engine's generations.

    `violation` returns a description of how a JSON text violates a schema. If `violation` is None, only the JSON syntax
    of answers is checked. If `tools` is None, the gateway runs no tools itself.
    """

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

    async def prepare(self, request: GenerationRequest, report: GenerationReport) -> PreparedConversation:
        """Prepare a request for its generation.

        If the request resumes a journal, the server tools are the tools that were offered when the journal was begun.
        Otherwise, the server tools are the tools that the servers offer now. The report lists tools that could not be
        declared. Raises UnsupportedValue if the request has server tools, but this gateway runs no tools.
        """
        loop = None if request.server_tools is None else self._tool_loop(request, report)
        if loop is None and (counted := self.counted_prompts.find(request)) is not None:
            return counted
        prepared = await self._prepared(request, loop, None if loop is None else offers_in(request.resumption.journal))
        if prepared.has_left_out:
            report.recoveries.append(LEFT_OUT)
        for server, left_out in prepared.left_out_tools.items():
            report.notes += notes_on_left_out(server, left_out)
            if left_out and self.log_left_out is not None:
                self.log_left_out(server, left_out)
        return prepared

    def restore(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with the items and the date that would be added for its first prompt."""
        counted, sent = self.counted_prompts.find(request), request.conversation.items
        conversation = self._recall(request)
        if request.server_tools is not None:
            # The results of denied calls, which contain the reasons of the user.
            _, denied = decided_calls(conversation, request.server_tools)
            conversation = with_results(conversation, denied)
        if conversation.items == sent:
            # Nothing was restored. The original objects show this to components that look for changes.
            conversation = replace(conversation, items=sent)
        restored = replace(request, conversation=conversation, prompt=replace(request.prompt, is_restored=True))
        if counted is not None and counted.conversation.items == conversation.items:
            self.counted_prompts.record(restored, counted)
        return restored

    def _recall(self, request: GenerationRequest) -> Conversation:
        if request.prompt.is_restored:
            return request.conversation
        return self.memory.recall(request.origin.tenant, request.conversation, dated=request.prompt.keeps_date)

    async def count(self, request: GenerationRequest, salt: str) -> int:
        """Return the number of tokens of the request's first prompt; `salt` is as for `render`."""
        loop = self._tool_loop(request, GenerationReport())
        prepared = await self._prepared(request, loop)
        window = request.prompt.counted_window
        if window is not None and request.prompt.truncate:
            conversation, tools = prepared.conversation, prepared.tools
            truncated = await truncate_for(request, self.renderer, conversation, tools, window, salt)
            return len(truncated.rendered.prompt.tokens)
        rendered = await render(self.renderer, prepared.conversation, prepared.tools, salt)
        if loop is None:
            counted = PreparedConversation(prepared.conversation, prepared.tools, rendered=rendered)
            self.counted_prompts.record(request, counted)
        return len(rendered.prompt.tokens)

    async def _prepared(
        self, request: GenerationRequest, loop: ToolLoop | None, offers: Sequence[ServerOffer] | None = None
    ) -> PreparedConversation:
        client = request.conversation.all_tools
        hosted = None
        if loop is not None:
            offers = await loop.offers() if offers is None else offers
            hosted = OfferedServerTools(request.server_tools or ServerTools(), offers, [tool.name for tool in client])
        conversation = self._recall(request)
        if request.answer.form is not None:
            conversation = replace(conversation, preamble=replace(conversation.preamble, form=request.answer.form))
        if client and not request.answer.calls_allowed:
            # A model that reads about tools plans a call, which then shows up in its reasoning instead of an answer.
            if request.answer.forbidden_tools is ForbiddenTools.REMOVE:
                client = ()
            elif request.answer.forbidden_tools is ForbiddenTools.NOTE:
                conversation = replace(conversation, items=(*conversation.items, DeveloperMessage(NO_CALLS)))
        at = (request.prompt.fields.tool, request.prompt.fields.tool_schema)
        # Reading a schema may take half a second; the thread lets other streams continue.
        if hosted is not None:
            tools, is_whole = await asyncio.to_thread(hosted.plan, client, *at)
            if hosted.builtins:
                preamble = replace(conversation.preamble, builtins=hosted.builtins)
                conversation = replace(conversation, preamble=preamble)
            if not_found_yet := hosted.not_found_yet(conversation):
                conversation = replace(conversation, deferred=(*conversation.deferred, *not_found_yet))
            return PreparedConversation(conversation, tools, not is_whole, hosted.left_out, hosted, loop)
        if not client:
            return PreparedConversation(conversation, NO_TOOLS)
        return PreparedConversation(
            conversation, await asyncio.to_thread(plan_tools, client, at=at[0], schema_field=at[1])
        )

    def _tool_loop(self, request: GenerationRequest, report: GenerationReport) -> ToolLoop | None:
        """Return the loop that runs the request's server tools, or None without server tools.

        Raises UnsupportedValue if the request has server tools, but this gateway runs no tools.
        """
        server_tools = request.server_tools
        if server_tools is None or not (server_tools.servers or server_tools.decisions):
            return None
        if self.tools is None and any(server.label != SEARCH_LABEL for server in server_tools.servers):
            raise UnsupportedValue(
                "This gateway runs no tools itself; remove the server tools.", param=request.prompt.fields.tools
            )
        is_complete = request.resumption.is_journal_complete
        return ToolLoop(self.tools, server_tools, report, request.origin.span, is_journal_complete=is_complete)
