"""Step runner: runs each step of an answer as one generation on a slot.

A generation continues the step's prompt and the step's tokens so far, on whichever deployment generated them.

At the end of a message it is checked, encoded again and emitted, in time proportional to its length. Long messages are
processed in a thread, so that other streams continue. Short ones are processed on the event loop, since a thread would
cost more than the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeAlias, TypeVar

from unisono.core.events import Event
from unisono.core.generation import FIRST_SPECIAL, Capabilities, CompletionJob, Constraint, FinishReason, OutputForm
from unisono.core.observer import RefusedConstraint
from unisono.core.route_protocol import Slot
from unisono.engine.attempt import (
    LONG_MESSAGE_TOKENS,
    AttemptTelemetry,
    Pauses,
    SlotSession,
    TokenCap,
    portions,
    received,
)
from unisono.engine.deps import EngineDeps
from unisono.engine.output import OutputReader
from unisono.engine.prompt import ContinuedPrompt, go_on
from unisono.engine.prompt_builder import PromptBuilder
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.errors import BackendError, BackendProtocolError, ConstraintRefused, UnisonoError, UnsupportedValue
from unisono.harmony.decode import Decoder

T = TypeVar("T")


Generated: TypeAlias = AsyncGenerator[tuple[list[Event], FinishReason | None]]
"""Events to emit per network read; the last item includes the reason that the step ended."""


class StepRunner(SlotSession):
    """Runs the steps of one answer.

    `shown` is set once output was emitted to the client.
    """

    def __init__(self, means: EngineDeps, turn: GenerationRequest, report: GenerationReport) -> None:
        super().__init__(means.pool, turn, report)
        self._means = means
        self._known = means.refused_constraints
        self._refused: dict[str, frozenset[str]] = {}  # constraint kinds that deployments rejected during this answer
        # The failure for which the constraint was left out; None once the backend generated a token without it.
        self._blamed: ConstraintRefused | None = None
        self._moved = bool(turn.journal)  # the step's tokens so far come from another deployment or a journal
        self.shown = False
        self.full = False  # no context window has room for another token

    async def take(self, asking: PromptBuilder, reading: OutputReader) -> Slot:
        """Return the held slot, or acquire the next one.

        Raises the error if none is available.
        """
        if self._place is not None:
            return self._place
        completed = reading.completed
        resumes = self.shown or completed > 0
        return await self.place_for(
            await asking.demand(
                reading.context, reading.said, completed=completed, wants=reading.wants, resumes=resumes
            )
        )

    def fail(self, error: UnisonoError, *, moves: bool = False) -> None:
        super().fail(error, moves=moves)
        self._moved = True

    def begin_anew(self) -> None:
        """Reset to the state in which only the request's journal was generated."""
        self._moved = bool(self._turn.journal)

    async def step(self, asking: PromptBuilder, reading: OutputReader) -> Generated:
        """Run the current step from its current state to its end.

        No backend is used for a step that has ended or has no room. Raises ContextTooLong if another deployment may
        have room.
        """
        if reading.stop_sequence is not None or reading.handed_back:
            return _at_once([], FinishReason.STOP)
        if reading.ended:
            return _at_end(reading, FinishReason.STOP)
        if reading.broken_off or self.full:
            return _at_end(reading, FinishReason.LENGTH)
        place = await self.take(asking, reading)
        if reading.plan.current.constraint is not None:
            return self._unrefused(place, asking, reading)
        return await self._generation(place, asking, reading)

    async def _unrefused(self, place: Slot, asking: PromptBuilder, reading: OutputReader) -> Generated:
        """Run a generation, and repeat it without the constraint if the backend fails on it."""
        self._blamed = None
        while True:
            try:
                async with aclosing(await self._generation(place, asking, reading)) as batches:
                    async for batch in batches:
                        yield batch
            except ConstraintRefused as error:
                if reading.constraint is None:
                    raise
                self._blamed = error
                self._known.refused(*self._at(place), reading.constraint, error.symptom)
                self._do_without(place, reading.constraint, error.symptom or "rejected")
            except BackendError as error:
                wanted = reading.plan.current.constraint
                if self._blamed is not None and wanted is not None:
                    self._known.failed_without(*self._at(place), wanted, self._blamed.symptom, error)
                raise
            else:
                return

    def _at(self, place: Slot) -> tuple[str, str]:
        """Return the model and the name of a deployment."""
        return self._report.served_model or self._turn.model, place.deployment.name

    def _able(self, place: Slot, wanted: Constraint | None) -> frozenset[str]:
        """Return the constraint kinds that the slot's backend has to enforce."""
        able = place.capabilities.constrain - self._refused.get(place.deployment.name, frozenset())
        if wanted is None or wanted.kind not in able or not self._known.refuses(*self._at(place), wanted):
            return able
        self._do_without(place, wanted, "remembered")
        return able - {wanted.kind}

    def _do_without(self, place: Slot, constraint: Constraint, reason: str) -> None:
        """Leave out constraints of this kind on this deployment for the rest of the answer.

        The controller validates the output, as for a backend that cannot enforce constraints.
        """
        name, kind = place.deployment.name, constraint.kind
        self._refused[name] = self._refused.get(name, frozenset()) | {kind}
        self._report.facts.refused_constraints.append(RefusedConstraint(name, reason))
        note = f"The backend did not generate under the constraint ({kind}). The output was validated afterwards."
        if note not in self._report.notes:
            self._report.notes.append(note)

    async def _generation(self, place: Slot, asking: PromptBuilder, reading: OutputReader) -> Generated:
        capabilities = place.capabilities
        if self._turn.sampling.logit_bias and not capabilities.logit_bias:
            raise UnsupportedValue("'logit_bias': the backend of this model cannot bias tokens.", param="logit_bias")
        rendered = await asking.prompt(reading.context, capabilities)
        if not reading.begun:
            reading.begin(rendered.opening)
        able = self._able(place, reading.plan.current.constraint)
        if self._moved:
            reading.take_up(able)
        said = reading.said
        how = {"guessed": reading.guessed, "moved": self._moved, "naming": reading.plan.naming}
        behind = await go_on(self._means.encoding, rendered, said, capabilities, **how)
        room = self._room(asking, behind, capabilities, reading)
        if room < 1:
            return _at_end(reading, FinishReason.LENGTH)
        self._moved = False
        reading.came(capabilities, able)
        job = self._job(behind, place, room, reading)
        first = asking if not said and not reading.steps else None
        return self._read(place, job, behind.decoder, reading, first)

    def _room(
        self, asking: PromptBuilder, behind: ContinuedPrompt, capabilities: Capabilities, reading: OutputReader
    ) -> int:
        """Return the number of tokens that may be generated.

        Raises ContextTooLong if there is no room here, and either nothing was generated yet or another deployment may
        have room.
        """
        spent = reading.spent + behind.said - reading.put
        room = asking.room(behind.prompt, capabilities, spent)
        limit = self._turn.max_tokens
        if room < 1 and (not reading.completed or (self.elsewhere and (limit is None or spent < limit))):
            raise asking.too_long(behind.prompt, capabilities)
        return room

    def _job(self, behind: ContinuedPrompt, place: Slot, room: int, reading: OutputReader) -> CompletionJob:
        return CompletionJob(
            prompt=behind.prompt,
            max_tokens=room,
            constraint=reading.constraint,
            sampling=reading.sampling(self._turn.sampling),
            timeouts=self.timeouts(place),
            request_id=self._turn.request_id,
            cache_salt=self._turn.cache_salt,
            trace=self.span(reading.steps),
        )

    async def _read(
        self, place: Slot, job: CompletionJob, decoder: Decoder, reading: OutputReader, first: PromptBuilder | None
    ) -> Generated:
        deployment = place.deployment
        stream = deployment.backend.complete(job)
        self.asked()
        waits = True
        told = AttemptTelemetry(self._report, self._turn, deployment.name, job, reading.steps)
        limit = TokenCap(self._means.encoding, job.max_tokens, guessed=place.capabilities.output is not OutputForm.IDS)
        feeder = Feeder(reading)
        async with told.reading(stream, place):
            async for chunk in stream:
                if waits and (chunk.tokens or chunk.text):
                    waits = False
                    place.began()
                    self._blamed = None
                    if job.constraint is not None:
                        self._known.kept(*self._at(place), job.constraint)
                if first is not None:
                    first.count(chunk)
                tokens, finish = await received(chunk, limit, decoder, told)
                # A read without a token emits nothing, since the journal could not record it.
                shown: list[Event] = []
                for portion in portions(tokens):
                    if shown and not (reading.moves or reading.complete):
                        yield shown, None
                        shown = []
                    shown += await feeder.feed(portion)
                if reading.broken_off:
                    finish = FinishReason.LENGTH
                if finish is not None:
                    ended = [] if reading.moves else await settled(reading, partial(reading.end, finish))
                    yield shown + ended, finish
                    return
                if shown or reading.moves:
                    yield shown, None
            raise BackendProtocolError("the backend ended its stream without saying why")


async def _at_end(reading: OutputReader, reason: FinishReason) -> Generated:
    yield await settled(reading, partial(reading.end, reason)), reason


async def _at_once(shown: list[Event], reason: FinishReason) -> Generated:
    yield shown, reason


class Feeder:
    """Feeds portions of a generation to `reading`, with pauses."""

    def __init__(self, reading: OutputReader) -> None:
        self._reading = reading
        self._pauses = Pauses()

    async def feed(self, portion: Sequence[int]) -> list[Event]:
        """Return the events of some more tokens."""
        await self._pauses.before(portion)
        reading = self._reading
        if reading.unsettled > LONG_MESSAGE_TOKENS and max(portion, default=0) >= FIRST_SPECIAL:
            return await settled(reading, lambda: reading.feed(portion))
        return reading.feed(portion)


async def settled(reading: OutputReader, work: Callable[[], T]) -> T:
    """Run `work`, which may settle the open message of `reading`.

    It runs in a thread if that message is long.
    """
    return await in_thread(reading, work) if reading.unsettled > LONG_MESSAGE_TOKENS else work()


async def in_thread(reading: OutputReader, work: Callable[[], T]) -> T:
    """Run `work` on `reading` in a thread."""
    # The thread continues when its caller is cancelled. It must not change a report that was already sent.
    with reading.apart():
        return await asyncio.to_thread(work)
