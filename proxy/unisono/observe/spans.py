"""OpenTelemetry spans of ended generations and of rejected requests.

The spans follow OpenTelemetry's conventions for generative AI. The span of a generation has one child span per step and
one per server tool call. A step has one child span per attempt on a backend. Spans contain names, numbers and codes.
`span_content` adds prompts and answers if the operator has enabled this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from enum import Enum
from itertools import groupby
from typing import Final, TypeAlias

from unisono.core.frozen import dataclass
from unisono.core.generation import NO_USAGE
from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted, StepDone, ToolDone, ToolEnd
from unisono.core.quotas import MILLION
from unisono.core.request_record import GENERATIONS, RequestRecord
from unisono.core.trace_context import ARRIVED, TraceContext, step_span, tool_span, try_span

Value: TypeAlias = str | bool | int | float | Sequence[str]

PROVIDER: Final = "unisono"
# Values of `error.type`. A call whose outcome is unknown may have run.
TOOL_ERRORS: Final = {ToolEnd.ERROR: "tool_error", ToolEnd.UNKNOWN: "outcome_unknown", ToolEnd.LEFT: "cancelled"}
LEFT: Final = "cancelled"
# Status of a request whose client has closed the connection.
CLIENT_LEFT: Final = 499
# Operation names by API surface; the operation of any other surface is `chat`.
OPERATIONS: Final = {"completions": "text_completion", "embeddings": "embeddings"}


class SpanType(Enum):
    """The OpenTelemetry span kinds in use."""

    SERVER = "server"
    INTERNAL = "internal"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Span:
    """Span of a trace. Its times are in nanoseconds since the epoch.

    `parent` is the id of the parent span, or "" without one. `error` is an error code, or "" for success.
    """

    name: str
    kind: SpanType
    at: TraceContext
    parent: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""
    # Generation whose content the exporter adds; None for a span without content.
    content: GenerationDone | None = None


def spans_of(done: GenerationDone, kinds: Mapping[str, str]) -> list[Span]:
    """Return the generation's span and its descendants.

    Returns an empty list if the generation was not traced or not sampled. `kinds` maps deployments to backend kinds.
    """
    request_span = done.start.span
    if request_span is None or not request_span.sampled:
        return []
    started_at = done.start.at
    spans = [_generation_span(done, request_span)]
    # An attempt is one generation on one backend. The attempts of a step follow each other, because they are recorded
    # in order.
    tries = enumerate(done.steps)
    for number, group in groupby(tries, key=lambda each: each[1].step):
        each = list(group)
        at = request_span.child(step_span(number))
        spans.append(_step(number, [step for _, step in each], at, request_span, started_at))
        spans += (_attempt(done, index, step, at, kinds) for index, step in each)
    spans += _tools(done.tools, request_span, started_at)
    return spans


def _ns(started_at: float, after_s: float) -> int:
    return int((started_at + after_s) * 1e9)


def operation_of(began: GenerationStarted) -> str:
    """Return the operation name in OpenTelemetry's conventions for generative AI."""
    return OPERATIONS.get(began.surface, "chat")


def _generation_span(done: GenerationDone, at: TraceContext) -> Span:
    began, usage = done.start, done.charged_usage
    # Names with the prefix `gen_ai` are those of the OpenTelemetry conventions for generative AI. All others belong
    # to this gateway.
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation_of(began),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": began.model,
        **_request_attributes(began),
        "unisono.request.id": began.request_id,
        "unisono.surface": began.surface,
        "unisono.background": began.background,
        "unisono.queue.seconds": round(done.waited_s, 6),
        "unisono.failovers": done.failovers,
    }
    if done.tries:
        attributes["gen_ai.response.model"] = done.tries[-1].model
    if done.cost:
        attributes["gen_ai.usage.cost"] = done.cost / MILLION
    if done.backend:
        attributes["unisono.backend"] = done.backend
    if done.recoveries:
        attributes["unisono.recoveries"] = list(done.recoveries)
    if done.first_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = round(done.first_s, 6)
    if done.finish:
        attributes["gen_ai.response.finish_reasons"] = [done.finish]
    if done.usage is not None or usage != NO_USAGE:
        attributes |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        }
    # A disconnect of the client is not an error of the gateway, but the span must show why the generation ended.
    error = LEFT if done.outcome is GenerationOutcome.LEFT else done.error
    times = 0.0, done.ended_s
    name = f"{operation_of(began)} {began.model}"
    span = create_span(name, SpanType.SERVER, at, began.span_parent, began.at, times, attributes, error)
    has_content = began.details is not None and began.details.conversation is not None
    return replace(span, content=done) if has_content else span


def _request_attributes(began: GenerationStarted) -> dict[str, Value]:
    """Return the attributes of a request: its caller, and its ids and sampling if known."""
    sender = caller_attributes(began.key, began.key_name, began.tenant)
    details = began.details
    if details is None:
        return sender
    identity, sampling = details.identity, details.sampling
    found: dict[str, Value | None] = {
        # Langfuse and others read the end user and the conversation from `user.id` and `session.id`.
        "user.id": identity.user,
        "session.id": identity.conversation_id,
        "gen_ai.conversation.id": identity.conversation_id,
        "gen_ai.response.id": identity.response_id,
        "gen_ai.request.max_tokens": details.max_tokens,
        "gen_ai.request.stop_sequences": list(details.stop),
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
    }
    known = {name: value for name, value in found.items() if value not in ("", None, [])}
    return {
        **sender,
        **known,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
    }


def caller_attributes(key: str, key_name: str, tenant: str) -> dict[str, Value]:
    """Return the attributes of a key and its team.

    There is no team attribute if the tenant equals the key, because a key without a team is its own tenant.
    """
    found = {"unisono.key.id": key, "unisono.key.alias": key_name, "unisono.team.id": "" if tenant == key else tenant}
    return {name: value for name, value in found.items() if value}


def _step(number: int, tries: Sequence[StepDone], at: TraceContext, span: TraceContext, started_at: float) -> Span:
    attributes: dict[str, Value] = {"unisono.step": number, "unisono.tries": len(tries)}
    times = tries[0].started_s, tries[-1].ended_s
    return create_span(
        f"step {number}", SpanType.INTERNAL, at, span.span_id, started_at, times, attributes, tries[-1].failure
    )


def _attempt(done: GenerationDone, index: int, step: StepDone, below: TraceContext, kinds: Mapping[str, str]) -> Span:
    model = done.start.model
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation_of(done.start),
        "gen_ai.provider.name": kinds.get(step.deployment, PROVIDER),
        "gen_ai.request.model": model,
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": step.prompt_tokens,
        "gen_ai.usage.output_tokens": step.generated,
        "unisono.backend": step.deployment,
    }
    if step.cached_tokens is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = step.cached_tokens
    if step.first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = round(step.first_token_s - step.started_s, 6)
    if step.finish:
        attributes["gen_ai.response.finish_reasons"] = [step.finish]
    times = step.started_s, step.ended_s
    at = below.child(try_span(index))
    return create_span(
        f"{operation_of(done.start)} {model}",
        SpanType.CLIENT,
        at,
        below.span_id,
        done.start.at,
        times,
        attributes,
        step.failure,
    )


def _tools(tools: Sequence[ToolDone], span: TraceContext, started_at: float) -> Iterator[Span]:
    for index, tool in enumerate(tools):
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": tool.name,
            "gen_ai.tool.call.id": tool.call_id,
            "gen_ai.tool.type": "extension",
            "mcp.method.name": "tools/call",
            "unisono.tool_server": tool.server,
        }
        error = TOOL_ERRORS.get(tool.outcome, "")
        times = tool.started_s, tool.ended_s
        at = span.child(tool_span(index))
        yield create_span(
            f"execute_tool {tool.name}", SpanType.CLIENT, at, span.span_id, started_at, times, attributes, error
        )


def create_span(
    name: str,
    kind: SpanType,
    at: TraceContext,
    parent: str,
    started_at: float,
    times: tuple[float, float],
    attributes: Mapping[str, Value],
    error: str,
) -> Span:
    """Build a span with the context `at`.

    `times` are its start and end, in seconds after `started_at`, which is a Unix time.
    """
    start, end = times
    return Span(name, kind, at, parent, _ns(started_at, start), _ns(started_at, end), attributes, error)


class RefusalSpans:
    """Receiver of request records that exports a span for each rejected request.

    A request that has started a generation already has the span of the generation. `export` receives the spans.
    `new_trace` returns the context of a new span, and decides whether it is sampled. Requests to the routes `probes`
    get no span.
    """

    def __init__(
        self,
        export: Callable[[Sequence[Span]], None],
        new_trace: Callable[[], TraceContext],
        probes: Collection[str],
    ) -> None:
        self._export = export
        self._new_trace = new_trace
        self._probes = frozenset(probes)

    def __call__(self, record: RequestRecord) -> None:
        # A generation has its own span, even if it was rejected.
        if record.status < 400 or record.status == CLIENT_LEFT or record.route in self._probes or GENERATIONS.get():
            return
        at, arrived = self._new_trace(), ARRIVED.get()
        if at.sampled:
            self._export([refusal_span(record, at, arrived.span_id if arrived is not None else "")])


def refusal_span(record: RequestRecord, at: TraceContext, parent: str) -> Span:
    """Return the span of a request that was rejected before a generation.

    `at` is the context of the new span. `parent` is the id of its parent span, or "" without one.
    """
    found: dict[str, Value] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model,
        "user.id": record.user,
        "unisono.request.id": record.id,
    }
    attributes = caller_attributes(record.key, record.key_name, record.tenant)
    attributes |= {name: value for name, value in found.items() if value}
    name, times = f"{record.method} {record.route}".strip(), (0.0, record.duration_s)
    error = record.error or str(record.status)
    return create_span(name, SpanType.SERVER, at, parent, record.at, times, attributes, error)
