"""Requests of cases through a running gateway, and the outcomes by level of difficulty."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tests.e2e.gateway import Answer, Gateway, message_of
from tests.structured.cases import Case

MAX_TOKENS = 200
CONCURRENCY = 4
# llama-server may need minutes for an answer of open repetitions on two cores.
REQUEST_TIMEOUT_S = 900
# Cases after which the figures so far are reported. The whole measurement may take hours.
REPORTED_EVERY = 25


class Outcome(StrEnum):
    VALID = "valid"
    # The answer is a refusal, reports `unisono.unmet`, or was cut by the token limit.
    DECLARED = "declared failure"
    # An invalid answer that looks like a valid one.
    INVALID = "invalid"
    # Any other status than 200, or no answer in time.
    ERROR = "error"


@dataclass
class Figures:
    """Outcomes by level, with the cases of which the outcome is a fault."""

    outcomes: dict[str, Counter[Outcome]] = field(default_factory=dict)
    regenerated: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[Case, str]] = field(default_factory=list)

    def share_valid(self, level: str) -> float:
        counts = self.outcomes[level]
        return counts[Outcome.VALID] / counts.total()

    def table(self, wire: str) -> str:
        """Return a Markdown table with one row for each level."""
        columns = [*Outcome, "regenerated"]
        rows = [f"| {wire} | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
        for level, counts in self.outcomes.items():
            values = [*(counts[outcome] for outcome in Outcome), self.regenerated[level]]
            rows.append(f"| {level} | " + " | ".join(map(str, values)) + " |")
        return "\n".join(rows)


async def measure(
    gateway: Gateway, cases: Iterable[Case], report: Callable[[int, Figures], None] = lambda _, __: None
) -> Figures:
    """Send all cases, half of them streamed, at temperature 0 unless a case has its own.

    `report` receives the number of finished cases and the figures so far.
    """
    figures = Figures()
    free = asyncio.Semaphore(CONCURRENCY)

    async def send(number: int, case: Case) -> None:
        await measured(number, case)
        finished = sum(counts.total() for counts in figures.outcomes.values())
        if finished % REPORTED_EVERY == 0:
            report(finished, figures)

    async def measured(number: int, case: Case) -> None:
        try:
            async with free, asyncio.timeout(REQUEST_TIMEOUT_S):
                answer = await gateway.chat(
                    messages=[{"role": "user", "content": case.question}],
                    max_tokens=MAX_TOKENS,
                    stream=number % 2 == 1,
                    **{"temperature": 0, **case.fields},
                )
        except TimeoutError:
            # The other cases are measured all the same.
            figures.outcomes[case.level][Outcome.ERROR] += 1
            figures.faults.append((case, f"no answer within {REQUEST_TIMEOUT_S:g} s"))
            return
        outcome, shown, rules = _outcome(answer, case)
        figures.outcomes[case.level][outcome] += 1
        figures.regenerated[case.level] += "regenerated-answer" in rules
        if outcome in (Outcome.INVALID, Outcome.ERROR):
            figures.faults.append((case, shown))

    listed = [*cases]
    for case in listed:
        figures.outcomes.setdefault(case.level, Counter())
    async with asyncio.TaskGroup() as group:
        for number, case in enumerate(listed):
            group.create_task(send(number, case))
    return figures


def _outcome(answer: Answer, case: Case) -> tuple[Outcome, str, Iterable[str]]:
    has_ended = not answer.events or (answer.done and not any("error" in event for event in answer.events))
    if answer.status != 200 or not has_ended:
        return Outcome.ERROR, answer.raw.decode(errors="replace")[:500], ()
    message = message_of(answer)
    note: Mapping[str, list[str]] = message.note
    rules = note["recoveries"]
    text = message.content or ""
    is_declared = bool(note.get("unmet")) or message.finish_reason == "length"
    if is_declared:
        return Outcome.DECLARED, text, rules
    return Outcome.VALID if case.is_valid(text) else Outcome.INVALID, text, rules
