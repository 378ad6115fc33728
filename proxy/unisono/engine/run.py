"""One run: render, pick a backend, generate in steps, route.

A run is one loop over steps. A step is one generation on one backend, behind its prompt and what was said of it before;
what it left behind decides the next one (see `steps.py`), be it the calls of tools that the gateway runs itself. Until
something was shown, a failing backend is replaced by the next deployment and nobody notices; with tools, which are
never run twice, the next one goes on where it failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import TypeAlias

from unisono.core.conversation import Conversation
from unisono.core.events import Event, Finished, Repaired
from unisono.core.generation import Capabilities, Chunk, FinishReason, Generation, Prompt, Usage
from unisono.core.ids import DerivedIds
from unisono.core.ports import Deployment
from unisono.engine.hosted import HostedTools, offers_in, with_results
from unisono.engine.judging import LEFT_OUT
from unisono.engine.loop import ToolLoop
from unisono.engine.means import Means
from unisono.engine.policy import drawn_again
from unisono.engine.prompts import OFF_LOOP_TOKENS, Fitted, Rendered, fit, go_on, render
from unisono.engine.reading import Reading
from unisono.engine.round import Round
from unisono.engine.steps import OpenFinal, RunTools
from unisono.engine.turn import Report, Run, Turn
from unisono.errors import (
    BackendError,
    BackendProtocolError,
    BackendUnavailable,
    ConstraintRefused,
    ContextTooLong,
    UnsupportedValue,
)
from unisono.harmony.decode import Decoder
from unisono.harmony.tools import plan_tools

DEFAULT_CONTEXT = 131_072
"""gpt-oss's own window, for backends that do not tell theirs."""

ROOM_WANTED = 1_024
"""Tokens that an answer without a limit of its own is to have where turns may be left out for it."""


Generated: TypeAlias = AsyncGenerator[tuple[list[Event], FinishReason | None]]
"""What may be shown of a step, per network read; the last comes with the reason the step ended."""


class TurnRun(Run):
    """A turn in progress."""

    def __init__(self, means: Means, turn: Turn) -> None:
        self.report = Report()
        self._means = means
        self._turn = turn
        self._tools = plan_tools(())
        self._conversation = turn.conversation
        self._batches: AsyncGenerator[list[Event]] | None = None
        # A journal is read once for each attempt, to the same ids.
        self._seed = turn.seed or (means.new_call_id() if turn.journal else "")
        self._shown = False
        """Whether anything was shown beyond what the turn's journal says."""
        self._asked = False
        self._usage = Usage()
        self._refused: dict[str, frozenset[str]] = {}
        """Kinds of constraints that deployments refused in this run."""
        self._loop: ToolLoop | None = None
        self._hosted: HostedTools | None = None

    def __aiter__(self) -> AsyncIterator[list[Event]]:
        self._batches = self._run()
        return self._batches

    async def aclose(self) -> None:
        if self._batches is not None:
            await self._batches.aclose()

    async def _run(self) -> AsyncGenerator[list[Event]]:
        turn, means = self._turn, self._means
        await self._prepare()
        reading, known = await self._reading()
        if turn.journal:
            self._publish(reading)
            yield known
        held: list[Event] = []
        if self._loop is not None:
            async with aclosing(self._before(self._loop, reading)) as batches:
                async for batch in batches:
                    if turn.whole:
                        held += batch
                        continue
                    self._shown = True
                    self._publish(reading)
                    yield batch
        deployments = means.pool.choose(turn.model, turn.sticky)
        for attempt, deployment in enumerate(deployments, start=1):
            self.report.backend = deployment.name
            last = attempt == len(deployments)
            try:
                async with aclosing(self._answer(deployment, reading, last=last)) as batches:
                    async for batch in batches:
                        if isinstance(batch[-1], Finished):
                            # Before the client sees the end: it may be gone, or asking again, right after.
                            self._succeeded(deployment, reading)
                        held += batch
                        if turn.whole or not (self._shown or any(map(_is_visible, batch))):
                            continue
                        self._shown = True
                        if reading.journal is not self.report.journal:
                            self._publish(reading)
                        batch, held = held, []
                        yield batch
            except (BackendError, ContextTooLong) as error:
                if not self._may_go_elsewhere(deployment, error) or last:
                    raise
                self.report.failovers += 1
                if self._loop is None:
                    reading, held = await self._begun_anew(), []
            else:
                if held:
                    self._publish(reading)
                    yield held
                return
        raise BackendUnavailable(f"no backend serves {turn.model!r} right now")

    def _may_go_elsewhere(self, deployment: Deployment, error: BackendError | ContextTooLong) -> bool:
        """Whether another deployment may do better: by what is wrong, and by what was shown."""
        if isinstance(error, BackendError):
            if not error.retry_elsewhere:
                return False
            self._means.pool.failed(deployment, error)
        return not self._shown or self._loop is not None

    async def _prepare(self) -> None:
        """The conversation and its tools; hosted ones are those that are offered now or, behind a journal, were offered
        when it was begun."""
        turn, means = self._turn, self._means
        self._loop = means.loop(turn)
        if self._loop is not None:
            offers = offers_in(turn.journal)
            self._hosted = means.hosted(turn, await self._loop.offers() if offers is None else offers)
        prepared = await means.prepared(turn, self._hosted)
        self._conversation, self._tools = prepared.conversation, prepared.tools
        if prepared.left_out:
            self.report.recoveries.append(LEFT_OUT)

    async def _before(self, loop: ToolLoop, reading: Reading) -> AsyncGenerator[list[Event]]:
        """What there is to tell and to do before a backend is asked: the tools there are, calls that were approved, and
        those that an earlier run was about to make."""
        if not reading.journal and (listed := reading.list_tools()):
            yield listed
        async with aclosing(loop.batches(reading)) as batches:
            async for batch in batches:
                yield batch
        if reading.round is not None:
            self._conversation = with_results(self._conversation, reading.round.decided)

    async def _reading(self) -> tuple[Reading, list[Event]]:
        """An answer at its beginning, or behind the turn's journal, and what that says."""
        turn, means = self._turn, self._means
        new_call_id = means.new_call_id
        if self._seed:
            ids = DerivedIds(self._seed, "call")
            new_call_id = lambda: ids("call_")  # noqa: E731
        reading = Reading(
            means.encoding,
            self._tools,
            turn,
            new_call_id,
            self.report.recoveries,
            final=lambda: means.renderer.opening(replace(self._conversation, prefill="")),
            round_=None if self._hosted is None else Round(self._hosted, self._conversation),
            violation=means.violation,
        )
        if not turn.journal:
            return reading, []
        read_again = (turn.journal, means.renderer.opening(self._conversation))
        if len(turn.journal) > OFF_LOOP_TOKENS:
            return reading, await asyncio.to_thread(reading.read_again, *read_again)
        return reading, reading.read_again(*read_again)

    async def _begun_anew(self) -> Reading:
        """Nothing was shown, so nothing of the failed attempt counts."""
        self.report.recoveries.clear()
        self._usage = Usage()
        reading, _ = await self._reading()
        return reading

    def _publish(self, reading: Reading) -> None:
        """The tokens read so far are told with the batch that is yielded next. Once nothing can be taken back the
        journal grows by itself."""
        self.report.journal += reading.journal[len(self.report.journal) :]
        if self._shown:
            reading.journal = self.report.journal

    def _succeeded(self, deployment: Deployment, reading: Reading) -> None:
        if self._asked:
            self._means.pool.succeeded(deployment)
        self._means.memory.record(
            self._turn.tenant,
            reading.closed,
            opened=self._turn.conversation.prefill or "",
            results=reading.results_by_call if reading.round is not None else None,
        )

    async def _answer(self, deployment: Deployment, reading: Reading, *, last: bool) -> AsyncGenerator[list[Event]]:
        """What is left of the answer on one deployment, in as many steps as it takes."""
        capabilities = await deployment.capabilities()
        if self._turn.sampling.logit_bias and not capabilities.logit_bias:
            raise UnsupportedValue("'logit_bias': the backend of this model cannot bias tokens.", param="logit_bias")
        conversation, rendered = await self._first_prompt(capabilities, begun=reading.begun)
        if not reading.begun:
            reading.begin(rendered.opening)
        elif reading.steps:
            rendered = await self._next_prompt(reading.extended(conversation), reading, capabilities)
        while True:
            shown: list[Event] = []
            reason: FinishReason | None = None
            if reading.moves and (shown := reading.turn()):
                yield shown
            asked = (deployment, capabilities, reading, rendered, last)
            step = self._unrefused(*asked) if reading.constrains else await self._step(*asked)
            async with aclosing(step) as batches:
                async for shown, reason in batches:
                    if reason is not None or reading.stop_sequence is not None or reading.moves:
                        break
                    yield shown
            if reading.moves:
                # One batch: between its events there is no token that a journal could be cut at.
                if shown := [*shown, *reading.turn()]:
                    yield shown
                continue
            reason = reason or FinishReason.STOP
            if isinstance(reading.decided, RunTools) and self._loop is not None:
                if shown:
                    yield shown
                async with aclosing(self._loop.batches(reading)) as batches_of_tools:
                    async for batch in batches_of_tools:
                        yield batch
                shown = []
            elif isinstance(reading.decided, OpenFinal) and reading.stop_sequence is None:
                rendered = await self._next_prompt(reading.with_final_opened(conversation), reading, capabilities)
                if self._room(rendered.prompt, capabilities, reading.completed) < 1:
                    yield [*shown, self._finished(reading, FinishReason.LENGTH)]
                    return
                # One batch: between its events there is no token that a journal could be cut at.
                yield [*shown, *reading.go_on(reading.decided)]
                continue
            if reading.over:
                yield [*shown, self._finished(reading, reason)]
                return
            rendered = await self._next_prompt(reading.extended(conversation), reading, capabilities)

    async def _unrefused(
        self, deployment: Deployment, capabilities: Capabilities, reading: Reading, rendered: Rendered, last: bool
    ) -> Generated:
        """The current step, without the constraints that the backend refuses to keep to."""
        while True:
            try:
                async with aclosing(await self._step(deployment, capabilities, reading, rendered, last)) as batches:
                    async for batch in batches:
                        yield batch
            except ConstraintRefused:
                if reading.constraint is None:
                    raise
                refused = self._refused.get(deployment.name, frozenset())
                self._refused[deployment.name] = refused | {reading.constraint.kind}
            else:
                return

    async def _step(
        self, deployment: Deployment, capabilities: Capabilities, reading: Reading, rendered: Rendered, last: bool
    ) -> Generated:
        """The current step from where it is to its end. No backend is asked for one that has ended, or for which there
        is no room; without room here, and not the `last` deployment, raises ContextTooLong."""
        if reading.stop_sequence is not None or reading.handed_back:
            return _at_once([], FinishReason.STOP)
        if reading.ended:
            return _at_once(reading.end(FinishReason.STOP), FinishReason.STOP)
        if reading.broken_off:
            return _at_once(reading.end(FinishReason.LENGTH), FinishReason.LENGTH)
        said = reading.said
        going_on = await go_on(self._means.encoding, rendered, said, capabilities, guessed=reading.guessed)
        spent = reading.spent + going_on.said - reading.put
        room = self._room(going_on.prompt, capabilities, spent)
        if room < 1:
            limit = self._turn.max_tokens
            if not last and (limit is None or spent < limit):
                raise self._too_long(going_on.prompt, capabilities)
            return _at_once(reading.end(FinishReason.LENGTH), FinishReason.LENGTH)
        reading.came(capabilities, capabilities.constrain - self._refused.get(deployment.name, frozenset()))
        job = self._job(going_on.prompt, deployment, room, reading)
        first = not said and not reading.steps
        return self._generate(deployment, job, going_on.decoder, reading, first=first)

    async def _generate(
        self, deployment: Deployment, job: Generation, decoder: Decoder, reading: Reading, *, first: bool
    ) -> Generated:
        stream = deployment.backend.complete(job)
        self._asked = True
        try:
            async for chunk in stream:
                if first:
                    self._count(chunk)
                tokens = decoder.feed(chunk)
                if chunk.finish is None:
                    # Without a token nothing is shown: a journal could not tell that it was.
                    if tokens and ((shown := reading.feed(tokens)) or reading.moves):
                        yield shown, None
                    if reading.broken_off:
                        yield reading.end(FinishReason.LENGTH), FinishReason.LENGTH
                        return
                    continue
                stop = () if chunk.stop_token is None else (chunk.stop_token,)
                shown = reading.feed([*tokens, *decoder.end(), *stop])
                reason = FinishReason.LENGTH if reading.broken_off else chunk.finish
                yield shown if reading.moves else shown + reading.end(reason), reason
                return
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()
        raise BackendProtocolError("the backend ended its stream without saying why")

    async def _first_prompt(self, capabilities: Capabilities, *, begun: bool) -> tuple[Conversation, Rendered]:
        """The first step's, which is the one that is counted. Raises ContextTooLong for a conversation that leaves no
        room for an answer, unless that has begun."""
        turn, context = self._turn, capabilities.context or DEFAULT_CONTEXT
        if turn.truncate:
            wanted = min(turn.max_tokens or ROOM_WANTED, context // 4)
            renderer = self._means.renderer
            fitted = await fit(renderer, self._conversation, self._tools, capabilities.prompt, context - wanted)
        else:
            fitted = Fitted(self._conversation, await self._render(self._conversation, capabilities))
        prompt = fitted.rendered.prompt
        if len(prompt.tokens) >= context and not begun:
            raise self._too_long(prompt, capabilities)
        self.report.left_out = fitted.left_out
        self._usage = Usage(prompt_tokens=len(prompt.tokens))
        return fitted.conversation, fitted.rendered

    async def _next_prompt(self, conversation: Conversation, reading: Reading, capabilities: Capabilities) -> Rendered:
        """The prompt of a step behind others."""
        rendered = await self._render(conversation, capabilities)
        results = (self._means.renderer.item(result, self._tools) for result in reading.results)
        self._usage = replace(self._usage, tool_output_tokens=sum(map(len, results)))
        return rendered

    async def _render(self, conversation: Conversation, capabilities: Capabilities) -> Rendered:
        return await render(self._means.renderer, conversation, self._tools, capabilities.prompt)

    def _room(self, prompt: Prompt, capabilities: Capabilities, spent: int) -> int:
        """Tokens that may still be generated behind a prompt when `spent` are; below 1 for none."""
        room = (capabilities.context or DEFAULT_CONTEXT) - len(prompt.tokens)
        return room if self._turn.max_tokens is None else min(room, self._turn.max_tokens - spent)

    def _too_long(self, prompt: Prompt, capabilities: Capabilities) -> ContextTooLong:
        context = capabilities.context or DEFAULT_CONTEXT
        return ContextTooLong(
            f"This model's maximum context length is {context} tokens, but the messages (and tools) resulted in "
            f"{len(prompt.tokens)} tokens. Please reduce their length.",
            param=self._turn.history_at,
        )

    def _job(self, prompt: Prompt, deployment: Deployment, room: int, reading: Reading) -> Generation:
        return Generation(
            prompt=prompt,
            max_tokens=room,
            constraint=reading.constraint,
            sampling=drawn_again(self._turn.sampling, reading.again),
            timeouts=deployment.timeouts,
            request_id=self._turn.request_id,
        )

    def _count(self, chunk: Chunk) -> None:
        # The first step's prompt is what the client sent; later ones only repeat it.
        if chunk.cached_tokens is not None and not self._usage.cached_tokens:
            self._usage = replace(self._usage, cached_tokens=min(chunk.cached_tokens, self._usage.prompt_tokens))

    def _finished(self, reading: Reading, reason: FinishReason) -> Finished:
        finished = reading.finished(reason)
        self.report.unmet = reading.unmet
        return replace(finished, usage=self._usage + finished.usage)


async def _at_once(shown: list[Event], reason: FinishReason) -> Generated:
    yield shown, reason


def _is_visible(event: Event) -> bool:
    """Whether a client sees anything of an event while the answer goes on."""
    return not isinstance(event, Repaired)
