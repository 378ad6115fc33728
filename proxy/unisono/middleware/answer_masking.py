"""Masking of answers: each item is buffered until the hooks have checked (and changed) it.

Clients, the store and the conversation cache get texts and call arguments only after the changes of the hooks. An
answer of a pass-through model cannot be changed. If a hook wants to change it, the answer is refused instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from unisono.core.conversation import AssistantCall, Phase
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
from unisono.core.hooks import Hook, Request
from unisono.core.passthrough_request import UPLOAD_APIS, passed_texts, transcript_texts
from unisono.core.server_tool_arguments import read_arguments
from unisono.engine.request import GenerationRequest, RecordAnswer
from unisono.errors import Refused
from unisono.middleware.hook_gates import AnswerHookGate, NamedHook, Restore, request_of

NO_ALTERNATIVES: Final = "no effect on alternatives, because a guardrail checks the answers of this model"


class BufferingHookGate(AnswerHookGate):
    """Gate that also buffers each item of the answer until its hooks have checked it."""

    def __init__(self, hooks: Sequence[NamedHook], requested: Sequence[str], restore: Restore) -> None:
        super().__init__(hooks, requested, restore)
        self._item_hooks = tuple(hook for hook in self._hooks if hook.holds_answers)
        self._buffered: list[Event] = []
        self._record: RecordAnswer | None = None
        # Server tool calls with changed arguments, by call id. Their results contain the call again.
        self._changed_calls: dict[str, HostedCall] = {}

    async def admit(self, request: GenerationRequest) -> GenerationRequest:
        """Admit the request, but remove `logprobs`: no hook checks the alternative tokens."""
        request = await super().admit(request)
        if request.logprobs:
            self.report.notes.append(f"{request.prompt.fields.logprobs}: {NO_ALTERNATIVES}")
            request = replace(request, logprobs=0)
        return replace(request, prompt=replace(request.prompt, leave_record=self._keep_record))

    async def finish(self, finished: Finished) -> None:
        """Call `after` of all hooks, and record the checked answer in the conversation cache."""
        await super().finish(finished)
        if self._record is not None:
            self._record(self._closed)

    def _keep_record(self, record: RecordAnswer) -> None:
        self._record = record

    async def filter(self, batch: list[Event]) -> list[Event]:
        """Return the events of complete items that the hooks have checked; buffer all other events.

        Raises `Refused` if a hook refuses an item, and `HookFailed` if a mandatory hook fails.
        """
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
        """Return True for an event that contains no text for hooks to check."""
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
        """Return the events of a complete item, with the text that the hooks returned."""
        buffered, self._buffered = self._buffered, []
        text = await self._check(closed)
        if text == closed.text:
            return [*buffered, closed]
        self.report.facts.is_masked = True
        item = closed.item
        if isinstance(item, HostedCall):
            # The tool gets the arguments that the model wrote. Only the client gets the changed arguments.
            sealed = await self._sealed(item, text, closed.text)
            item = replace(item, arguments=read_arguments(item.name, text), sealed=sealed)
            self._changed_calls[item.call_id] = item
        others = [
            replace(event, item=item) if isinstance(event, Opened) else event
            for event in buffered
            if not isinstance(event, Delta)
        ]
        return [*others, Delta(item, text), replace(closed, item=item, text=text, tokens=())]

    async def _sealed(self, item: HostedCall, *arguments: str) -> str:
        """Return the encrypted call, once with each of `arguments`.

        Returns "" if the call does not wait for the user, or if the request cannot encrypt calls.
        """
        tools = self._request.server_tools if self._request is not None else None
        if not item.needs_approval or tools is None or tools.seal_calls is None:
            return ""
        return await tools.seal_calls([AssistantCall(item.call_id, item.name, each) for each in arguments])

    async def _checked_passthrough(self) -> list[Event]:
        """Return the events of a pass-through answer. Raises `Refused` if a hook wants to change it."""
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


# The result of a hook is checked within the hook's call, so that an invalid result is a failure of the hook.


async def _check_item(hook: Hook, request: Request, item: Closed) -> str | None:
    text = await hook.check_item(request, item)
    if text is not None and not isinstance(text, str):
        raise TypeError(f"`check_item` returned {type(text).__name__} instead of str or None")
    return text
