"""Turns that hooks are asked about: before they are rendered, and when all is generated and the end is not told yet.

Part of the composition root: no surface and nothing of the engine knows of it. It stands inside of what counts turns,
so that nobody over a limit reaches a hook and a refused turn has used no tokens. What hooks changed is noted at the
beginning of the turn's journal: whoever goes on with a response asks none of them twice, and the model reads on in what
it read before.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

import orjson

from unisono.core.conversation import Json
from unisono.core.events import Closed, Event, Finished
from unisono.core.hooks import Annotation, Answer, Changes, Hook, Request
from unisono.core.passthrough_request import AnswerMode, PassthroughRequest
from unisono.engine.journal import noted_in
from unisono.engine.turn import BatchStream, GenerationReport, GenerationRequest, GenerationService, GenerationStream
from unisono.errors import HookFailed, Refused
from unisono.middleware.hook_changes import changed, from_note, to_note

LONGEST: Final = 10_000
"""Characters of what one hook says beside an answer, as JSON."""

FAULTS: Final = (Exception, SystemExit, KeyboardInterrupt)
"""What a hook raises when it fails. One that means to end the process would end everybody's streams; a real Ctrl-C is a
signal that the server hears, and is raised nowhere."""

T = TypeVar("T")

Failed: TypeAlias = Callable[[str, str], None]
"""Told of each call of a hook that failed: the hook's name, and `before` or `after`."""

log = logging.getLogger("unisono.hooks")


@dataclass(frozen=True, slots=True)
class NamedHook:
    """A hook with what the configuration says of it. One that fails `open` is gone on without."""

    name: str
    hook: Hook
    timeout_s: float = 5.0
    open: bool = False
    failed: Failed | None = None

    async def ask(self, call: str, request_id: str, answering: Awaitable[T]) -> T | None:
        """What it says within its time; None too where it fails and is gone on without. Raises `Refused`, and
        `HookFailed` where it has to be asked."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await answering
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Something it waited for was cancelled, and not the turn.
            failure: BaseException = error
        except Refused as refusal:
            if 400 <= refusal.status < 500:
                raise
            failure = refusal
        except FAULTS as error:
            failure = error
        about = {"hook": self.name, "call": call, "request_id": request_id, "fail": "open" if self.open else "closed"}
        log.error("a hook failed", extra=about, exc_info=failure)
        if self.failed is not None:
            self.failed(self.name, call)
        if not self.open:
            raise HookFailed(f"The gateway's hook '{self.name}' could not be asked; the operator's log says why.")
        return None

    @property
    def looks_behind(self) -> bool:
        """Whether it has anything to do with answers."""
        return type(self.hook).after is not Hook.after


class HookedService(GenerationService):
    """`turns`, with hooks that are asked in order."""

    def __init__(self, turns: GenerationService, hooks: Sequence[NamedHook]) -> None:
        self.turns = turns
        self.hooks = tuple(hooks)
        self.looking_behind = tuple(hook for hook in self.hooks if hook.looks_behind)

    def start(self, turn: GenerationRequest) -> GenerationStream:
        return HookedStream(self, turn)

    async def count(self, turn: GenerationRequest) -> int:
        return await self.turns.count(turn)


class HookedStream(BatchStream):
    """A run of the turn that hooks made of another one. They are asked when it is let in or iterated."""

    def __init__(self, hooked: HookedService, turn: GenerationRequest) -> None:
        self.report = GenerationReport()
        self._hooked = hooked
        self._turn = turn
        self._run: GenerationStream | None = None

    async def let_in(self) -> None:
        if self._run is None:
            self._run = await self._asked_for()
        await self._run.let_in()

    async def aclose(self) -> None:
        await super().aclose()
        if self._run is not None:
            await self._run.aclose()

    async def _each(self) -> AsyncGenerator[list[Event]]:
        run = await self._asked_for() if self._run is None else self._run
        async with aclosing(run):
            if not self._hooked.looking_behind:
                async for batch in run:
                    yield batch
                return
            said: list[Closed] = []
            async for batch in run:
                said += (event for event in batch if type(event) is Closed)
                if batch and isinstance(last := batch[-1], Finished):
                    await self._after(said, last)
                yield batch

    # -- before

    async def _asked_for(self) -> GenerationStream:
        self._turn = self._again(self._turn) if self._turn.journal else await self._before(self._turn)
        run = self._hooked.turns.start(self._turn)
        # Whoever waits for this run has its report already.
        run.report = self.report
        return run

    async def _before(self, turn: GenerationRequest) -> GenerationRequest:
        """Raises `Refused`, `HookFailed`."""
        asked = turn
        for hook in self._hooked.hooks:
            turn = await self._asked(hook, turn)
        if turn is not asked and turn.passage is not None:
            turn = _kept_here(turn, turn.passage)
        if not turn.lasting or (turn is asked and not self.report.hooks):
            # Nobody else will ever go on with it, or there is nothing to know.
            return turn
        return replace(turn, noted=to_note(asked, turn, self.report.hooks))

    async def _asked(self, hook: NamedHook, turn: GenerationRequest) -> GenerationRequest:
        asked = await hook.ask("before", turn.request_id, _before(hook.hook, turn))
        if asked is None:
            return turn
        turn, annotation = asked
        self._annotate(hook, annotation)
        return turn

    def _again(self, turn: GenerationRequest) -> GenerationRequest:
        """The turn as hooks left it when its journal was begun. Raises `StoreUnreadable`."""
        note = noted_in(turn.journal)
        if note is None:
            return turn
        turn, hooks = from_note(turn, note)
        self.report.hooks |= hooks
        return replace(turn, noted=note)

    # -- after

    async def _after(self, said: Sequence[Closed], finished: Finished) -> None:
        """Raises `Refused` where nothing was shown, and `HookFailed`."""
        request = request_of(self._turn)
        answer = Answer(tuple(said), finished.reason, finished.usage, tuple(self.report.recoveries))
        for hook in self._hooked.looking_behind:
            try:
                annotation = await hook.ask("after", request.request_id, _after(hook.hook, request, answer))
            except Refused as refusal:
                if request.whole:
                    raise
                annotation = {"refused": {"message": refusal.message, "code": refusal.code}}
            self._annotate(hook, annotation)

    def _annotate(self, hook: NamedHook, annotation: dict[str, Json] | None) -> None:
        if annotation:
            self.report.hooks[hook.name] = self.report.hooks.get(hook.name, {}) | annotation


def _kept_here(turn: GenerationRequest, passage: PassthroughRequest) -> GenerationRequest:
    """A turn that hooks changed. The body it came in does not say so, and goes nowhere. Raises HookFailed where nobody
    else could answer it."""
    if passage.way is not AnswerMode.ENGINE_THEN_PASSING:
        raise HookFailed("A hook of the gateway's wants this request otherwise, and this model gets it as it came.")
    return replace(turn, passage=None)


# What a hook says wrong, it fails with: it is looked at while the hook is asked.


async def _before(hook: Hook, turn: GenerationRequest) -> tuple[GenerationRequest, dict[str, Json]]:
    changes = await hook.before(request_of(turn)) or Changes()
    return changed(turn, changes), plain(changes.annotation)


async def _after(hook: Hook, request: Request, answer: Answer) -> dict[str, Json]:
    return plain(await hook.after(request, answer))


def request_of(turn: GenerationRequest) -> Request:
    caller = turn.caller
    return Request(
        request_id=turn.request_id,
        tenant=turn.tenant,
        key=caller.key if caller is not None else "",
        model=turn.model,
        surface=turn.surface,
        conversation=turn.conversation,
        sampling=turn.sampling,
        whole=turn.whole,
        tags=caller.tags if caller is not None else {},
    )


def plain(annotation: Annotation | None) -> dict[str, Json]:
    """An annotation as it is kept and sent. Raises TypeError, ValueError."""
    if annotation is None:
        return {}
    text = json.dumps(dict(annotation), allow_nan=False)
    if len(text) > LONGEST:
        raise ValueError(f"an annotation has {len(text)} characters; the most are {LONGEST}")
    read: dict[str, Json] = json.loads(text)
    # Whoever sends and keeps it has no way to write half a pair of surrogates, or numbers of more than 64 bits.
    orjson.dumps(read)
    return read
