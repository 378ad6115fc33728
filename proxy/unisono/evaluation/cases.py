"""Cases of an evaluation: Chat Completions requests, and properties of a correct answer.

The bundled cases belong to this project. The cases of the Berkeley Function Calling Leaderboard are read from the
installed package `bfcl-eval` (Apache 2.0, https://github.com/ShishirPatil/gorilla), which is not imported.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

BUNDLED: Final = "compatibility"
BFCL: Final = "bfcl"
BFCL_CATEGORIES: Final = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
# Further categories with a single turn.
MORE_CATEGORIES: Final = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance")
BFCL_PREFIX: Final = "BFCL_v4_"
# Type names in the cases of the leaderboard that JSON Schema does not have, and their replacements.
BFCL_TYPES: Final = {"dict": "object", "float": "number", "tuple": "array"}
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
MAX_NAME_LENGTH: Final = 64

Json = Mapping[str, Any]


class MissingCases(Exception):
    """Raised if the cases of a suite cannot be read or run. The message states the remedy."""


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """Expected call to a tool, with the accepted values of each argument.

    An accepted value "" means that the argument may be missing.
    """

    name: str
    arguments: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Expected:
    """Required properties of an answer. Fields that are None, empty or False are not checked.

    `calls` are all calls of the answer, in any order; an empty tuple forbids calls. With `is_exact`, texts in the
    arguments of calls are compared exactly. `text` is a regular expression that must match somewhere in the answer's
    text, without regard to case. If `schema` is given, the text must be JSON that is valid for this schema.
    """

    calls: tuple[ExpectedCall, ...] | None = None
    is_exact: bool = False
    text: str = ""
    schema: Json | None = None
    has_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """Request body without model and sampling, and the required properties of its answer."""

    suite: str
    id: str
    body: Json
    expected: Expected


def load_cases(suite: str, limit: int | None, seed: int) -> list[Case]:
    """Return the cases of a suite, at most `limit` (None: all).

    The same seed selects the same cases. The suites are `compatibility`, `bfcl` (all `BFCL_CATEGORIES`, with `limit`
    for each category), and `bfcl:CATEGORY`. Raises MissingCases if the cases are not installed, and ValueError for an
    unknown suite.
    """
    if suite == BUNDLED:
        return _some(bundled_cases(), limit, seed)
    name, _, category = suite.partition(":")
    if name != BFCL:
        raise ValueError(suite)
    categories = [category] if category else BFCL_CATEGORIES
    folder = bfcl_folder()
    return [case for each in categories for case in _some(bfcl_cases(folder, each), limit, seed)]


def _some(cases: list[Case], limit: int | None, seed: int) -> list[Case]:
    if limit is None or limit >= len(cases):
        return cases
    chosen = set(random.Random(seed).sample(range(len(cases)), limit))  # noqa: S311 - not for security
    return [case for at, case in enumerate(cases) if at in chosen]


def bundled_cases() -> list[Case]:
    text = (files("unisono.evaluation") / "compatibility.jsonl").read_text("utf-8")
    return [_bundled(json.loads(line)) for line in _lines(text)]


def _bundled(row: Json) -> Case:
    expect = row["expect"]
    calls = expect.get("calls")
    expected = Expected(
        calls=None if calls is None else tuple(ExpectedCall(each["name"], each["arguments"]) for each in calls),
        is_exact=expect.get("exact", False),
        text=expect.get("text", ""),
        schema=expect.get("schema"),
        has_reasoning=expect.get("reasoning", False),
    )
    return Case(BUNDLED, row["id"], row["body"], expected)


def bfcl_folder() -> Path:
    """Return the data folder of `bfcl-eval`.

    Raises MissingCases if the package is not installed.
    """
    try:
        return Path(str(distribution("bfcl-eval").locate_file("bfcl_eval/data")))
    except PackageNotFoundError:
        raise MissingCases(
            "The cases of the Berkeley Function Calling Leaderboard are not installed; "
            "run `pip install --no-deps bfcl-eval`."
        ) from None


def bfcl_cases(folder: Path, category: str) -> list[Case]:
    """Return the cases of a category.

    Raises MissingCases for a category that is not supported, such as one with several turns.
    """
    known = (*BFCL_CATEGORIES, *MORE_CATEGORIES)
    if category not in known:
        raise MissingCases(f"The category '{category}' is not supported; use one of {', '.join(known)}.")
    file = f"{BFCL_PREFIX}{category}.json"
    answers = {row["id"]: row["ground_truth"] for row in _rows(folder / "possible_answer" / file)}
    if not answers and not category.endswith("irrelevance"):
        raise MissingCases(
            f"bfcl-eval has no answers in {folder / 'possible_answer' / file}; install a different version."
        )
    return [_bfcl_case(category, row, answers.get(row["id"], ())) for row in _rows(folder / file)]


def _rows(path: Path) -> Iterator[Json]:
    if path.is_file():
        yield from map(json.loads, _lines(path.read_text("utf-8")))


def _lines(text: str) -> list[str]:
    # `splitlines` would also split at other line separators, which texts in JSON may contain.
    return [line for line in text.split("\n") if line]


def _bfcl_case(category: str, row: Json, answer: Sequence[Json]) -> Case:
    functions = [
        {**function, "name": _tool_name(function["name"]), "parameters": _json_schema(function["parameters"])}
        for function in row["function"]
    ]
    calls = [ExpectedCall(_tool_name(name), arguments) for each in answer for name, arguments in each.items()]
    body = {
        "messages": row["question"][0],
        "tools": [{"type": "function", "function": _tool(function)} for function in functions],
    }
    return Case(f"{BFCL}:{category}", row["id"], body, Expected(calls=tuple(calls)))


def _tool(function: Json) -> Json:
    return {name: function[name] for name in ("name", "description", "parameters") if name in function}


def _tool_name(name: str) -> str:
    """Return a tool name that the API accepts: invalid characters replaced, and truncated."""
    return _NOT_IN_NAMES.sub("_", name)[:MAX_NAME_LENGTH]


def _json_schema(schema: Any) -> Any:
    """Convert a schema of the leaderboard to JSON Schema, by replacing the names of types."""
    if isinstance(schema, list):
        return [_json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    converted: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "type":
            if value != "any":
                converted[name] = BFCL_TYPES.get(value, value)
        elif name == "properties":
            # A property may be named `type` too.
            converted[name] = {each: _json_schema(sub) for each, sub in value.items()}
        else:
            converted[name] = _json_schema(value) if name in ("items", "anyOf") else value
    return converted
