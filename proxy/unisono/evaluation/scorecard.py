"""Scorecards, their comparison, and their output as JSON, table and HTML. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Final

from unisono.core.json_syntax import is_well_formed, parsed_json
from unisono.fidelity.statistics import Difference, Estimate, Group, paired_difference, proportion

OBJECT: Final = "unisono.scorecard"
VERSION: Final = 1
# Differences with a p-value below this are significant: they are not considered chance.
SIGNIFICANT: Final = 0.05
STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .8rem .3rem 0;"
    "border-bottom:1px solid #8886;vertical-align:top}td.n,th.n{text-align:right}@media(prefers-color-scheme:dark)"
    "{body{background:#10141a;color:#e3e8ef}}"
)


@dataclass(frozen=True, slots=True)
class EvaluationTarget:
    """Evaluated model, with a deployment (empty: any) and an effort (empty: the default)."""

    model: str
    deployment: str = ""
    effort: str = ""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Result of a case. `fault` is empty if the answer is correct.

    `has_failed` is True if there is no answer, because of an error or the time limit. `duration_s` is in seconds.
    Duration and tokens are 0 if they are unknown.
    """

    id: str
    fault: str = ""
    has_failed: bool = False
    duration_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def is_correct(self) -> bool:
        return not self.fault


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one suite for one target."""

    suite: str
    target: EvaluationTarget
    results: Sequence[CaseResult]

    @property
    def correct(self) -> int:
        return sum(result.is_correct for result in self.results)

    @property
    def failed(self) -> int:
        return sum(result.has_failed for result in self.results)

    @property
    def share(self) -> Estimate | None:
        """Share of correct answers, with its 95 % interval."""
        return proportion([Group(float(result.is_correct), 1) for result in self.results])


@dataclass(frozen=True, slots=True)
class Scorecard:
    """Results of an evaluation at `created`, an ISO 8601 time, with the version of the gateway."""

    created: str
    gateway: str
    settings: Mapping[str, Any]
    runs: Sequence[Run] = field(default_factory=tuple)


def to_json(card: Scorecard) -> dict[str, Any]:
    return {
        "object": OBJECT,
        "version": VERSION,
        "created": card.created,
        "gateway": card.gateway,
        "settings": card.settings,
        "runs": [
            {
                "suite": run.suite,
                **asdict(run.target),
                "correct": run.correct,
                "failed": run.failed,
                "cases": len(run.results),
                "results": [asdict(result) for result in run.results],
            }
            for run in card.runs
        ],
    }


def of_json(text: str) -> Scorecard:
    """Read a scorecard. Raises ValueError for a text that is not a scorecard of this version."""
    try:
        raw = parsed_json(text)
    except ValueError as error:
        raise ValueError("not a scorecard, or damaged") from error
    try:
        if (raw["object"], raw["version"]) != (OBJECT, VERSION):
            raise ValueError(f"not a scorecard of version {VERSION}")
        runs = [
            Run(
                _text(run["suite"]),
                EvaluationTarget(_text(run["model"]), _text(run["deployment"]), _text(run["effort"])),
                [CaseResult(**{**result, "id": _text(result["id"])}) for result in run["results"]],
            )
            for run in raw["runs"]
        ]
        return Scorecard(raw["created"], raw["gateway"], raw["settings"], runs)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("not a scorecard, or damaged") from error


def _text(value: object) -> str:
    if not isinstance(value, str) or not is_well_formed(value):
        raise TypeError("not a text")
    return value


ROW_NAMES: Final = ("suite", "model", "deployment", "effort", "correct", "share", "95 %", "no answer", "tokens", "time")


def to_rows(card: Scorecard) -> list[tuple[str, ...]]:
    """Return a row for each run. Tokens and time are averages per answer."""
    return [
        (
            run.suite,
            run.target.model,
            run.target.deployment or "any",
            run.target.effort or "default",
            f"{run.correct} of {len(run.results)}",
            *(("", "") if (share := run.share) is None else (_percent(share.value), _interval(share))),
            str(run.failed),
            _average(run, "output_tokens", "{:.0f}"),
            _average(run, "duration_s", "{:.2f} s"),
        )
        for run in card.runs
    ]


def _average(run: Run, name: str, form: str) -> str:
    values = [value for result in run.results if not result.has_failed and (value := getattr(result, name))]
    return form.format(sum(values) / len(values)) if values else ""


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _interval(share: Estimate) -> str:
    return f"{100 * share.low:.1f} to {100 * share.high:.1f}"


def to_html(card: Scorecard) -> str:
    """Return a page without scripts: the table of the runs, and the incorrect answers."""
    heads = "".join(f"<th>{escape(name)}</th>" for name in ROW_NAMES)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in to_rows(card))
    settings = ", ".join(f"{name} {value}" for name, value in card.settings.items() if value not in (None, "", []))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Scorecard of {escape(card.created)}</title>'
        f"<style>{STYLE}</style><h1>Scorecard</h1><p>{escape(card.created)}, Unisono {escape(card.gateway)}; "
        f"{escape(settings)}</p><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        f"{''.join(map(_faults_html, card.runs))}</html>"
    )


def _faults_html(run: Run) -> str:
    wrong = [result for result in run.results if not result.is_correct]
    if not wrong:
        return ""
    name = " ".join(filter(None, (run.suite, run.target.model, run.target.deployment, run.target.effort)))
    rows = "".join(f"<tr><td>{escape(result.id)}</td><td>{escape(result.fault)}</td></tr>" for result in wrong)
    return f"<h2>{escape(name)}: {len(wrong)} incorrect</h2><table><tbody>{rows}</tbody></table>"


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Difference between two runs, over the cases that both runs contain.

    `lost` are the ids of cases that only the first run answered correctly, `won` those of cases that only the second
    run answered correctly.
    """

    suite: str
    before: EvaluationTarget
    after: EvaluationTarget
    cases: int
    difference: Difference
    lost: Sequence[str]
    won: Sequence[str]

    @property
    def is_significant(self) -> bool:
        return self.difference.p_value < SIGNIFICANT

    @property
    def is_worse(self) -> bool:
        return self.is_significant and self.difference.value < 0


def compare(before: Scorecard, after: Scorecard) -> list[RunComparison]:
    """Compare the runs of two scorecards.

    If each scorecard has exactly one run of a suite, these two are compared. Otherwise runs with the same model,
    deployment and effort are paired. The remaining runs are paired by effort, in the order of the scorecards.
    """
    found = []
    for suite in dict.fromkeys(run.suite for run in after.runs):
        old, new = ([run for run in card.runs if run.suite == suite] for card in (before, after))
        found += [_compared(*pair) for pair in _pairs(old, new) if _ids(pair[0]) & _ids(pair[1])]
    return found


def _pairs(before: Sequence[Run], after: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    if len(before) == len(after) == 1:
        yield before[0], after[0]
        return
    old = {run.target: run for run in before}
    yield from ((old[run.target], run) for run in after if run.target in old)
    known = {run.target for run in after} & old.keys()
    left = [[run for run in runs if run.target not in known] for runs in (before, after)]
    for effort in dict.fromkeys(run.target.effort for run in left[1]):
        yield from zip(*([run for run in runs if run.target.effort == effort] for runs in left), strict=False)


def _ids(run: Run) -> set[str]:
    return {result.id for result in run.results}


def _compared(before: Run, after: Run) -> RunComparison:
    old = {result.id: result.is_correct for result in before.results}
    pairs = [(result.id, old[result.id], result.is_correct) for result in after.results if result.id in old]
    difference = paired_difference([one for _, one, _ in pairs], [two for _, _, two in pairs])
    return RunComparison(
        after.suite,
        before.target,
        after.target,
        len(pairs),
        difference,
        lost=[id for id, one, two in pairs if one and not two],
        won=[id for id, one, two in pairs if two and not one],
    )
