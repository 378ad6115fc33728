"""Requests of an evaluation to a running gateway.

Finished cases are written to a file, so that an interrupted run can continue.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TextIO

import aiohttp

from unisono.core.json_syntax import parsed_json
from unisono.core.route_protocol import DEPLOYMENT_HEADER
from unisono.evaluation.cases import Case
from unisono.evaluation.checks import fault_of
from unisono.evaluation.scorecard import CaseResult, EvaluationTarget, Run

MAX_FAULT: Final = 300
# Statuses that all further requests would get too: for a wrong key, a forbidden model or deployment, a wrong name.
HOPELESS: Final = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND})


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings for sending cases. `timeout_s` is the time limit for one answer in seconds."""

    url: str
    key: str
    seed: int
    temperature: float
    max_tokens: int
    concurrency: int
    timeout_s: float


class EvaluationRefused(Exception):
    """Raised with the gateway's message if the gateway refuses the key, model or deployment."""


class OtherRun(Exception):
    """Raised if finished cases belong to a run with different settings.

    The message names these settings.
    """


class FinishedCases:
    """Finished cases in a file: the settings in the first line, then one JSON array per line.

    A line contains the suite, target and result of each case that was finished together. A partly written line is
    ignored.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Open the file, or create it.

        Raises OtherRun if the file was written with different settings, and ValueError if the file is damaged.
        """
        self._results: dict[tuple[str, EvaluationTarget, str], CaseResult] = {}
        # `splitlines` would also split at other line separators, which texts in JSON may contain.
        lines = path.read_text("utf-8").split("\n") if path.is_file() else []
        if lines and (before := parsed_json(lines[0])) != settings:
            if not isinstance(before, dict):
                raise ValueError("the first line has no settings")
            raise OtherRun(", ".join(name for name in settings if before.get(name) != settings[name]))
        for number, line in enumerate(lines[1:], 2):
            # A killed process may have written half of its last line.
            try:
                cases = parsed_json(line)
            except ValueError:
                continue
            try:
                self._read(cases)
            except (TypeError, ValueError, KeyError) as error:
                raise ValueError(f"line {number} is damaged") from error
        self._file: TextIO = path.open("a", encoding="utf-8")
        if lines:
            self._file.write("\n")
        else:
            self._write(settings)

    def _read(self, cases: Any) -> None:
        for suite, target, result in cases:
            # A case without an answer is sent again.
            if not result["has_failed"]:
                self._results[suite, EvaluationTarget(**target), result["id"]] = CaseResult(**result)

    @property
    def count(self) -> int:
        return len(self._results)

    def find(self, suite: str, target: EvaluationTarget, id: str) -> CaseResult | None:
        return self._results.get((suite, target, id))

    def runs_of(self, suite: str, target: EvaluationTarget) -> list[Run]:
        """Return the finished runs of a suite, and of its parts, which are named `SUITE/PART`."""
        found: dict[str, list[CaseResult]] = {}
        for (name, of_target, _), result in self._results.items():
            if of_target == target and (name == suite or name.startswith(f"{suite}/")):
                found.setdefault(name, []).append(result)
        return [Run(name, target, results) for name, results in found.items()]

    def add(self, *runs: Run) -> None:
        """Add the results of runs in one line. A later process reads either all or none of them."""
        for run in runs:
            self._results.update(((run.suite, run.target, result.id), result) for result in run.results)
        self._write([(run.suite, asdict(run.target), asdict(result)) for run in runs for result in run.results])

    def close(self) -> None:
        self._file.close()

    def _write(self, value: object) -> None:
        self._file.write(json.dumps(value, ensure_ascii=False) + "\n")
        self._file.flush()


async def run_cases(
    settings: Settings,
    targets: Sequence[EvaluationTarget],
    suites: Mapping[str, Sequence[Case]],
    progress: FinishedCases,
    finished: Callable[[], None] = lambda: None,
) -> list[Run]:
    """Send all cases to all targets, except finished cases. Calls `finished` after each case.

    Raises EvaluationRefused if the gateway refuses the key, a model or a deployment.
    """
    free = asyncio.Semaphore(settings.concurrency)
    headers = {"authorization": f"Bearer {settings.key}"} if settings.key else {}
    timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

        async def work(suite: str, target: EvaluationTarget, case: Case) -> CaseResult:
            if (known := progress.find(suite, target, case.id)) is not None:
                return known
            async with free:
                result = await _answered(session, settings, target, case)
            progress.add(Run(suite, target, [result]))
            finished()
            return result

        runs = []
        for suite, cases in suites.items():
            for target in targets:
                try:
                    async with asyncio.TaskGroup() as group:
                        tasks = [group.create_task(work(suite, target, case)) for case in cases]
                except BaseExceptionGroup as errors:
                    if (refused := errors.subgroup(EvaluationRefused)) is None:
                        raise
                    raise refused.exceptions[0] from None
                runs.append(Run(suite, target, [task.result() for task in tasks]))
    return runs


async def _answered(
    session: aiohttp.ClientSession, settings: Settings, target: EvaluationTarget, case: Case
) -> CaseResult:
    body = {
        "model": target.model,
        "seed": settings.seed,
        "temperature": settings.temperature,
        "max_completion_tokens": settings.max_tokens,
        **({"reasoning_effort": target.effort} if target.effort else {}),
        **case.body,
    }
    headers = {DEPLOYMENT_HEADER: target.deployment} if target.deployment else {}
    began = time.monotonic()
    try:
        async with session.post(f"{settings.url}/v1/chat/completions", json=body, headers=headers) as answer:
            found = await answer.json(content_type=None)
            if answer.status != HTTPStatus.OK:
                message = f"HTTP {answer.status}: {found['error']['message']}"[:MAX_FAULT]
                if answer.status in HOPELESS:
                    raise EvaluationRefused(message)
                return CaseResult(case.id, message, has_failed=True)
        duration_s = time.monotonic() - began
        choice, usage = found["choices"][0], found["usage"]
        fault = fault_of(case, choice["message"])
        if fault and choice["finish_reason"] == "length":
            fault = f"cut off after {usage['completion_tokens']} tokens"
        return CaseResult(
            case.id,
            fault[:MAX_FAULT],
            duration_s=round(duration_s, 3),
            input_tokens=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
        )
    except (aiohttp.ClientError, TimeoutError) as error:
        name = (
            f"no answer within {settings.timeout_s:g} s; raise --timeout"
            if isinstance(error, TimeoutError)
            else f"no answer: {error}"
        )
        return CaseResult(case.id, name[:MAX_FAULT], has_failed=True)
    except (ValueError, LookupError, TypeError, AttributeError):
        return CaseResult(case.id, "the answer does not have the form of Chat Completions", has_failed=True)
