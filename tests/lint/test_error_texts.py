"""Messages about an expired time limit or a size limit state the limit."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "proxy").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")])
# "in time" hides how long the gateway waited, and which setting raises the limit.
VAGUE = re.compile(r"\bin time\b|\btook too long\b|\bexceeds? (the|its) size limit$")


def vague_texts(source: str) -> list[str]:
    """Return the texts of a module that do not state their limit. Docstrings and comments are exempt."""
    if not re.search(VAGUE.pattern.removesuffix("$"), source):
        return []
    tree = ast.parse(source)
    docstrings = set(_docstrings(tree))
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [str(text.value) for text in texts if id(text) not in docstrings and VAGUE.search(str(text.value))]


def _docstrings(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            yield id(node.value)


def test_messages_state_their_time_limit() -> None:
    assert {path.name: found for path in SOURCES if (found := vague_texts(path.read_text()))} == {}


TEXTS = {
    "vague": ('raise Late("no answer in time; try again")', 1),
    "vague, formatted": ('raise Late(f"{name} sent nothing in time")', 1),
    "with its limit": ('raise Late(f"no answer within {limit_s:g} s; raise `timeout`")', 0),
    "docstring": ('"""Return what arrived in time."""', 0),
}


@pytest.mark.parametrize(("source", "count"), TEXTS.values(), ids=TEXTS)
def test_a_vague_text_is_found(source: str, count: int) -> None:
    assert len(vague_texts(source)) == count
