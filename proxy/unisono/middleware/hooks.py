"""Hooks around generations: called before rendering, and before the end is emitted.

Part of the composition root, unknown to API surfaces and engine. This layer is inside the quota layer: a request over
a limit never reaches a hook, and a refused request has used no tokens. Changes are noted at the beginning of the
journal. A resumed response therefore calls no hook twice, and the model continues from the same prompt.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

import orjson

from unisono.core.conversation import Json, Phase
from unisono.core.events import (
    Closed,
    Delta,
    Event,
    Finished,
    HostedCall,
    Listing,
    Opened,
    Passed,
    PassedBytes,
    Ran,
    Text,
)
from unisono.core.hooks import Annotation, Answer, Changes, Hook, Request
from unisono.core.passthrough_request import UPLOAD_APIS, passed_texts, transcript_texts
from unisono.core.tool_arguments import read_arguments
from unisono.engine.journal import noted_in
from unisono.engine.request import GenerationRequest
from unisono.errors import HookFailed, Refused
from unisono.middleware.hook_changes import changed, from_note, to_note, without_passthrough
from unisono.middleware.pipeline import Gate

# Key of the requested guardrails in the note at the beginning of a journal.
GUARDRAILS_NOTE: Final = "guardrails"
NO_ALTERNATIVES: Final = "no effect on alternatives, because a guardrail checks the answers of this model"

# Maximum size of a hook's annotation, in characters of JSON.
MAX_ANNOTATION_CHARACTERS: Final = 10_000

# Exceptions that count as a failure of a hook. A hook that exits the process would end all streams. A real Ctrl-C is
# a signal that the server handles; it is not raised here.
FAULTS: Final = (Exception, SystemExit, KeyboardInterrupt)

T = TypeVar("T")

# Callback for each failed hook call: the hook's name, and `before` or `after`.
Failed: TypeAlias = Callable[[str, str], None]

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

        The request names `models` and asks for the guardrails `requested`.
        """
        return self.is_default or not self.models.isdisjoint(models) or self.name in requested

    async def call(self, call: str, request_id: str, answering: Awaitable[T]) -> T | None:
        """Await the hook's result, within the hook's timeout; return None on an ignored failure.

        Raises `Refused`, and `HookFailed` if the hook is mandatory.
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
            raise HookFailed(f"The gateway's hook '{self.name}' failed. Ask the operator: the log has the reason.")
        return None

    @property
    def holds_answers(self) -> bool:
        """True if the hook checks every item before it is emitted."""
        return bool(getattr(self.hook, "holds_answers", False))

    @property
    def checks_answers(self) -> bool:
        """True if the hook implements `after`."""
        return type(self.hook).after is not Hook.after


class Hooking:
    """Factory of gates that call hooks in order."""

    def __init__(self, hooks: Sequence[NamedHook]) -> None:
        self.hooks = tuple(hooks)

    def __call__(self, request: GenerationRequest) -> HookGate | None:
        if not self.hooks:
            return None
        requested = _requested_guardrails(request)
        # A guardrail of a model also applies if the client names the model as a fallback.
        caller = request.origin.caller
        models = {request.model, *((caller.routing.fallbacks or ()) if caller is not None else ())}
        hooks = [hook for hook in self.hooks if hook.applies_to(models, requested)]
        if not hooks:
            return None
        if any(hook.holds_answers for hook in hooks):
            return BufferingHookGate(hooks, requested)
        return (AnswerHookGate if any(hook.checks_answers for hook in hooks) else HookGate)(hooks, requested)


def _requested_guardrails(request: GenerationRequest) -> tuple[str, ...]:
    """Return the names of the guardrails that the request asked for when it began."""
    if request.resumption.journal:
        names = (noted_in(request.resumption.journal) or {}).get(GUARDRAILS_NOTE)
        return tuple(map(str, names)) if isinstance(names, Sequence) else ()
    return tuple(sorted(request.origin.caller.guardrails)) if request.origin.caller is not None else ()


class HookGate(Gate):
    """Gate that calls the hooks of one generation on its admission.

    `requested` are the names of guardrails that the request asks for.
    """

    def __init__(self, hooks: Sequence[NamedHook], requested: Sequence[str]) -> None:
        self._hooks = tuple(hooks)
        self._requested = tuple(requested)

    async def admit(self, request: GenerationRequest) -> GenerationRequest:
        return self._restore_changes(request) if request.resumption.journal else await self._before(request)

    async def _before(self, request: GenerationRequest) -> GenerationRequest:
        """Call `before` of all hooks.

        Raises `Refused` if a hook refuses the request, and `HookFailed` if a mandatory hook fails.
        """
        original = request
        for hook in self._hooks:
            request = await self._apply_before(hook, request)
        if request.raw is not None and request.raw is not original.raw:
            self.report.facts.replaced_prompt = request.raw.text
        if request is not original and request.passthrough is not None:
            request = without_passthrough(request, request.passthrough)
        has_note = request is not original or self.report.hooks or self._requested
        if not request.resumption.is_journal_stored or not has_note:
            # The request is never resumed, or there is nothing to note.
            return request
        note = {**(request.resumption.journal_note or {}), **to_note(original, request, self.report.hooks)}
        if self._requested:
            note[GUARDRAILS_NOTE] = [*self._requested]
        return replace(request, resumption=replace(request.resumption, journal_note=note))

    async def _apply_before(self, hook: NamedHook, request: GenerationRequest) -> GenerationRequest:
        changes = await hook.call("before", request.origin.request_id, _before(hook.hook, request))
        if changes is None:
            return request
        request, annotation = changes
        self._annotate(hook, annotation)
        return request

    def _restore_changes(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request as hooks changed it when its journal began. Raises `StoreUnreadable`."""
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
    """Gate that also calls hooks before the end of the answer is emitted."""

    def __init__(self, hooks: Sequence[NamedHook], requested: Sequence[str]) -> None:
        super().__init__(hooks, requested)
        self._answer_hooks = tuple(hook for hook in self._hooks if hook.checks_answers)
        self._request: GenerationRequest | None = None
        self._closed: list[Closed] = []

    async def admit(self, request: GenerationRequest) -> GenerationRequest:
        self._request = await super().admit(request)
        return self._request

    def observe(self, batch: Sequence[Event]) -> None:
        self._closed += (event for event in batch if type(event) is Closed)

    async def finish(self, finished: Finished) -> None:
        """Call `after` of all hooks. Raises `Refused` if nothing was emitted, and `HookFailed`."""
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


class BufferingHookGate(AnswerHookGate):
    """Gate that also buffers each item of the answer until its hooks have checked it."""

    def __init__(self, hooks: Sequence[NamedHook], requested: Sequence[str]) -> None:
        super().__init__(hooks, requested)
        self._item_hooks = tuple(hook for hook in self._hooks if hook.holds_answers)
        self._buffered: list[Event] = []
        # Server tool calls with changed arguments, by call id. Their results contain the call again.
        self._changed_calls: dict[str, HostedCall] = {}

    async def admit(self, request: GenerationRequest) -> GenerationRequest:
        """Admit the request without alternatives to the tokens of the answer, which no hook checks."""
        request = await super().admit(request)
        if request.logprobs:
            self.report.notes.append(f"{request.prompt.fields.logprobs}: {NO_ALTERNATIVES}")
            request = replace(request, logprobs=0)
        return request

    async def filter(self, batch: list[Event]) -> list[Event]:
        """Return the events of complete and checked items. Raises `Refused` and `HookFailed`."""
        emitted: list[Event] = []
        for event in batch:
            if self._is_unchecked(event):
                emitted.append(event)
            # A pass-through answer is buffered as a whole, because its events contain no complete items.
            elif isinstance(event, Passed | PassedBytes) or (isinstance(event, Closed) and self._is_passed_through):
                self._buffered.append(event)
            elif isinstance(event, Finished):
                emitted += await self._checked_passthrough()
                emitted.append(event)
            elif isinstance(event, Closed):
                emitted += await self._checked(event)
            elif self._buffered or isinstance(event, Opened):
                self._buffered.append(event)
            elif isinstance(event, Ran):
                emitted.append(replace(event, item=self._changed_calls.get(event.item.call_id, event.item)))
            else:
                emitted.append(event)
        return emitted

    def _is_unchecked(self, event: Event) -> bool:
        """Return True for events without text that a hook checks."""
        # Audio and images may be large, and clients play audio as it arrives.
        is_media = isinstance(event, PassedBytes) and not self._has_transcript
        return is_media or (isinstance(event, Opened) and isinstance(event.item, Listing))

    @property
    def _has_transcript(self) -> bool:
        passthrough = self._request.passthrough if self._request is not None else None
        return passthrough is not None and passthrough.api in UPLOAD_APIS

    @property
    def _is_passed_through(self) -> bool:
        return bool(self._buffered) and isinstance(self._buffered[0], Passed | PassedBytes)

    async def _checked(self, closed: Closed) -> list[Event]:
        """Return the events of an item, with its text as the hooks changed it."""
        buffered, self._buffered = self._buffered, []
        text = await self._check(closed)
        if text == closed.text:
            return [*buffered, closed]
        self.report.facts.is_masked = True
        item = closed.item
        if isinstance(item, HostedCall):
            # The tool gets the arguments of the model; clients see the changed ones.
            item = replace(item, arguments=read_arguments(item.name, text))
            self._changed_calls[item.call_id] = item
        others = [
            replace(event, item=item) if isinstance(event, Opened) else event
            for event in buffered
            if not isinstance(event, Delta)
        ]
        return [*others, Delta(item, text), replace(closed, item=item, text=text, tokens=())]

    async def _checked_passthrough(self) -> list[Event]:
        """Return the events of a pass-through answer."""
        buffered, self._buffered = self._buffered, []
        for index, text in enumerate(self._texts_of(buffered)):
            item = Text(index, Phase.FINAL)
            if await self._check(Closed(item, text)) != text:
                raise Refused(
                    "The answer contains content that a guardrail masks. Answers of this pass-through model cannot be "
                    "masked; use another model."
                )
        return buffered

    def _texts_of(self, buffered: Sequence[Event]) -> list[str]:
        texts = passed_texts([event.body for event in buffered if isinstance(event, Passed)])
        if self._has_transcript:
            texts += transcript_texts(b"".join(event.data for event in buffered if isinstance(event, PassedBytes)))
        return texts

    async def _check(self, closed: Closed) -> str:
        assert self._request is not None
        request = request_of(self._request)
        for hook in self._item_hooks:
            checking = _check_item(hook.hook, request, closed)
            text = await hook.call("check_item", request.request_id, checking)
            if text is not None:
                closed = replace(closed, text=text)
        return closed.text


# Invalid results are a failure of the hook: they are checked within its call.


async def _before(hook: Hook, request: GenerationRequest) -> tuple[GenerationRequest, dict[str, Json]]:
    changes = await hook.before(request_of(request)) or Changes()
    return changed(request, changes), plain(changes.annotation)


async def _check_item(hook: Hook, request: Request, item: Closed) -> str | None:
    text = await hook.check_item(request, item)
    if text is not None and not isinstance(text, str):
        raise TypeError(f"`check_item` returned {type(text).__name__} instead of str or None")
    return text


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
    """Return an annotation as it is stored and sent.

    Raises TypeError or ValueError if it is too long or cannot be sent as JSON.
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
