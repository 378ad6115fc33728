"""Telemetry: reports the start and the end of every generation to observers.

The engine collects most facts during the generation. This layer adds the time of the first events, the outcome, and the
number of tokens by channel. Errors of an observer are logged and do not affect the answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import random
from secrets import token_hex
from typing import Final

from unisono.core.conversation import FunctionTool, Phase, Tokens
from unisono.core.events import (
    Closed,
    Delta,
    Event,
    Finished,
    HostedCall,
    Item,
    Listing,
    Opened,
    Reasoning,
    Repaired,
    Text,
    ToolCall,
)
from unisono.core.generation import MESSAGE
from unisono.core.observer import (
    GenerationDone,
    GenerationOutcome,
    GenerationStarted,
    Observer,
    RequestDetails,
    TokenInfluences,
)
from unisono.core.request_record import outcome_of
from unisono.core.trace_context import ARRIVED, IDENTITY, TraceContext
from unisono.engine.replay import to_record
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.middleware.pipeline import Gate

log = logging.getLogger("unisono.middleware.telemetry")

# Channel under which the tokens of an item are counted. Text is counted under the channel of its phase.
CHANNELS: Final[dict[type[Item], str]] = {Reasoning: "analysis", ToolCall: "call", HostedCall: "hosted_call"}

# Number of properties by which schemas are distinguished.
MAX_PROPERTIES: Final = 32

# Factory that returns the span of a new generation.
NewTrace = Callable[[], TraceContext]


def spans_of(sample: float) -> NewTrace:
    """Return a factory of spans. Each span is a child of the span of the client's request.

    If the request has no span, the factory begins a new trace. `sample` is the share (0 to 1) of new traces to sample.
    """

    def new() -> TraceContext:
        arrived = ARRIVED.get()
        if arrived is not None:
            return replace(arrived, span_id=token_hex(8))
        ids = token_hex(24)
        return TraceContext(ids[:32], ids[32:], sampled=random() < sample)  # noqa: S311 - nothing secret

    return new


class GenerationObservation:
    """Factory of gates that report every generation to observers.

    `background` marks generations that no request waits for. With `recorded`, the report includes the request, the
    prompts of its steps and the output. A recorded generation gets a seed, so that a replay has the same ids. With
    `with_content`, the report includes the conversation and the output. For the models in `with_prompts`, the report
    includes the prompts of the steps.
    """

    def __init__(
        self,
        observers: Sequence[Observer],
        *,
        background: bool = False,
        recorded: bool = False,
        new_trace: NewTrace | None = None,
        with_content: bool = False,
        with_prompts: Collection[str] = (),
    ) -> None:
        self._observers = tuple(observers)
        self._background = background
        self._recorded = recorded
        self._new_trace = new_trace
        self._with_content = with_content
        self._with_prompts = frozenset(with_prompts)

    def __call__(self, request: GenerationRequest) -> ObservationGate | None:
        if request.resumption.is_reported_elsewhere:
            return None
        span = self._new_trace() if self._new_trace is not None else None
        if self._recorded:
            earlier = request.resumption
            request = request.with_options(
                origin=None if span is None else replace(request.origin, span=span),
                prompt=replace(request.prompt, records_prompts=True),
                resumption=earlier if earlier.seed else replace(earlier, seed=token_hex(16)),
            )
        elif span is not None:
            request = request.with_options(origin=replace(request.origin, span=span))
        if request.model in self._with_prompts and not request.prompt.records_prompts:
            request = request.with_options(prompt=replace(request.prompt, records_prompts=True))
        arrived, origin, caller = ARRIVED.get(), request.origin, request.origin.caller
        began = GenerationStarted(
            request_id=origin.request_id,
            tenant=origin.tenant,
            key=caller.key if caller is not None else "",
            key_name=caller.key_name if caller is not None else "",
            surface=origin.surface,
            model=request.model,
            background=self._background,
            at=time.time(),
            resumed=bool(request.resumption.journal),
            span=span,
            span_parent=arrived.span_id if arrived is not None else "",
            recorded_request=to_record(request) if self._recorded else None,
            details=self._details(request) if span is not None and span.sampled else None,
            workload=workload_of(request),
            influences=influences_on(request) if request.prompt.records_prompts else None,
        )
        return ObservationGate(request, began, self._observers)

    def _details(self, request: GenerationRequest) -> RequestDetails:
        answer = request.answer
        conversation = request.conversation if self._with_content and request.passthrough is None else None
        return RequestDetails(IDENTITY.get(), answer.sampling, answer.max_tokens, answer.stop, conversation)


def workload_of(request: GenerationRequest) -> int:
    """Return a hash that is the same for requests with the same client, tools and answer form."""
    caller, form = request.origin.caller, request.answer.form
    key = caller.key if caller is not None else request.origin.tenant
    tools = tuple([tool.name for tool in request.conversation.tools])
    # The names of the first properties distinguish schemas well enough, and cost little for large ones.
    names: tuple[str, ...] = ()
    if form is not None and form.schema is not None and isinstance(found := form.schema.get("properties"), Mapping):
        names = tuple(found)[:MAX_PROPERTIES]
    return hash((key, request.raw is not None, tools, None if form is None else (form.name, form.choices, names)))


def influences_on(request: GenerationRequest) -> TokenInfluences:
    """Return the options that can change the tokens of the answer."""
    answer, tools = request.answer, request.conversation.tools
    return TokenInfluences(
        answer.sampling,
        is_raw_prompt=request.raw is not None,
        has_form=answer.form is not None,
        has_tool_choice=answer.choice is not None,
        has_strict_tools=any(isinstance(tool, FunctionTool) and tool.strict for tool in tools),
        has_reasoning_budget=answer.reasoning_budget is not None,
    )


@dataclass(slots=True)
class ObservedProgress:
    """Facts about a generation so far that its events show."""

    first_s: float | None = None
    channels: dict[str, int] = field(default_factory=dict)
    repairs: list[Repaired] = field(default_factory=list)
    finished: Finished | None = None
    collected: list[Closed | Repaired] = field(default_factory=list)
    # The open item, and the texts of its deltas.
    open_item: Item | None = None
    open_texts: list[str] = field(default_factory=list)

    def collect_open(self, batch: Sequence[Event]) -> None:
        """Collect the text of the open item."""
        for event in batch:
            if isinstance(event, Delta):
                self.open_texts.append(event.text)
            elif isinstance(event, Opened):
                self.open_item, self.open_texts = event.item, []
            elif isinstance(event, Closed):
                self.open_item = None

    def cut_off(self) -> Closed | None:
        """Return the item inside which the answer ended, or None."""
        if self.open_item is None or not self.open_texts:
            return None
        return Closed(self.open_item, "".join(self.open_texts), complete=False)

    def collect(self, batch: Sequence[Event]) -> None:
        """Collect the events of a recorded generation."""
        for event in batch:
            # Nearly all events are deltas, which are not collected.
            if type(event) is not Delta and isinstance(event, (Closed, Repaired)):
                self.collected.append(event)

    def count(self, batch: Sequence[Event]) -> None:
        for event in batch:
            kind = type(event)
            if kind is Delta:
                continue
            if kind is Closed:
                assert isinstance(event, Closed)
                if channel := _channel(event.item):
                    self.channels[channel] = self.channels.get(channel, 0) + _body(event.tokens)
            elif kind is Repaired:
                assert isinstance(event, Repaired)
                self.repairs.append(event)
            elif kind is Finished:
                assert isinstance(event, Finished)
                self.finished = event


def _body(tokens: Tokens) -> int:
    """Count the tokens of a message body, without header and terminator."""
    return len(tokens) - tokens.index(MESSAGE) - 2 if MESSAGE in tokens else 0


def _channel(item: Item) -> str:
    if isinstance(item, Text):
        return "final" if item.phase is Phase.FINAL else "commentary"
    return "" if isinstance(item, Listing) else CHANNELS[type(item)]


class ObservationGate(Gate):
    """Gate that reports the start, progress and end of one generation to the observers.

    If the stream of the generation is closed before its first batch is requested, the gate reports nothing.
    """

    def __init__(self, request: GenerationRequest, began: GenerationStarted, observers: Sequence[Observer]) -> None:
        self._request = request
        self._start = began
        self._observers = observers
        self._seen: ObservedProgress | None = None
        # The first batch of a resumed generation repeats output of the earlier generation, which was already reported.
        self._is_repeated = began.resumed
        has_content = began.details is not None and began.details.conversation is not None
        self._collects = has_content or began.recorded_request is not None
        # Only a filter sees every delta. Deltas are needed only for the text of an answer that is cut off.
        self.filters = has_content

    async def admit(self, request: GenerationRequest) -> GenerationRequest:
        # This gate is the outermost, so `request` is the original one.
        return self._request

    def start(self) -> None:
        self._seen = ObservedProgress()
        for observer in self._observers:
            try:
                observer.generation_started(self._start)
            except Exception as error:
                log.exception("an observer failed", exc_info=error)

    async def filter(self, batch: list[Event]) -> list[Event]:
        # This gate is the outermost, so it gets the events that the client receives.
        assert self._seen is not None
        self._seen.collect_open(batch)
        return batch

    def observe(self, batch: Sequence[Event]) -> None:
        seen = self._seen
        assert seen is not None
        # Nearly all batches are a single delta, and only the first delta of an answer matters.
        if seen.first_s is not None and len(batch) == 1 and type(batch[0]) is Delta:
            return
        if self._collects:
            seen.collect(batch)
        if self._is_repeated:
            self._is_repeated = False
            return
        if seen.first_s is None:
            seen.first_s = self.report.now_s()
        seen.count(batch)

    def end(self, error: BaseException | None) -> None:
        if self._seen is None:
            return
        outcome, code = outcome_of(error, has_finished=self._seen.finished is not None)
        done = to_done(self._start, self.report, self._seen, outcome, code)
        for observer in self._observers:
            try:
                observer.ended(done)
            except Exception as error:
                log.exception("an observer failed", exc_info=error)


def to_done(
    began: GenerationStarted, report: GenerationReport, seen: ObservedProgress, outcome: GenerationOutcome, error: str
) -> GenerationDone:
    finished, facts = seen.finished, report.facts
    return GenerationDone(
        start=began,
        ended_s=report.now_s(),
        outcome=outcome,
        first_s=seen.first_s,
        error=error,
        finish=finished.reason.value if finished is not None else "",
        usage=finished.usage if finished is not None else None,
        channels=seen.channels,
        recoveries=report.recoveries,
        repairs=seen.repairs,
        waits=facts.waits,
        steps=facts.steps,
        tools=facts.tools,
        refused_constraints=facts.refused_constraints,
        tries=report.tries,
        backend=report.backend,
        failovers=report.failovers,
        left_out=facts.left_out,
        unmet=report.unmet,
        journal=report.journal,
        output=seen.collected,
        cut_off=seen.cut_off(),
        usage_so_far=facts.usage if finished is None else finished.usage,
        cost=facts.cost,
    )
