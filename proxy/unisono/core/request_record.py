"""Record of one request: who sent it, who answered, and at what cost.

It contains no content of the conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Final, TypeAlias

from unisono.core.frozen import statically_frozen
from unisono.core.observer import GenerationDone, GenerationOutcome

# Maximum characters of a value that the client chooses.
MAX_VALUE_LENGTH: Final = 256
# Maximum number of attempts, recoveries and notes of a record.
MAX_ENTRIES: Final = 32
# Method of the record of an answer on a WebSocket or in the background.
NO_METHOD: Final = ""


@statically_frozen
@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Facts about a request that has ended.

    `at` is its start in seconds since 1970, `route` the path template, empty for an unknown path. `status` is the HTTP
    status, `error` an error code. `tenant` is the team of a key that has one. `key` is the public id of a virtual key,
    `key_name` its alias, `user` the end user that the request names. `model` is the requested model, `served_model` the
    one that answered. `attempts` are pairs of a deployment and its error code, in order. Costs are in micro-dollars,
    times in seconds.
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

    def with_generations(self, generations: Sequence[GenerationDone]) -> RequestRecord:
        """Return the record with the facts of the request's generations."""
        if not generations:
            return self
        usages = [done.usage or done.usage_so_far for done in generations]
        first, last = generations[0], generations[-1]
        firsts = [done.start.at - self.at + done.first_s for done in generations if done.first_s is not None]
        tries = [attempt for done in generations for attempt in done.tries]
        recoveries = dict.fromkeys(
            rule for done in generations for rule in (*done.recoveries, *(repair.rule for repair in done.repairs))
        )
        span = first.start.span
        return replace(
            self,
            error=self.error or next((done.error for done in generations if done.error), ""),
            model=self.model or first.start.model,
            served_model=tries[-1].model if tries else "",
            deployment=last.backend,
            attempts=tuple((each.deployment, each.failure) for each in tries[:MAX_ENTRIES]),
            input_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            output_tokens=sum(usage.completion_tokens for usage in usages),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
            first_token_s=max(0.0, min(firsts)) if firsts else None,
            waited_s=sum(done.waited_s for done in generations),
            finish="left" if last.outcome is GenerationOutcome.LEFT else last.finish,
            recoveries=tuple(recoveries)[:MAX_ENTRIES],
            cost=sum(done.cost for done in generations),
            trace_id=span.trace_id if span is not None and span.sampled else "",
        )


FIELDS: Final = tuple(field.name for field in fields(RequestRecord))
# Values of a record in the order of `FIELDS`.
values_of: Final[Callable[[RequestRecord], tuple[Any, ...]]] = attrgetter(*FIELDS)
# Costs in a record are in micro-dollars.
COST_UNIT: Final = 1e-6


def to_facts(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of a record that have a value, for JSON.

    Times are in seconds, the cost is in dollars.
    """
    facts: dict[str, Any] = {
        name: round(value, 6) if type(value) is float else value
        for name, value in zip(FIELDS, values_of(record), strict=True)
        if value or name in ("status", "duration_s")
    }
    if record.attempts:
        facts["attempts"] = [
            {"deployment": name, **({"error": failure} if failure else {})} for name, failure in record.attempts
        ]
    if record.cost:
        facts["cost"] = round(record.cost * COST_UNIT, 9)
    return facts


# Receiver of the record of each request. It returns at once and does not raise.
RecordSink: TypeAlias = Callable[[RequestRecord], None]

# Generations of the current request that have ended. None outside of a request, and in a WebSocket, which may stay open
# for hours: each answer there has a record of its own.
GENERATIONS: ContextVar[list[GenerationDone] | None] = ContextVar("GENERATIONS", default=None)
