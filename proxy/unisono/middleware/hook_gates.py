"""Hooks with their settings, and gates that call hooks before and after an answer.

The changes that hooks make to a request are stored at the beginning of the response's journal. When a response is
resumed, no hook's `before` is called again, so the model continues from the same prompt.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Final, TypeAlias, TypeVar

import orjson

from unisono.core.conversation import Json
from unisono.core.events import Closed, Event, Finished
from unisono.core.frozen import dataclass
from unisono.core.hooks import Annotation, Answer, Changes, Hook, Request
from unisono.engine.journal import noted_in
from unisono.engine.request import GenerationRequest
from unisono.errors import HookFailed, Refused
from unisono.middleware.pipeline import Gate
from unisono.middleware.request_changes import changed, from_note, to_note, without_passthrough

# Exceptions that are a failure of a hook. SystemExit is included because a hook must not end the process and all its
# streams. A real Ctrl-C raises nothing here, because the server handles the signal.
FAULTS: Final = (Exception, SystemExit, KeyboardInterrupt)

T = TypeVar("T")

# Callback for each failed call of a hook. Its arguments are the hook's name and the name of the called method.
Failed: TypeAlias = Callable[[str, str], None]

# Function that returns a request with everything that the engine would add to its prompt from earlier requests.
Restore: TypeAlias = Callable[[GenerationRequest], GenerationRequest]

log = logging.getLogger("unisono.hooks")


@dataclass(frozen=True, slots=True)
class NamedHook:
    """Hook with its settings; if `open` is True, a failure of the hook is ignored."""

    name: str
    hook: Hook
    timeout_s: float = 5.0
    open: bool = False
    failed: Failed | None = None
    # A guardrail applies to all requests (`is_default`), or only to those that name it or are for one of `models`.
    is_default: bool = True
    models: frozenset[str] = frozenset()

    def applies_to(self, models: Collection[str], requested: Collection[str]) -> bool:
        """Return whether the hook applies to a request.

        `models` are the models that the request names, and `requested` the guardrails that the request names.
        """
        return self.is_default or not self.models.isdisjoint(models) or self.name in requested

    async def call(self, call: str, request_id: str, answering: Awaitable[T]) -> T | None:
        """Await the hook's result, within the hook's timeout; return None on an ignored failure.

        `call` is the name of the called method, such as `before`, for the log. Raises `Refused` if the hook refuses the
        request or the answer, and `HookFailed` if the hook fails and is mandatory.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                return await answering
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # An awaitable of the hook was cancelled, not the request.
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
            raise HookFailed(f"The gateway's hook '{self.name}' failed. The operator finds the reason in the log.")
        return None

    @property
    def holds_answers(self) -> bool:
        """True if the hook checks every item of an answer before the item is emitted."""
        return bool(getattr(self.hook, "holds_answers", False))

    @property
    def checks_answers(self) -> bool:
        """True if the hook implements `after`."""
        return type(self.hook).after is not Hook.after


# Key under which the note at the beginning of a journal has the names of the requested guardrails.
GUARDRAILS_NOTE: Final = "guardrails"

# Maximum size of a hook's annotation, in characters of JSON.
MAX_ANNOTATION_CHARACTERS: Final = 10_000


class HookGate(Gate):
    """Gate that calls the hooks of one generation when its request is admitted.

    `requested` are the names of the guardrails that the client requested. Hooks check everything that the model would
    read, so the gate calls `restore` first.
    """

    def __init__(self, hooks: Sequence[NamedHook], requested: Sequence[str], restore: Restore) -> None:
        self._hooks = tuple(hooks)
        self._requested = tuple(requested)
        self._restore = restore

    async def admit(self, request: GenerationRequest) -> GenerationRequest:
        return self._restore_changes(request) if request.resumption.journal else await self._before(request)

    async def _before(self, request: GenerationRequest) -> GenerationRequest:
        """Call `before` of all hooks.

        Raises `Refused` if a hook refuses the request, and `HookFailed` if a mandatory hook fails.
        """
        sent = request
        original = request = self._restore(request)
        for hook in self._hooks:
            request = await self._apply_before(hook, request)
        if request.raw is not None and request.raw is not original.raw:
            self.report.facts.replaced_prompt = request.raw.text
        if request is not original and request.passthrough is not None:
            request = without_passthrough(request, request.passthrough)
        if not request.resumption.is_journal_stored:
            # The request will never be resumed.
            return request
        note = to_note(sent, request, self.report.hooks)
        if self._requested:
            note[GUARDRAILS_NOTE] = [*self._requested]
        if not note:
            return request
        note = {**(request.resumption.journal_note or {}), **note}
        return replace(request, resumption=replace(request.resumption, journal_note=note))

    async def _apply_before(self, hook: NamedHook, request: GenerationRequest) -> GenerationRequest:
        changes = await hook.call("before", request.origin.request_id, _before(hook.hook, request))
        if changes is None:
            return request
        request, annotation = changes
        self._annotate(hook, annotation)
        return request

    def _restore_changes(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with the changes that were made to it when its journal began.

        Raises `StoreUnreadable` if the stored changes are damaged.
        """
        # Hooks have not seen what could be restored now.
        request = replace(request, prompt=replace(request.prompt, is_restored=True))
        note = noted_in(request.resumption.journal)
        if note is None:
            return request
        request, hooks = from_note(request, note)
        self.report.hooks |= hooks
        return replace(request, resumption=replace(request.resumption, journal_note=note))

    def _annotate(self, hook: NamedHook, annotation: dict[str, Json] | None) -> None:
        if annotation:
            self.report.hooks[hook.name] = self.report.hooks.get(hook.name, {}) | annotation


class AnswerHookGate(HookGate):
    """Gate that also calls `after` of the hooks, before the last event of the answer is emitted."""

    def __init__(self, hooks: Sequence[NamedHook], requested: Sequence[str], restore: Restore) -> None:
        super().__init__(hooks, requested, restore)
        self._answer_hooks = tuple(hook for hook in self._hooks if hook.checks_answers)
        self._request: GenerationRequest | None = None
        self._closed: list[Closed] = []

    async def admit(self, request: GenerationRequest) -> GenerationRequest:
        self._request = await super().admit(request)
        return self._request

    def observe(self, batch: Sequence[Event]) -> None:
        self._closed += (event for event in batch if type(event) is Closed)

    async def finish(self, finished: Finished) -> None:
        """Call `after` of all hooks.

        If a hook refuses an answer that is not streamed, `Refused` is raised. A streamed answer was sent already, so
        its refusal becomes an annotation. Raises `HookFailed` if a mandatory hook fails.
        """
        assert self._request is not None
        request = request_of(self._request)
        answer = Answer(tuple(self._closed), finished.reason, finished.usage, tuple(self.report.recoveries))
        for hook in self._answer_hooks:
            try:
                annotation = await hook.call("after", request.request_id, _after(hook.hook, request, answer))
            except Refused as refusal:
                if request.whole:
                    raise
                annotation = {"refused": {"message": refusal.message, "code": refusal.code}}
            self._annotate(hook, annotation)


# The results of hooks are checked within the hook's call, so that an invalid result is a failure of the hook.


async def _before(hook: Hook, request: GenerationRequest) -> tuple[GenerationRequest, dict[str, Json]]:
    changes = await hook.before(request_of(request)) or Changes()
    return changed(request, changes), plain(changes.annotation)


async def _after(hook: Hook, request: Request, answer: Answer) -> dict[str, Json]:
    return plain(await hook.after(request, answer))


def request_of(request: GenerationRequest) -> Request:
    caller = request.origin.caller
    return Request(
        request_id=request.origin.request_id,
        tenant=request.origin.tenant,
        key=caller.key if caller is not None else "",
        model=request.model,
        surface=request.origin.surface,
        conversation=request.conversation,
        sampling=request.answer.sampling,
        whole=request.answer.whole,
        tags=caller.tags if caller is not None else {},
    )


def plain(annotation: Annotation | None) -> dict[str, Json]:
    """Return an annotation in the form in which it is stored and sent; {} for None.

    Raises TypeError or ValueError if the annotation is too long or cannot be sent as JSON.
    """
    if annotation is None:
        return {}
    text = json.dumps(dict(annotation), allow_nan=False)
    if len(text) > MAX_ANNOTATION_CHARACTERS:
        raise ValueError(f"an annotation has {len(text)} characters; the maximum is {MAX_ANNOTATION_CHARACTERS}")
    read: dict[str, Json] = json.loads(text)
    # Neither lone surrogates nor numbers of more than 64 bits can be sent or stored.
    orjson.dumps(read)
    return read
