"""The engine: render, pick a backend, generate in steps, route.

One run is one loop over steps. A step is one generation on one backend; what it left behind decides the next one (see
`steps.py`). Until something was shown, a failing backend is replaced by the next deployment and nobody notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from unisono.core.conversation import Conversation
from unisono.core.events import Closed, Event, Finished, Repaired
from unisono.core.generation import (
    START,
    Capabilities,
    Chunk,
    FinishReason,
    Form,
    Generation,
    Prompt,
    Usage,
)
from unisono.core.ports import Deployment, Pool
from unisono.engine.memory import TurnMemory
from unisono.engine.steps import Answer, Done, next_step
from unisono.engine.stops import StopStrings
from unisono.engine.turn import Report, Run, Turn
from unisono.errors import BackendError, BackendProtocolError, BackendUnavailable, ContextTooLong, UnsupportedValue
from unisono.harmony.decode import decoder_for
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import Header
from unisono.harmony.render import Renderer
from unisono.harmony.router import HarmonyRouter
from unisono.harmony.tools import plan_tools

OFF_LOOP_CHARS = 8_000
"""Text not rendered before is encoded in a thread from this length on; about 2 ms of work."""

OFF_LOOP_ITEMS = 200
"""So many items are put together in a thread, however little of their text is new: a text backend's structure is
checked item by item, about 0.2 ms each."""

DEFAULT_CONTEXT = 131_072
"""gpt-oss's own window, for backends that do not tell theirs."""


class Engine:
    """Starts runs. Holds no state of its own but the bounded memory of stateless conversations."""

    def __init__(
        self,
        *,
        encoding: Encoding,
        renderer: Renderer,
        pool: Pool,
        memory: TurnMemory,
        new_call_id: Callable[[], str],
    ) -> None:
        self.encoding = encoding
        self.renderer = renderer
        self.pool = pool
        self.memory = memory
        self.new_call_id = new_call_id

    def start(self, turn: Turn) -> Run:
        return _Run(self, turn)


@dataclass(slots=True)
class _Rendered:
    """One step's prompt. `opening` is the header of the message it leaves open."""

    prompt: Prompt
    opening: Header | None
    opening_tokens: Sequence[int]


class _Run:
    def __init__(self, engine: Engine, turn: Turn) -> None:
        self.report = Report()
        self._engine = engine
        self._turn = turn
        self._tools = plan_tools(())
        self._conversation = turn.conversation
        self._batches: AsyncGenerator[list[Event]] | None = None
        self._shown = False
        self._closed: list[Closed] = []
        self._usage = Usage()

    def __aiter__(self) -> AsyncIterator[list[Event]]:
        self._batches = self._run()
        return self._batches

    async def aclose(self) -> None:
        if self._batches is not None:
            await self._batches.aclose()

    async def _run(self) -> AsyncGenerator[list[Event]]:
        turn, engine = self._turn, self._engine
        self._conversation = engine.memory.recall(turn.tenant, turn.conversation)
        if tools := turn.conversation.preamble.tools:
            # A schema may take half a second to read; other streams go on meanwhile.
            self._tools = await asyncio.to_thread(plan_tools, tools)
        deployments = engine.pool.choose(turn.model)
        for attempt, deployment in enumerate(deployments, start=1):
            self.report.backend = deployment.name
            held: list[Event] = []
            try:
                async with aclosing(self._answer(deployment)) as batches:
                    async for batch in batches:
                        if isinstance(batch[-1], Finished):
                            # Before the client sees the end: it may be gone, or asking again, right after.
                            engine.pool.succeeded(deployment)
                            engine.memory.record(turn.tenant, self._closed, opened=turn.conversation.prefill or "")
                        held += batch
                        if turn.whole or not (self._shown or any(map(_is_visible, batch))):
                            continue
                        self._shown = True
                        batch, held = held, []
                        yield batch
            except (BackendError, ContextTooLong) as error:
                elsewhere = not isinstance(error, BackendError) or error.retry_elsewhere
                if isinstance(error, BackendError) and elsewhere:
                    engine.pool.failed(deployment, error)
                if self._shown or not elsewhere or attempt == len(deployments):
                    raise
                self._begin_anew()
            else:
                if held:
                    yield held
                return
        raise BackendUnavailable(f"no backend serves {turn.model!r} right now")

    def _begin_anew(self) -> None:
        """Nothing was shown, so nothing of the failed attempt counts."""
        self.report.failovers += 1
        self.report.recoveries.clear()
        self._closed.clear()
        self._usage = Usage()

    async def _answer(self, deployment: Deployment) -> AsyncGenerator[list[Event]]:
        """The whole answer on one deployment, in as many steps as it takes."""
        turn = self._turn
        capabilities = await deployment.capabilities()
        if turn.sampling.logit_bias and not capabilities.logit_bias:
            raise UnsupportedValue("'logit_bias': the backend of this model cannot bias tokens.", param="logit_bias")
        router = self._router(capabilities)
        stops = StopStrings(turn.stop) if turn.stop else None
        conversation = self._conversation
        answer, step = Answer(), None
        while True:
            rendered = await self._render(conversation, capabilities)
            spent = router.usage.completion_tokens
            room = self._room(rendered.prompt, capabilities, spent, begun=step is not None)
            if step is not None:
                if room < 1:
                    yield [self._finished(router, FinishReason.LENGTH)]
                    return
                repaired = Repaired(step.rule, spent)
                self._note([repaired])
                yield [repaired]
            job = self._job(rendered.prompt, deployment, room)
            if answer.steps or rendered.opening is not None:
                router.resume(rendered.opening, rendered.opening_tokens)
            generated = self._generate(deployment, capabilities, job, router, rendered.opening)
            async with aclosing(generated) as batches:
                async for events, reason in batches:
                    shown = events if stops is None else stops.filter(events)
                    self._note(shown)
                    if stops is not None and stops.matched is not None:
                        yield [*shown, self._finished(router, FinishReason.STOP, stops.matched)]
                        return
                    if reason is None:
                        if shown:
                            yield shown
                        continue
                    answer = answer.after(reason, self._closed, cut_call=router.cut_call)
                    decided = next_step(answer)
                    if isinstance(decided, Done):
                        yield [*shown, self._finished(router, reason)]
                        return
                    if shown:
                        yield shown
                    step = decided
                    conversation = step.extend(self._conversation)

    def _router(self, capabilities: Capabilities) -> HarmonyRouter:
        return HarmonyRouter(
            self._engine.encoding,
            self._tools,
            self._engine.new_call_id,
            hold_calls=self._turn.hold_calls,
            calls_allowed=self._turn.calls_allowed,
            parallel_calls=self._turn.parallel_calls,
            canonical=capabilities.output is not Form.IDS,
        )

    async def _generate(
        self,
        deployment: Deployment,
        capabilities: Capabilities,
        job: Generation,
        router: HarmonyRouter,
        opening: Header | None,
    ) -> AsyncGenerator[tuple[list[Event], FinishReason | None]]:
        """One generation: events per network read; the last comes with the reason it ended."""
        decoder = decoder_for(capabilities.output, self._engine.encoding, opening)
        first = not self._usage.prompt_tokens
        if first:
            self._usage = Usage(prompt_tokens=len(job.prompt.tokens))
        stream = deployment.backend.complete(job)
        try:
            async for chunk in stream:
                events = router.feed(decoder.feed(chunk))
                if first:
                    self._count(chunk)
                if chunk.finish is None:
                    if events:
                        yield events, None
                    continue
                events += router.feed(decoder.end())
                if chunk.stop_token is not None:
                    events += router.feed([chunk.stop_token])
                events += router.end(chunk.finish, stop_hidden=not capabilities.stop_visible)
                yield events, chunk.finish
                return
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()
        raise BackendProtocolError("the backend ended its stream without saying why")

    async def _render(self, conversation: Conversation, capabilities: Capabilities) -> _Rendered:
        """Tokens, and text where the backend wants it. Much new text is encoded in a thread: the tokenizer releases
        the GIL, and other streams go on."""
        renderer = self._engine.renderer
        # Counting means hashing every message, so it is left out where the answer is known.
        many = len(conversation.items) > OFF_LOOP_ITEMS
        if many or renderer.cold_chars(conversation, self._tools) > OFF_LOOP_CHARS:
            return await asyncio.to_thread(self._rendered, conversation, capabilities)
        return self._rendered(conversation, capabilities)

    def _rendered(self, conversation: Conversation, capabilities: Capabilities) -> _Rendered:
        renderer, tools = self._engine.renderer, self._tools
        tokens = renderer.prompt(conversation, tools)
        text = renderer.text_prompt(conversation, tools) if capabilities.prompt is Form.TEXT else None
        if conversation.prefill is None:
            return _Rendered(Prompt(tokens, text), None, ())
        start = len(tokens) - 1 - tokens[::-1].index(START)
        return _Rendered(Prompt(tokens, text), Header(verbatim=True), tokens[start:])

    def _room(self, prompt: Prompt, capabilities: Capabilities, spent: int, *, begun: bool) -> int:
        """Tokens that may still be generated; below 1 only where the answer was `begun` by an earlier step.
        Raises ContextTooLong for a conversation that leaves no room for an answer."""
        context = capabilities.context or DEFAULT_CONTEXT
        room = context - len(prompt.tokens)
        if room < 1 and not begun:
            raise ContextTooLong(
                f"This model's maximum context length is {context} tokens, but the messages (and tools) resulted in "
                f"{len(prompt.tokens)} tokens. Please reduce their length.",
                param="messages",
            )
        return room if self._turn.max_tokens is None else min(room, self._turn.max_tokens - spent)

    def _job(self, prompt: Prompt, deployment: Deployment, room: int) -> Generation:
        return Generation(
            prompt=prompt,
            max_tokens=room,
            sampling=self._turn.sampling,
            timeouts=deployment.timeouts,
            request_id=self._turn.request_id,
        )

    def _count(self, chunk: Chunk) -> None:
        # The first step's prompt is what the client sent; later ones only repeat it.
        if chunk.cached_tokens is not None and not self._usage.cached_tokens:
            self._usage = replace(self._usage, cached_tokens=min(chunk.cached_tokens, self._usage.prompt_tokens))

    def _note(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Closed):
                self._closed.append(event)
            elif isinstance(event, Repaired) and event.rule not in self.report.recoveries:
                self.report.recoveries.append(event.rule)

    def _finished(self, router: HarmonyRouter, reason: FinishReason, stop: str | None = None) -> Finished:
        finished = router.finished(reason, stop)
        return replace(finished, usage=self._usage + finished.usage)


def _is_visible(event: Event) -> bool:
    """Whether a client sees anything of an event while the answer goes on."""
    return not isinstance(event, Repaired)
