"""Record of one request: its sender, the deployments that answered, times, usage and cost.

It contains no content of the conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from itertools import compress
from typing import Any, Final, NamedTuple, TypeAlias

from unisono.core.access import Caller
from unisono.core.generation import NO_USAGE
from unisono.core.observer import GenerationDone, GenerationOutcome
from unisono.core.quotas import charged_input
from unisono.core.trace_context import IDENTITY
from unisono.errors import InternalError, UnisonoError


def outcome_of(error: BaseException | None, *, has_finished: bool) -> tuple[GenerationOutcome, str]:
    """Return the outcome of a generation, and the code of the error that ended it.

    `error` is the exception that ended the generation, or None. `has_finished`: the last event was emitted. The code is
    empty if the generation was completed or cancelled.
    """
    match error:
        case None:
            return GenerationOutcome.COMPLETED, ""
        case UnisonoError():
            return GenerationOutcome.FAILED, error.code
        case asyncio.CancelledError() | GeneratorExit():
            # A consumer may stop iterating after the last event. This is not a cancellation.
            return (GenerationOutcome.COMPLETED if has_finished else GenerationOutcome.LEFT), ""
        case _:
            return GenerationOutcome.FAILED, InternalError.code


def error_of_request(code: str, generations: Iterable[GenerationDone]) -> str:
    """Return `code`; if it is empty, return the error code of the first failed generation."""
    # `code` is the code in an error body. A stream that fails later has no error body, so its generation has the code.
    return code or next((done.error for done in generations if done.error), "")


# Maximum number of characters of a value that the client chooses.
MAX_VALUE_LENGTH: Final = 256
# Maximum number of attempts, of recoveries and of notes in a record.
MAX_ENTRIES: Final = 32
# Value of `method` for an answer on a WebSocket or in the background.
NO_METHOD: Final = ""
# Values of `route` in the records of answers that have a record of their own.
BACKGROUND: Final = "background"
WEBSOCKET: Final = "websocket"
# Value of `finish` if the client disconnected or cancelled the answer.
LEFT: Final = "left"


class RequestRecord(NamedTuple):
    """Facts about a request that has ended.

    `at` is the start of the request in seconds since 1970. `route` is the path template, empty for an unknown path.
    `status` is the HTTP status, 0 for a separate answer, and `error` an error code, empty without an error. `tenant` is
    the team of the key if it has a team. `key` is the public id of a virtual key, and `key_name` its alias. `user` is
    the end user that the request names. `model` is the requested model, and `served_model` the model that answered.
    `attempts` are pairs of a deployment and its error code, in order. Costs are in micro-dollars, times in seconds.
    `separate_answer` is True for a request whose answer has a record of its own, with the same `id`: in the background,
    or on a WebSocket.
    """

    id: str
    at: float
    duration_s: float
    method: str = NO_METHOD
    route: str = ""
    status: int = 0
    error: str = ""
    tenant: str = ""
    key: str = ""
    key_name: str = ""
    user: str = ""
    model: str = ""
    served_model: str = ""
    deployment: str = ""
    attempts: tuple[tuple[str, str], ...] = ()
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    first_token_s: float | None = None
    waited_s: float = 0.0
    finish: str = ""
    recoveries: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cost: int = 0
    trace_id: str = ""
    separate_answer: bool = False

    def with_generations(self, generations: Sequence[GenerationDone]) -> RequestRecord:
        """Return the record with the facts of the request's generations."""
        if not generations:
            return self
        first, last = generations[0], generations[-1]
        served_model, first_token_s = "", None
        usage, cost, waited_s = NO_USAGE, 0, 0.0
        attempts: list[tuple[str, str]] = []
        for done in generations:
            usage += done.charged_usage
            waited_s += done.waited_s
            cost += done.cost
            if done.first_s is not None:
                arrived_s = max(0.0, done.start.at - self.at + done.first_s)
                first_token_s = arrived_s if first_token_s is None else min(first_token_s, arrived_s)
            for attempt in done.tries:
                attempts.append((attempt.deployment, attempt.failure))
                served_model = attempt.model
        span = first.start.span
        return self._replace(
            error=error_of_request(self.error, generations),
            model=self.model or first.start.model,
            served_model=served_model,
            deployment=last.backend,
            attempts=tuple(attempts[:MAX_ENTRIES]),
            input_tokens=charged_input(usage),
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            first_token_s=first_token_s,
            waited_s=waited_s,
            finish=LEFT if last.outcome is GenerationOutcome.LEFT else last.finish,
            recoveries=_recoveries_of(generations),
            cost=cost,
            trace_id=span.trace_id if span is not None and span.sampled else "",
        )


def record_of_answer(
    id: str,
    route: str,
    caller: Caller,
    model: str,
    generations: Sequence[GenerationDone],
    *,
    at: float,
    error: str = "",
) -> RequestRecord:
    """Return the record of an answer that is recorded separately from its request.

    `at` is the time of the record in seconds since 1970; it is used only without `generations`. `error` is the code of
    an error that belongs to no generation. The end user is that of the current context.
    """
    began = generations[0].start.at if generations else at
    ended = max((done.start.at + done.ended_s for done in generations), default=at)
    return RequestRecord(
        id=id,
        at=began,
        duration_s=ended - began,
        route=route,
        error=error,
        tenant=caller.tenant,
        key=caller.key,
        key_name=caller.key_name,
        user=IDENTITY.get().user,
        model=model[:MAX_VALUE_LENGTH],
        finish="" if error else LEFT,
    ).with_generations(generations)


def _recoveries_of(generations: Sequence[GenerationDone]) -> tuple[str, ...]:
    """Return the names of the rules that changed the output, each once."""
    rules: list[str] = []
    for done in generations:
        rules += done.recoveries
        for repair in done.repairs:
            rules.append(repair.rule)
    return tuple(dict.fromkeys(rules))[:MAX_ENTRIES]


# For each field of `RequestRecord`, in order: True if the facts include the field even if it has no value.
_ALWAYS_IN_FACTS: Final = tuple(name == "duration_s" for name in RequestRecord._fields)
_TIMES: Final = frozenset({"at", "duration_s", "first_token_s", "waited_s"})
# Unit of the costs in a record, in dollars.
COST_UNIT: Final = 1e-6


def to_facts(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of a record that have a value, as JSON data.

    Times are in seconds. The cost is in dollars, unlike in the record.
    """
    is_fact = map(any, zip(record, _ALWAYS_IN_FACTS, strict=True))
    facts: dict[str, Any] = dict(compress(zip(RequestRecord._fields, record, strict=True), is_fact))
    for name in _TIMES & facts.keys():
        facts[name] = round(facts[name], 6)
    if record.attempts:
        facts["attempts"] = [
            {"deployment": name, "error": failure} if failure else {"deployment": name}
            for name, failure in record.attempts
        ]
    if record.cost:
        facts["cost"] = round(record.cost * COST_UNIT, 9)
    return facts


# Receiver of the record of each request. It returns immediately and raises no exception.
RecordSink: TypeAlias = Callable[[RequestRecord], None]

# Ended generations of the current record. The record is that of an HTTP request, a background response or an answer on
# a WebSocket; None elsewhere. A WebSocket may stay open for hours, so each answer on a WebSocket has its own record.
GENERATIONS: ContextVar[list[GenerationDone] | None] = ContextVar("GENERATIONS", default=None)
