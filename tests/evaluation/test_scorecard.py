"""Scorecards: their files and their comparison."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from unisono.cli import main
from unisono.evaluation.scorecard import (
    CaseResult,
    EvaluationTarget,
    Run,
    Scorecard,
    compare,
    of_json,
    to_html,
    to_json,
)


def card(correct: str, *, effort: str = "low", model: str = "m") -> Scorecard:
    """Return a scorecard with one case per character, which is correct for `1`."""
    results = [CaseResult(str(at), "" if one == "1" else "the text is '<b>'") for at, one in enumerate(correct)]
    run = Run("compatibility", EvaluationTarget(model, "", effort), results)
    return Scorecard("2026-01-02T03:04:05+00:00", "1.0", {"seed": 1}, [run])


def test_a_scorecard_is_read_as_it_was_written() -> None:
    written = card("1101")
    assert of_json(json.dumps(to_json(written))) == written


@pytest.mark.parametrize("text", ["", "[]", '{"object": "unisono.scorecard", "version": 2}', '{"object": "x"}'])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a scorecard"):
        of_json(text)


def test_runs_are_compared_case_by_case() -> None:
    [compared] = compare(card("111111110"), card("000000011", model="other"))
    assert (compared.cases, [*compared.lost], [*compared.won]) == (9, [*"0123456"], ["8"])
    assert compared.difference.value == pytest.approx(-6 / 9)
    assert not compared.is_worse
    [compared] = compare(card("1" * 10), card("0" * 10))
    assert compared.is_worse


def test_runs_are_paired_by_suite_and_effort() -> None:
    one, other = card("11"), card("10", effort="high")
    # A single run of a suite may have another effort.
    assert [each.difference.value for each in compare(one, other)] == [-0.5]
    both = replace(one, runs=[*one.runs, *other.runs])
    [compared] = compare(both, other)
    assert (compared.before.effort, compared.after.effort, compared.difference.value) == ("high", "high", 0.0)
    assert len(compare(both, both)) == 2
    # The same model is compared with itself, wherever it is.
    models = replace(one, runs=[*card("11", model="a").runs, *card("10", model="b").runs])
    [compared] = compare(models, card("10", model="b"))
    assert (compared.before.model, compared.difference.value) == ("b", 0.0)
    assert compare(replace(one, runs=[]), other) == []


def test_the_page_escapes_texts() -> None:
    page = to_html(card("10"))
    assert "the text is &#x27;&lt;b&gt;&#x27;" in page
    assert "<b>" not in page


@pytest.mark.parametrize(("after", "code"), [("1" * 10, 0), ("0" * 10, 1)])
def test_the_exit_code_reports_a_loss(after: str, code: int, tmp_path: Path) -> None:
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, scores in zip(paths, ("1" * 10, after), strict=True):
        path.write_text(json.dumps(to_json(card(scores))))
    result = CliRunner().invoke(main, ["eval", "compare", *map(str, paths)])
    assert result.exit_code == code, result.output
    assert ("worse" in result.output) is bool(code)
    missing = CliRunner().invoke(main, ["eval", "compare", str(paths[0]), str(tmp_path / "none.json")])
    assert missing.exit_code == 1
    assert "none.json" in missing.output
