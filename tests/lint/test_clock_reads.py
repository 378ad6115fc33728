"""No test reads the clock when it is collected: its run may end on another day."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = sorted(Path(__file__).parent.parent.rglob("*.py"))

CLOCK_READS = re.compile(r"\b((datetime|date)\.(now|utcnow|today)|time\.(time|time_ns|gmtime|localtime|strftime))$")


def clock_reads_at_import(path: Path) -> list[str]:
    """Return the calls that read the clock outside of functions, also as defaults and in decorators."""
    source = path.read_text()
    # Only modules with such a call are parsed.
    if not re.search(CLOCK_READS.pattern.removesuffix("$") + r"\(", source):
        return []
    return [f"{path.name}:{call.lineno}" for call in calls_at_import(ast.parse(source)) if is_clock_read(call)]


def is_clock_read(call: ast.Call) -> bool:
    return CLOCK_READS.search(ast.unparse(call.func)) is not None


def calls_at_import(node: ast.AST) -> Iterator[ast.Call]:
    if isinstance(node, ast.Call):
        yield node
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST):
                yield from calls_at_import(child)


def test_no_test_reads_the_clock_when_it_is_collected() -> None:
    assert [place for path in TESTS for place in clock_reads_at_import(path)] == []


READS = {
    "constant": ("TODAY = datetime.now(UTC).date()\n", 1),
    "table": ('CASES = {"today": ({}, f"{datetime.datetime.now()}")}\n', 1),
    "parametrize": ("@pytest.mark.parametrize('ends', [None, time.time() + 1])\ndef test_it(ends): ...\n", 1),
    "default": ("def at(now=date.today()): ...\n", 1),
    "class": ("class Key:\n    made_at = time.time()\n", 1),
    "function": ("def today():\n    return date.today()\n", 0),
    "lambda": ("CASES = {'period': lambda: time.time() + 1}\n", 0),
    "text": ("PROGRAM = 'print(time.time())'\n", 0),
}


@pytest.mark.parametrize(("source", "count"), READS.values(), ids=READS)
def test_clock_reads_outside_of_functions_are_found(source: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(source)
    assert len(clock_reads_at_import(path)) == count
