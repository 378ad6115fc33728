"""Cases of the Berkeley Function Calling Leaderboard, read from files in its format."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from tests.evaluation.test_checks import called
from unisono.evaluation.cases import BFCL_CATEGORIES, MORE_CATEGORIES, Case, MissingCases, bfcl_cases, load_cases
from unisono.evaluation.checks import fault_of

ROOT = Path(__file__).parents[2]

QUESTION = {
    "id": "simple_0",
    "question": [[{"role": "user", "content": "Sum?"}]],
    "function": [
        {
            "name": "math.sum",
            "description": "Add.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "type": {"type": "any"},
                    "pair": {"type": "tuple", "items": {"type": "float"}},
                    "more": {"type": "dict", "properties": {"unit": {"type": "string"}}},
                },
                "required": ["pair"],
            },
        }
    ],
}
ANSWER = {"id": "simple_0", "ground_truth": [{"math.sum": {"pair": [[1, 2.5]], "type": ["", "exact"]}}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "possible_answer").mkdir()
    (tmp_path / "BFCL_v4_simple_python.json").write_text(json.dumps(QUESTION) + "\n")
    (tmp_path / "possible_answer" / "BFCL_v4_simple_python.json").write_text(json.dumps(ANSWER) + "\n")
    return tmp_path


def test_a_case_has_valid_names_and_schemas(folder: Path) -> None:
    [case] = bfcl_cases(folder, "simple_python")
    [tool] = case.body["tools"]
    assert (case.suite, case.id, tool["function"]["name"]) == ("bfcl:simple_python", "simple_0", "math_sum")
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "type": {},
            "pair": {"type": "array", "items": {"type": "number"}},
            "more": {"type": "object", "properties": {"unit": {"type": "string"}}},
        },
        "required": ["pair"],
    }
    assert fault_of(case, called(("math_sum", {"pair": [1, 2.5]}))) == ""
    assert fault_of(case, called(("math_sum", {"pair": [1, 2]}))) == "math_sum: pair is [1, 2]"


@pytest.mark.parametrize(
    ("category", "message"),
    [
        ("multi_turn_base", "'multi_turn_base' is not supported; use one of simple_python"),
        ("multiple", "has no answers"),
    ],
)
def test_an_impossible_category_is_named(folder: Path, category: str, message: str) -> None:
    with pytest.raises(MissingCases, match=message):
        bfcl_cases(folder, category)


def test_the_same_seed_chooses_the_same_cases() -> None:
    chosen = [[case.id for case in load_cases("compatibility", 5, seed)] for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(chosen[0]) == 5


@pytest.mark.slow
def test_every_published_answer_is_accepted(tmp_path: Path) -> None:
    """The cases of the real package, each with the answer of its first accepted values."""
    uv = which("uv") or str(ROOT / ".cache/uv/bin/uv")
    subprocess.run([uv, "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, "bfcl-eval"], check=True)
    data = tmp_path / "bfcl_eval" / "data"
    cases = [case for category in (*BFCL_CATEGORIES, *MORE_CATEGORIES) for case in bfcl_cases(data, category)]
    faults = [(case.id, fault) for case in cases if (fault := fault_of(case, _answer(case)))]
    assert len(cases) > 1000
    assert faults == []


def _answer(case: Case) -> dict[str, Any]:
    return called(*((call.name, _first(call.arguments)) for call in case.expected.calls or ()))


def _first(accepted: Any) -> dict[str, Any]:
    """Return the first accepted value of each argument that must be there."""
    listed = {name: each if isinstance(each, list) else [each] for name, each in accepted.items()}
    return {name: _plain(values[0]) for name, values in listed.items() if values and "" not in values}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _first(value)
    return [*map(_plain, value)] if isinstance(value, list) else value
