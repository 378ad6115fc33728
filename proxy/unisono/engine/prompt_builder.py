"""Prompt builder: renders one prompt per step for all slots, and computes its token limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unisono.core.conversation import Conversation
from unisono.core.error_texts import OPENAI_PROMPT_TOO_LONG
from unisono.core.frozen import dataclass
from unisono.core.generation import DEFAULT_CONTEXT, NO_USAGE, Capabilities, Chunk, OutputForm, Prompt, Usage
from unisono.core.route_protocol import RouteRequirements, blocks_of
from unisono.engine.abilities import required_abilities
from unisono.engine.deps import PreparedConversation
from unisono.engine.prompt import RenderedPrompt, render, with_text
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.engine.steps import StepContext
from unisono.engine.truncation import truncate_for
from unisono.errors import ContextTooLong
from unisono.harmony.render import Renderer


@dataclass(frozen=True, slots=True)
class StepPrompt:
    """The rendered prompt of step `number`.

    `is_final_open`: the prompt ends with an open message on `final`. `with_text` is the same prompt with its text; None
    until a backend needs the text.
    """

    number: int
    is_final_open: bool
    rendered: RenderedPrompt
    with_text: RenderedPrompt | None = None


class PromptBuilder:
    """Builder of the prompts of one answer.

    `usage` contains the token counts of the prompts that are known so far.
    """

    def __init__(
        self, renderer: Renderer, request: GenerationRequest, prepared: PreparedConversation, report: GenerationReport
    ) -> None:
        self._renderer = renderer
        self._request = request
        self._tools = prepared.tools
        self._report = report
        self._original = self.conversation = prepared.conversation
        first = prepared.rendered
        self._current = None if first is None else StepPrompt(0, is_final_open=False, rendered=first)
        self._truncated_to = 0
        self.usage = NO_USAGE

    async def slot_requirements(
        self, context: StepContext, tail: Sequence[int], *, completed: int, wants: frozenset[str], resumes: bool
    ) -> RouteRequirements:
        """Return the requirements for a slot that continues the step after the tokens `tail`.

        `completed` is the number of tokens generated in the answer so far. `wants` are the constraint kinds that the
        backend should enforce. `resumes` is as in `RouteRequirements`.
        """
        request, rendered = self._request, (await self._step_prompt(context)).rendered
        # The tail changes the last block and adds blocks, so the hashes are computed again only if there is a tail.
        blocks: Sequence[int] = rendered.blocks
        if tail:
            blocks = blocks_of([*rendered.prompt.tokens, *tail], request.routing.cache_salt)
        wants |= required_abilities(request)
        limit = None if request.answer.max_tokens is None else max(request.answer.max_tokens - completed, 1)
        return RouteRequirements(len(rendered.prompt.tokens) + len(tail), blocks, limit, wants, resumes)

    async def prompt(self, context: StepContext, capabilities: Capabilities) -> RenderedPrompt:
        """Return the current step's prompt for a backend with these capabilities.

        The first call also counts the tokens of the answer's first prompt.
        """
        window = capabilities.context or DEFAULT_CONTEXT
        if self._request.prompt.truncate and window != self._truncated_to:
            await self._fit(window)
        current = await self._step_prompt(context)
        if not self.usage.prompt_tokens:
            await self._count_first(current, context)
        if capabilities.prompt is not OutputForm.TEXT:
            return current.rendered
        if current.with_text is not None:
            return current.with_text
        conversation = context.extended(self.conversation)
        text = await with_text(self._renderer, conversation, self._tools, current.rendered)
        self._current = replace(current, with_text=text)
        return text

    async def count_prompt(self, context: StepContext) -> Usage:
        """Return the usage of the prompts; renders the current prompt if no backend needed it yet."""
        current = await self._step_prompt(context)
        if not self.usage.prompt_tokens:
            await self._count_first(current, context)
        return self.usage

    async def _count_first(self, current: StepPrompt, context: StepContext) -> None:
        """Count the tokens of the answer's first prompt; `current` is the current step's prompt."""
        # After a journal, the current step may be a later one, whose prompt also contains generated tokens.
        first = current.rendered if not context.number else await self._render(self.conversation)
        tokens = len(first.prompt.tokens)
        self.usage = Usage(prompt_tokens=tokens, tool_output_tokens=self.usage.tool_output_tokens)
        self._report.facts.prompt_tokens = tokens

    async def has_room(self, context: StepContext, capabilities: Capabilities, completed: int) -> bool:
        """Return whether a step in this context could generate a token.

        `completed` is the number of tokens generated in the answer so far.
        """
        rendered = await self._render(context.extended(self.conversation))
        return self.room(rendered.prompt, capabilities, completed) > 0

    def room(self, prompt: Prompt, capabilities: Capabilities, spent: int) -> int:
        """Return how many tokens may still be generated after `prompt`; below 1 if no token fits.

        `spent` is the number of the answer's tokens that already count towards the request's `max_tokens`.
        """
        room = (capabilities.context or DEFAULT_CONTEXT) - len(prompt.tokens)
        return room if self._request.answer.max_tokens is None else min(room, self._request.answer.max_tokens - spent)

    def too_long(self, prompt: Prompt, capabilities: Capabilities) -> ContextTooLong:
        context = capabilities.context or DEFAULT_CONTEXT
        tokens = len(prompt.tokens)
        message = OPENAI_PROMPT_TOO_LONG.template.format(
            limit=context, subject="the messages (and tools)", tokens=tokens, length="their length"
        )
        return ContextTooLong(message, param=self._request.prompt.fields.conversation, tokens=tokens, limit=context)

    def record_cached(self, chunk: Chunk) -> None:
        """Record the number of cached tokens that the backend reports for the answer's first prompt."""
        # Later prompts repeat the first prompt, so their cached tokens are not counted.
        if chunk.cached_tokens is not None and not self.usage.cached_tokens:
            self.usage = replace(self.usage, cached_tokens=min(chunk.cached_tokens, self.usage.prompt_tokens))

    async def _step_prompt(self, context: StepContext) -> StepPrompt:
        current = self._current
        if current is None or (current.number, current.is_final_open) != (context.number, context.is_final_open):
            rendered = await self._render(context.extended(self.conversation))
            self._current = current = StepPrompt(context.number, context.is_final_open, rendered)
            if context.results:
                count = sum(len(self._renderer.item(result, self._tools)) for result in context.results)
                self.usage = replace(self.usage, tool_output_tokens=count)
                self._report.facts.tool_output_tokens = count
        return current

    async def _render(self, conversation: Conversation) -> RenderedPrompt:
        return await render(self._renderer, conversation, self._tools, self._request.routing.cache_salt)

    async def _fit(self, window: int) -> None:
        salt = self._request.routing.cache_salt
        truncated = await truncate_for(self._request, self._renderer, self._original, self._tools, window, salt)
        if truncated.conversation is not self.conversation:
            self.conversation, self._current = truncated.conversation, None
        self._truncated_to = window
        self._report.facts.left_out, self._report.facts.shortened = truncated.left_out, truncated.shortened
