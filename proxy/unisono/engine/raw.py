"""Raw completion: sends a prompt as it is, and emits the generated text without parsing it.

Slots and failover work as for Harmony generations. If a deployment fails, the next one continues after the same tokens,
or after their text if it takes no token ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from unisono.core.context_window import OPENAI_PROMPT_TOO_LONG
from unisono.core.events import Event
from unisono.core.generation import Capabilities, CompletionJob, FinishReason, OutputForm, Prompt, Usage
from unisono.core.prefix_blocks import blocks_of
from unisono.core.route_protocol import RouteRequirements, Slot
from unisono.engine.attempt import AttemptTelemetry, Pauses, SlotSession, TokenCap, portions, received
from unisono.engine.deps import EngineDeps
from unisono.engine.failover import ENDS_EARLY, MAX_REGENERATIONS, Action, AttemptError, Progress
from unisono.engine.prompt import OFF_LOOP_CHARS, OFF_LOOP_TOKENS, recut
from unisono.engine.prompt_builder import DEFAULT_CONTEXT
from unisono.engine.raw_text import RawText
from unisono.engine.request import BatchStream, GenerationReport, GenerationRequest, RawPrompt
from unisono.errors import (
    BackendError,
    BackendProtocolError,
    CannotGoOn,
    ContextTooLong,
    InvalidRequest,
    UnsupportedValue,
)
from unisono.harmony.encoding import Encoding
from unisono.harmony.raw_codec import plain_decoder

UNSPELLED = "The backend of this model takes text, and no text is cut into just these ids; send the prompt as text."
STRIPPED = "The backend of this model shows no special tokens."


async def to_prompt(encoding: Encoding, raw: RawPrompt, param: str) -> list[int]:
    """Return the token ids of a prompt, encoded as by a model server.

    Raises InvalidRequest for text that cannot be tokenised.
    """
    if raw.text is None:
        return list(raw.tokens)
    try:
        if len(raw.text) > OFF_LOOP_CHARS:
            return await asyncio.to_thread(encoding.encode_as_server, raw.text)
        return encoding.encode_as_server(raw.text)
    except ValueError as error:
        raise InvalidRequest("The prompt cannot be tokenised.", param=param) from error


class RawGeneration(BatchStream):
    """A raw completion in progress."""

    def __init__(self, means: EngineDeps, turn: GenerationRequest, raw: RawPrompt) -> None:
        self.report = GenerationReport()
        self._means = means
        self._turn = turn
        self._raw = raw
        self._prompt: list[int] = []
        self._said = RawText(means.encoding, raw, turn.stop)
        self._guessed = False  # some tokens were made from text
        self._shown = False
        self._held: list[Event] = []  # events that were not emitted yet
        self._lost = 0  # generated tokens that are not part of the answer
        self._cached = 0
        self._regenerations = 0  # number of regenerations because no backend could continue the text

    async def _each(self) -> AsyncGenerator[list[Event]]:
        places = SlotSession(self._means.pool, self._turn, self.report)
        self._prompt = await to_prompt(self._means.encoding, self._raw, self._turn.history_at)
        try:
            while self._said.ended is None:
                try:
                    async with aclosing(self._generated(places)) as batches:
                        async for batch in batches:
                            if shown := self._showing(batch):
                                yield shown
                except (BackendError, ContextTooLong) as error:
                    await self._after(error, places)
            places.let_go()
        finally:
            places.release()
        self._publish()
        rest = self._said.end(FinishReason.STOP)
        yield [*self._held, *rest, *self._said.finished(await self._usage())]

    def _showing(self, batch: list[Event]) -> list[Event]:
        """Return the events to emit after another batch, including the buffered ones."""
        self._held += batch
        if self._turn.whole or not batch:
            return []
        self._shown = True
        self._publish()
        shown, self._held = self._held, []
        return shown

    def _publish(self) -> None:
        """Publish the tokens so far in the report, for the batch that is yielded next."""
        self.report.journal += self._said.tokens[len(self.report.journal) :]

    async def _usage(self) -> Usage:
        tokens = self._said.tokens
        made = len(await asyncio.to_thread(recut, self._means.encoding, tokens)) if self._guessed else len(tokens)
        cached = min(self._cached, len(self._prompt))
        return Usage(prompt_tokens=len(self._prompt), completion_tokens=made + self._lost, cached_tokens=cached)

    async def _after(self, error: AttemptError, places: SlotSession) -> None:
        """Carry out the failover policy's action for a failed attempt.

        Raises the error if the request ends.
        """
        said = self._said
        if isinstance(error, CannotGoOn) and not said.tokens and not places.elsewhere:
            places.fail(error)
            raise UnsupportedValue(UNSPELLED, param=self._turn.history_at) from error
        action = await places.recover(
            error,
            self._progress(),
            resumable=self._turn.failover,
            regenerable=self._regenerations < MAX_REGENERATIONS and not self._shown,
        )
        match action:
            case Action.STOP if said.ended is None:
                self._held += said.end(FinishReason.LENGTH)
                self.report.notes.append(ENDS_EARLY)
            case Action.RESUME:
                self._lost += said.forget_unfinished()
            case Action.RESTART | Action.RETRY:
                self._regenerations += places.taken
                places.release()
                self._begin_anew()

    def _progress(self) -> Progress:
        if self._said.ended is not None:
            return Progress.COMPLETE
        if self._shown:
            return Progress.SEEN
        return Progress.UNSEEN if self._said.tokens else Progress.NOTHING

    def _begin_anew(self) -> None:
        """Start over, and count the tokens of the failed attempt as lost; nothing was emitted."""
        self._lost += len(self._said.tokens) + self._said.forget_unfinished()
        self._held, self._guessed = [], False
        self._said = RawText(self._means.encoding, self._raw, self._turn.stop)

    # -- one generation

    async def _generated(self, places: SlotSession) -> AsyncGenerator[list[Event]]:
        turn, said = self._turn, self._said
        tokens = await self._exact()
        behind = [*self._prompt, *tokens]
        left = (turn.max_tokens or DEFAULT_CONTEXT) - len(tokens)
        if left < 1:
            yield said.end(FinishReason.LENGTH)
            return
        wants = frozenset({"logit_bias"} if turn.sampling.logit_bias else ())
        blocks = blocks_of(behind, turn.cache_salt)
        place = await places.place_for(RouteRequirements(len(behind), blocks, left, wants, bool(said.tokens)))
        able = place.capabilities
        if turn.sampling.logit_bias and not able.logit_bias:
            raise UnsupportedValue("'logit_bias': the backend of this model cannot bias tokens.", param="logit_bias")
        room = (able.context or DEFAULT_CONTEXT) - len(behind)
        if room < 1:
            limit = able.context or DEFAULT_CONTEXT
            message = OPENAI_PROMPT_TOO_LONG.template.format(
                limit=limit, subject="the prompt", tokens=len(behind), length="its length"
            )
            raise ContextTooLong(message, param=turn.history_at, tokens=len(behind), limit=limit)
        self.report.unmet = STRIPPED if able.output is OutputForm.MARKERLESS and not self._raw.hides_special else ""
        prompt = await self._prompt_for(able, behind, tokens)
        job = CompletionJob(
            prompt=prompt,
            max_tokens=min(left, room),
            sampling=turn.sampling,
            timeouts=places.timeouts(place),
            request_id=turn.request_id,
            cache_salt=turn.cache_salt,
            trace=places.span(0),
        )
        async with aclosing(self._read(places, place, job)) as batches:
            async for batch in batches:
                yield batch

    async def _exact(self) -> list[int]:
        """Return the tokens so far, cut as by the model's own tokenizer."""
        tokens = self._said.tokens
        if not self._guessed:
            return list(tokens)
        if len(tokens) > OFF_LOOP_TOKENS:
            return await asyncio.to_thread(recut, self._means.encoding, tokens)
        return recut(self._means.encoding, tokens)

    async def _prompt_for(self, able: Capabilities, behind: list[int], said: list[int]) -> Prompt:
        """Return the prompt for a backend of these capabilities.

        Raises CannotGoOn if its text would be encoded to other tokens.
        """
        if able.prompt is not OutputForm.TEXT:
            return Prompt(behind)
        return Prompt(behind, await asyncio.to_thread(self._spelled, behind, said))

    def _spelled(self, behind: list[int], said: list[int]) -> str:
        encoding, raw = self._means.encoding, self._raw
        if raw.text is not None and not said:
            return raw.text
        try:
            text = encoding.decode(self._prompt) if raw.text is None else raw.text
            if raw.text is None and encoding.encode_as_server(text) != self._prompt:
                raise CannotGoOn(UNSPELLED)
            text += encoding.decode(said)
            same = Encoding.special_ids(encoding.encode_as_server(text)) == Encoding.special_ids(behind)
        except ValueError:
            same = False
        if not same:
            raise CannotGoOn("What was generated so far spells special tokens: no backend that takes text can go on.")
        return text

    async def _read(self, places: SlotSession, place: Slot, job: CompletionJob) -> AsyncGenerator[list[Event]]:
        """Yield the events to emit for one generation, per network read."""
        said, able, name = self._said, place.capabilities, place.deployment.name
        decoder = plain_decoder(able.output, self._means.encoding)
        self._guessed = self._guessed or able.output is not OutputForm.IDS
        limit = TokenCap(self._means.encoding, job.max_tokens, guessed=able.output is not OutputForm.IDS)
        pauses = Pauses()
        told = AttemptTelemetry(self.report, self._turn, name, job, 0)
        stream = place.deployment.backend.complete(job)
        places.asked()
        waits = True
        async with told.reading(stream, place):
            async for chunk in stream:
                if waits and (chunk.tokens or chunk.text):
                    waits = False
                    place.began()
                if chunk.cached_tokens is not None and not self._cached:
                    self._cached = chunk.cached_tokens
                tokens, finish = await received(chunk, limit, decoder, told)
                shown: list[Event] = []
                for portion in portions(tokens):
                    if shown:
                        yield shown
                    await pauses.before(portion)
                    shown = said.feed(portion)
                yield shown if finish is None else [*shown, *said.end(finish)]
                # After a stop token, the backend still reports its counts.
                if finish is not None or said.broken_off:
                    return
            raise BackendProtocolError("the backend ended its stream without saying why")
