"""Implementation of `unisono eval`: runs suites of cases, and compares scorecards."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from http.client import HTTPException
from itertools import product
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import click

from unisono.cli.terminal import on_one_line, table_lines
from unisono.config.config_file import text_of
from unisono.core.frozen import dataclass
from unisono.core.json_syntax import parsed_json
from unisono.evaluation.cases import BFCL, BUNDLED, Case, MissingCases, load_cases
from unisono.evaluation.lm_eval import PREFIX, run_task
from unisono.evaluation.runner import EvaluationRefused, FinishedCases, OtherRun, Settings, run_cases
from unisono.evaluation.scorecard import (
    ROW_NAMES,
    EvaluationTarget,
    Run,
    RunComparison,
    Scorecard,
    compare,
    of_json,
    to_html,
    to_json,
    to_rows,
)

TIMEOUT_S: Final = 30.0
# Maximum number of lost cases, and of won cases, that a comparison lists.
MAX_LISTED: Final = 10


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Plan of a run: every suite with every combination of model, deployment and effort."""

    suites: Sequence[str]
    models: Sequence[str]
    deployments: Sequence[str]
    efforts: Sequence[str]
    limit: int | None
    lm_eval: str
    include: Path | None

    @property
    def targets(self) -> list[EvaluationTarget]:
        return [
            EvaluationTarget(*each) for each in product(self.models, self.deployments or ("",), self.efforts or ("",))
        ]


def start(plan: EvaluationPlan, settings: Settings, output: Path, html: Path | None) -> None:
    """Run the plan, or the rest of an interrupted run; then write the scorecard and print it."""
    if output.exists():
        raise click.ClickException(f"{output} exists; choose another --output, or delete the file")
    for option, path in (("--output", output), ("--html", html)):
        if path is not None and not path.parent.is_dir():
            raise click.BadParameter(f"there is no folder {path.parent}", param_hint=option)
    tasks = [suite.partition(":")[2] for suite in plan.suites if suite.startswith(f"{PREFIX}:")]
    try:
        suites = _suites(plan, settings.seed)
    except MissingCases as error:
        raise click.ClickException(str(error)) from error
    described = _described(plan, settings)
    gateway = _version(settings)
    partial = output.with_name(output.name + ".partial")
    # The address itself may be private.
    address = sha256(settings.url.encode()).hexdigest()
    try:
        progress = FinishedCases(partial, {**described, "url": address, "gateway": gateway})
    except OtherRun as error:
        raise click.ClickException(
            f"{partial} belongs to an interrupted run that differs in: {error}; repeat the options of that run, "
            "or delete the file"
        ) from None
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{partial} cannot be used: {error}; delete it, or repair it") from error
    if progress.count:
        click.echo(f"{progress.count} cases were finished before and are not repeated.", err=True)
    try:
        runs = asyncio.run(_all_runs(plan, settings, suites, tasks, progress))
    except (MissingCases, EvaluationRefused) as error:
        raise click.ClickException(str(error)) from error
    finally:
        progress.close()
    if failed := [result for run in runs for result in run.results if result.has_failed]:
        raise click.ClickException(
            f"{len(failed)} cases have no answer, the first one because of: {failed[0].fault}. "
            "Run the same command again: it sends only these cases."
        )
    card = Scorecard(datetime.now(UTC).isoformat(timespec="seconds"), gateway, described, runs)
    output.write_text(json.dumps(to_json(card), ensure_ascii=False, indent=1) + "\n", "utf-8")
    if html is not None:
        html.write_text(to_html(card), "utf-8")
    partial.unlink()
    click.echo("\n".join(table_lines([ROW_NAMES, *to_rows(card)])))
    click.echo(f"The scorecard is in {output}.", err=True)


def _suites(plan: EvaluationPlan, seed: int) -> dict[str, Sequence[Case]]:
    suites: dict[str, Sequence[Case]] = {}
    for name in plan.suites:
        if name.startswith(f"{PREFIX}:"):
            continue
        try:
            cases = load_cases(name, plan.limit, seed)
        except ValueError:
            raise click.BadParameter(
                f"{name!r} is not a suite; the suites are {BUNDLED}, {BFCL}, {BFCL}:CATEGORY and {PREFIX}:TASK",
                param_hint="--suite",
            ) from None
        for suite in dict.fromkeys(case.suite for case in cases):
            suites[suite] = [case for case in cases if case.suite == suite]
    return suites


def _described(plan: EvaluationPlan, settings: Settings) -> dict[str, Any]:
    """Return the settings to store in a scorecard. They contain no address and no key."""
    return {
        "suites": [*plan.suites],
        "models": [*plan.models],
        "deployments": [*plan.deployments],
        "efforts": [*plan.efforts],
        "limit": plan.limit,
        "seed": settings.seed,
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
    }


async def _all_runs(
    plan: EvaluationPlan,
    settings: Settings,
    suites: Mapping[str, Sequence[Case]],
    tasks: Sequence[str],
    progress: FinishedCases,
) -> list[Run]:
    total = len(plan.targets) * sum(map(len, suites.values()))

    def finished() -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{progress.count} of {total} cases", nl=progress.count == total, err=True)

    runs = await run_cases(settings, plan.targets, suites, progress, finished)
    for task, target in product(tasks, plan.targets):
        if known := progress.runs_of(f"{PREFIX}:{task}", target):
            runs += known
            continue
        click.echo(f"Running {PREFIX}:{task}; it prints nothing until it ends.", err=True)
        new = await run_task(task, settings, target, plan.lm_eval, limit=plan.limit, include=plan.include)
        # All results are stored at once, because a part of them would be mistaken for the whole task.
        progress.add(*new)
        runs += new
    return runs


def _version(settings: Settings) -> str:
    headers = {"authorization": f"Bearer {settings.key}"} if settings.key else {}
    try:
        # The scheme of the address was checked.
        request = Request(f"{settings.url}/version", headers=headers)  # noqa: S310
        with urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            return str(parsed_json(answer.read())["version"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise click.ClickException(f"{settings.url}: {error}") from error


def key_of(key_env: str) -> str:
    """Return the key in an environment variable, empty if the variable is not set.

    Raises ClickException if the key contains characters that are invalid in a header.
    """
    key = os.environ.get(key_env, "").strip()
    if not (key.isascii() and (key.isprintable() or not key)):
        raise click.ClickException(
            f"${key_env} contains characters that are not allowed in a header; set it to a valid key"
        )
    return key


def show_comparison(before: Path, after: Path, *, as_json: bool) -> bool:
    """Print a comparison of two scorecards, and return whether the second one is worse.

    A scorecard is worse if one of its suites has significantly fewer correct answers.
    """
    comparisons = compare(_read(before), _read(after))
    if not comparisons:
        raise click.ClickException(
            "the scorecards share no suite with the same effort and cases; run both with the same --suite, --effort, "
            "--limit and --seed"
        )
    if as_json:
        click.echo(json.dumps([_compared_json(each) for each in comparisons], ensure_ascii=False, indent=2))
    else:
        heads = ("suite", "before", "after", "cases", "difference", "95 %", "p", "")
        click.echo("\n".join(table_lines([heads, *map(_compared_row, comparisons)])))
        for each in comparisons:
            for name, ids in (("lost", each.lost), ("won", each.won)):
                if ids:
                    more = f" and {len(ids) - MAX_LISTED} more" if len(ids) > MAX_LISTED else ""
                    click.echo(f"{each.suite} {name}: {on_one_line(', '.join(ids[:MAX_LISTED]))}{more}")
    return any(each.is_worse for each in comparisons)


def _read(path: Path) -> Scorecard:
    try:
        return of_json(text_of(path))
    except ValueError as error:
        raise click.ClickException(f"{path}: {error}") from error


def _compared_row(each: RunComparison) -> tuple[str, ...]:
    difference = each.difference
    verdict = "worse" if each.is_worse else "better" if each.is_significant else "no significant difference"
    return (
        each.suite,
        _named(each.before),
        _named(each.after),
        str(each.cases),
        f"{100 * difference.value:+.1f} points",
        f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}",
        f"{difference.p_value:.3f}",
        verdict,
    )


def _named(target: EvaluationTarget) -> str:
    return " ".join(filter(None, (target.model, target.deployment, target.effort)))


def _compared_json(each: RunComparison) -> dict[str, Any]:
    difference = each.difference
    return {
        "suite": each.suite,
        "before": _named(each.before),
        "after": _named(each.after),
        "cases": each.cases,
        "difference": difference.value,
        "interval": [difference.low, difference.high],
        "p_value": difference.p_value,
        "significant": each.is_significant,
        "lost": [*each.lost],
        "won": [*each.won],
    }
