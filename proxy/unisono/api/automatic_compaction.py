"""Answers to conversations that may have to be compacted first.

Compaction replaces a conversation with a summary, which the model writes before it answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, fields, replace
from typing import Any, Final, TypeAlias, TypeVar

from unisono.api.collected_answer import CollectedAnswer, collect
from unisono.api.compaction_summary import (
    MAX_PRESERVED_CHARACTERS,
    compacted_items,
    newest_input,
    notes_on_summary,
    summary_of,
    summary_request,
)
from unisono.core.conversation import Conversation, Item, Json
from unisono.core.events import Compacted, Delta, Event, Finished
from unisono.core.frozen import dataclass
from unisono.core.generation import DEFAULT_CONTEXT, FinishReason, Usage
from unisono.engine.journal import noted_in
from unisono.engine.request import (
    BatchStream,
    GenerationReport,
    GenerationRequest,
    GenerationService,
    GenerationStream,
    RequestKey,
)
from unisono.errors import StoreUnreadable

# Prompt length in tokens from which a conversation is compacted if the client sets no threshold. Anthropic's API has
# the same default.
DEFAULT_THRESHOLD_TOKENS: Final = 150_000
# Maximum threshold, as a share of the context window. The rest of the window leaves room for the summary.
MAX_WINDOW_SHARE: Final = 0.9
# Preserved characters for each token of the threshold: about half of the prompt, so that it becomes shorter.
PRESERVED_CHARACTERS_PER_TOKEN: Final = 2
# Key of a compaction in the journal's note.
NOTE: Final = "compaction"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """Compaction of a conversation before its answer.

    `items` are the items of the conversation. `rebuilt` takes the items that replace `items`, and returns the new
    conversation. `limit` is the prompt length in tokens that the new conversation should not reach. The conversation is
    compacted if its prompt has at least `threshold` tokens. If `threshold` is None, it is always compacted. If
    `ends_answer` is True, the answer ends after the compaction. `instructions` are the client's instructions for the
    summary.
    """

    items: Sequence[Item]
    rebuilt: Callable[[Sequence[Item]], Conversation]
    limit: int
    threshold: int | None = None
    ends_answer: bool = False
    instructions: str = ""

    async def replacement(self, service: GenerationService, request: GenerationRequest, summary: str) -> Sequence[Item]:
        """Return the items that replace the conversation; one of them contains `summary`.

        If `summary` is empty, returns the items of the conversation itself. `service` counts the tokens of the prompt
        that `request` would have with the new items.
        """

        async def size(items: Sequence[Item]) -> int:
            return await service.count(replace(request, conversation=self.rebuilt(items)))

        if not summary:
            return compacted_items(self.items, summary)
        return await fitted(lambda room: compacted_items(self.items, summary, room), size, self._room, self.limit)

    @property
    def _room(self) -> int:
        return preserved_characters(self.limit if self.threshold is None else self.threshold)

    def is_applicable(self, request: GenerationRequest) -> bool:
        """Return whether the conversation may be compacted.

        This is always the case without a threshold. With a threshold, the conversation is not compacted if there is
        nothing to summarize. Nor is it compacted if the request approves or denies tool calls, because the compaction
        would remove these calls.
        """
        if self.threshold is None:
            return True
        has_decisions = request.server_tools is not None and bool(request.server_tools.decisions)
        return not has_decisions and len(newest_input(self.items, self._room)) < len(self.items)


# Look up the context window of a model in tokens; None if it is unknown.
Window: TypeAlias = Callable[[], int | None]


def unknown_window() -> None:
    """Return None as the context window: the default for a model whose window is unknown."""


def threshold_of(wanted: int | None, window: Window) -> int:
    """Return the smallest prompt length, in tokens, at which a conversation is compacted.

    `wanted` is the client's threshold in tokens; None selects the default. The result is smaller if the context window
    requires it.
    """
    # A prompt that exceeds the context window could not be answered, so compaction begins below the window's size.
    largest = max(1, int((window() or DEFAULT_CONTEXT) * MAX_WINDOW_SHARE))
    return min(wanted or DEFAULT_THRESHOLD_TOKENS, largest)


def preserved_characters(tokens: int) -> int:
    """Return the maximum number of characters that a compaction preserves.

    `tokens` is the prompt length at which the conversation is compacted.
    """
    return min(MAX_PRESERVED_CHARACTERS, tokens * PRESERVED_CHARACTERS_PER_TOKEN)


async def fitted(compact: Callable[[int], T], size: Callable[[T], Awaitable[int]], characters: int, limit: int) -> T:
    """Return a compacted conversation whose `size` is below `limit` tokens, if possible.

    `compact` builds the conversation for a maximum number of preserved characters. The first attempt uses `characters`
    as the maximum, and each further attempt halves the maximum, down to 0.
    """
    # The number of characters is only an estimate of the size: base64 or rare characters need more tokens than words.
    too_large = None
    while characters:
        compacted = compact(characters)
        if compacted != too_large and await size(compacted) < limit:
            return compacted
        too_large, characters = compacted, characters // 2
    return compact(0)


def request_to_count(request: GenerationRequest, plan: CompactionPlan | None) -> GenerationRequest:
    """Return the request to use for counting the prompt tokens.

    If the answer consists only of the compaction, this is the request for the summary.
    """
    return request if plan is None or not plan.ends_answer else summary_request(request, plan.instructions)


def start_answer(
    service: GenerationService, request: GenerationRequest, plan: CompactionPlan | None
) -> GenerationStream:
    """Start the answer to a request, after the compaction if `plan` is applicable."""
    if plan is None or not plan.is_applicable(request):
        return service.start(request)
    return CompactingStream(service, request, plan)


class CompactingStream(BatchStream):
    """Stream of an answer that first summarizes the conversation if its prompt is too long.

    After such a compaction, the first event of the answer is Compacted. The journal contains the tokens of the answer,
    and the journal's first record contains the summary as a note. A stream that resumes an interrupted answer from a
    journal uses this summary. If there is no journal yet, the stream generates the summary again.
    """

    def __init__(self, service: GenerationService, request: GenerationRequest, plan: CompactionPlan) -> None:
        self.report = GenerationReport(recoveries=[*request.origin.recoveries])
        self._service = service
        self._request = request
        self._plan = plan
        self._stream: GenerationStream | None = None
        self._is_summary = False
        self._compacted: Compacted | None = None
        # Facts of the summary that belong to the report of the answer.
        self._recoveries: list[str] = []
        self._failovers = 0
        self._notes: list[str] = []
        self._left_out = 0

    async def admit(self) -> None:
        await (await self._first_stream()).admit()

    async def aclose(self) -> None:
        await super().aclose()
        if self._stream is not None:
            await self._stream.aclose()

    async def _each(self) -> AsyncGenerator[list[Event]]:
        stream = await self._first_stream()
        if self._is_summary:
            # The first batch is empty, so that the client learns that its answer has begun.
            async with aclosing(self._summarize(stream)) as batches:
                async for batch in batches:
                    yield batch
            assert self._compacted is not None
            if self._plan.ends_answer:
                yield [self._compacted, Finished(FinishReason.STOP, Usage(), paused=True)]
                return
            stream = self._stream = self._answer()
        first: Sequence[Event] = () if self._compacted is None else (self._compacted,)
        async with aclosing(stream):
            async for batch in stream:
                self._publish(stream.report)
                yield [*first, *batch] if first else batch
                first = ()

    async def _first_stream(self) -> GenerationStream:
        """Return the stream of the summary if compaction is due, else the stream of the answer.

        The first call starts the stream.
        """
        if self._stream is None:
            if self._request.resumption.journal:
                self._compacted = await self._noted_compaction()
            self._is_summary = not self._request.resumption.journal and await self._is_due()
            self._stream = (
                self._service.start(summary_request(self._request, self._plan.instructions))
                if self._is_summary
                else self._answer()
            )
        return self._stream

    async def _is_due(self) -> bool:
        threshold = self._plan.threshold
        return threshold is None or await self._service.count(self._request) >= threshold

    async def _summarize(self, stream: GenerationStream) -> AsyncGenerator[list[Event]]:
        """Generate the summary; yield one empty batch when its generation has begun."""
        events: list[Event] = []
        has_begun = False
        async with aclosing(stream):
            async for batch in stream:
                if not has_begun:
                    has_begun = True
                    yield []
                events += (event for event in batch if not isinstance(event, Delta))
        self._publish(stream.report, with_journal=False)
        self._recoveries, self._failovers = [*self.report.recoveries], self.report.failovers
        self._compacted = await self._to_compacted(collect(events), stream.report)

    async def _to_compacted(self, result: CollectedAnswer, report: GenerationReport) -> Compacted:
        summary = summary_of(result)
        self._notes = notes_on_summary(summary, report)
        self._left_out = report.facts.left_out if summary else 0
        if self._plan.ends_answer:
            # Otherwise, the report of the answer that follows contains the notes.
            self.report.notes = [*self._notes, *report.notes]
            self.report.facts = replace(report.facts, left_out=self._left_out)
        items = await self._replacement(summary)
        return Compacted(items, summary, result.finished.usage, ends_answer=self._plan.ends_answer)

    async def _replacement(self, summary: str) -> tuple[Item, ...]:
        return tuple(await self._plan.replacement(self._service, self._request, summary))

    def _answer(self) -> GenerationStream:
        request, compacted = self._request, self._compacted
        if compacted is None:
            return self._service.start(request)
        request = replace(request, origin=replace(request.origin, is_admitted=True))
        if compacted.summary:
            # A request key identifies a request with one prompt. The compacted conversation has a different prompt.
            request = replace(
                request,
                conversation=self._plan.rebuilt(compacted.items),
                origin=replace(request.origin, key=RequestKey()),
            )
        if request.resumption.is_journal_stored:
            note: dict[str, Json] = {
                "summary": compacted.summary,
                "usage": asdict(compacted.usage),
                "notes": [*self._notes],
                "left_out": self._left_out,
            }
            request = replace(request, resumption=replace(request.resumption, journal_note={NOTE: note}))
        return self._service.start(request)

    async def _noted_compaction(self) -> Compacted | None:
        """Return the compaction recorded at the beginning of the journal, or None.

        Raises StoreUnreadable if the record of the compaction is damaged.
        """
        noted: Mapping[str, Any] = noted_in(self._request.resumption.journal) or {}
        if (note := noted.get(NOTE)) is None:
            return None
        try:
            summary, usage = str(note["summary"]), Usage(**note["usage"])
            # Earlier versions stored neither notes nor the number of dropped items.
            self._notes, self._left_out = [*map(str, note.get("notes", ()))], int(note.get("left_out", 0))
        except (AttributeError, KeyError, TypeError, ValueError) as failure:
            raise StoreUnreadable(
                "The answer cannot be resumed: the stored summary of its conversation is damaged. Repeat the request."
            ) from failure
        return Compacted(await self._replacement(summary), summary, usage)

    def _publish(self, report: GenerationReport, *, with_journal: bool = True) -> None:
        """Copy the facts of a generation to this stream's report, which the consumer already has."""
        for field in fields(GenerationReport):
            if field.name != "journal":
                setattr(self.report, field.name, getattr(report, field.name))
        self.report.recoveries = [*self._recoveries, *report.recoveries]
        self.report.failovers += self._failovers
        self.report.notes = [*self._notes, *report.notes]
        if self._left_out:
            self.report.facts = replace(report.facts, left_out=report.facts.left_out + self._left_out)
        if with_journal:
            self.report.journal += report.journal[len(self.report.journal) :]
