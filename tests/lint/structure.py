"""Structure of the product: unique class names, no import cycles, short functions."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.lint.syntax import nodes_of, tree_of

MAX_FUNCTION_LINES: Final = 50

Graph = Mapping[str, frozenset[str]]


def check_class_names(files: list[Path]) -> Iterator[str]:
    """Yield a finding for each public class name that several classes share; a Protocol may share its name once."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in files:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not _is_protocol(node):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, found in places.items():
        if len(found) > 1:
            yield f"class {name} is defined {len(found)} times: {', '.join(found)}"


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


def check_function_lengths(files: list[Path]) -> Iterator[str]:
    """Yield a finding for each function over the limit, also for functions that define others."""
    for path in files:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    yield f"{path}:{node.lineno}: function {node.name} has {lines} lines (at most {MAX_FUNCTION_LINES})"


def check_cycles(roots: Mapping[str, Path]) -> Iterator[str]:
    """Yield a finding for each import cycle of modules or packages; `roots` maps package names to their folders.

    Imports inside functions count too, imports for type checkers do not.
    """
    modules = import_graph(roots)
    packages: dict[str, set[str]] = defaultdict(set)
    for module, imported in modules.items():
        packages[_package(module)] |= {_package(name) for name in imported} - {_package(module)}
    for kind, graph in (
        ("modules", modules),
        ("packages", {name: frozenset(imported) for name, imported in packages.items()}),
    ):
        for cycle in cycles(graph):
            yield f"these {kind} import each other in a cycle: {', '.join(cycle)}"


def _package(module: str) -> str:
    return ".".join(module.split(".")[:2])


def import_graph(roots: Mapping[str, Path]) -> Graph:
    files = {_module_name(root, folder, path): path for root, folder in roots.items() for path in folder.rglob("*.py")}
    return {
        name: frozenset(target for target in _imports(tree_of(path), files.keys()) if target != name)
        for name, path in files.items()
    }


def _module_name(root: str, folder: Path, path: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join((root, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _imports(node: ast.AST, known: Container[str]) -> Iterator[str]:
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.ImportFrom(module=str(module), names=names):
            for name in names:
                full = f"{module}.{name.name}"
                yield from (target for target in (full if full in known else module,) if target in known)
        case ast.Import(names=names):
            yield from (name.name for name in names if name.name in known)
    for child in ast.iter_child_nodes(node):
        # Expressions contain no imports.
        if not isinstance(child, ast.expr):
            yield from _imports(child, known)


def cycles(graph: Graph) -> Iterator[list[str]]:
    """Yield the groups of nodes that reach each other, each sorted."""
    reached = {node: _reachable(graph, node) for node in graph}
    done: set[str] = set()
    for node in sorted(graph):
        group = sorted(other for other in reached[node] if other in reached and node in reached[other])
        if node in group and node not in done:
            done.update(group)
            yield group


def _reachable(graph: Graph, start: str) -> frozenset[str]:
    found: set[str] = set()
    pending = list(graph[start])
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += graph.get(node, ())
    return frozenset(found)
