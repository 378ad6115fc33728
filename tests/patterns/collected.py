"""All regular expressions of the product and their methods, collected from the AST."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = (ROOT / "proxy", ROOT / "adapters")
APPLYING: Final = frozenset({"match", "fullmatch", "search", "finditer", "findall", "sub", "subn", "split", "scanner"})
FUNCTIONS: Final = APPLYING | {"compile", "template"}
LOOPS: Final = (ast.For, ast.While, ast.AsyncFor, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
HARMLESS: Final = frozenset({"escape", "Pattern", "Match", "error", "I", "A", "S", "M", "X"}) | set(
    re.RegexFlag.__members__
)


@dataclass
class Found:
    """One place where the product builds a pattern."""

    # Module and source text of the pattern.
    where: str
    pattern: str | bytes
    flags: int
    # Methods by which the product applies the pattern.
    modes: set[str]


class Unswept(Exception):
    """A use of `re` that the sweep cannot follow."""


def patterns(locals_of: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Found]:
    """Return all patterns of the product.

    `locals_of` has the values of local variables for patterns that are built in functions, by `where`. Raises Unswept
    if such a pattern is missing.
    """
    return [found for path in _sources() for found in _in_module(path, locals_of)]


@cache
def _sources() -> dict[Path, str]:
    return {path: path.read_text() for source in SOURCES for path in sorted(source.rglob("*.py"))}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_sources()[path])


def _in_module(path: Path, locals_of: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Found]:
    if re.search(r"\b(?:re|regex|sre_compile)\b", _sources()[path]) is None:
        return
    tree = _tree(path)
    module = ".".join(path.relative_to(next(s for s in SOURCES if path.is_relative_to(s))).with_suffix("").parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("re", "regex", "sre_compile"):
            raise Unswept(f"{module}: import the module `re`, not names from it")
        if isinstance(node, ast.Import) and any(a.name == "regex" or (a.name == "re" and a.asname) for a in node.names):
            raise Unswept(f"{module}: import `re` by its own name")
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "re"):
            continue
        if node.attr in HARMLESS:
            continue
        call = calls.get(id(node))
        if node.attr not in FUNCTIONS or call is None:
            raise Unswept(f"{module}: re.{node.attr} is not called by its name")
        yield from _found(module, path, node.attr, call, locals_of)


def _found(
    module: str, path: Path, function: str, call: ast.Call, locals_of: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[Found]:
    where = f"{module}: {ast.unparse(call.args[0])}"
    flags = next((keyword.value for keyword in call.keywords if keyword.arg == "flags"), None)
    number = {"compile": 1, "sub": 4, "subn": 4, "split": 3}.get(function, 2)
    flags = call.args[number] if flags is None and len(call.args) > number else flags
    modes = {function} if function in APPLYING else _modes(path, call)
    for names in locals_of.get(where, [{}]):
        pattern = _value(module, call.args[0], names)
        yield Found(where, pattern, int(_value(module, flags, {})) if flags is not None else 0, modes)


def _value(module: str, expression: ast.expr, local: Mapping[str, Any]) -> Any:
    try:
        return ast.literal_eval(expression)
    except ValueError:
        names = {**vars(importlib.import_module(module)), **local}
        try:
            return eval(compile(ast.Expression(expression), module, "eval"), names)
        except NameError as error:
            raise Unswept(f"{module}: {ast.unparse(expression)} needs values for its local variables") from error


def _modes(path: Path, call: ast.Call) -> set[str]:
    """Return the methods applied to the pattern that `call` compiles, or all if unknown."""
    modes: set[str] = set()
    node: Any
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Attribute) and node.value is call:
            modes.add(node.attr)
        elif isinstance(node, ast.Assign) and node.value is call:
            modes |= _modes_of_name(path, _name(node.targets[0]))
        elif isinstance(node, ast.AnnAssign) and node.value is call:
            modes |= _modes_of_name(path, _name(node.target))
    return modes or {"finditer"}


def _modes_of_name(path: Path, name: str) -> set[str]:
    # Names with an underscore are private to their module; other modules import the name or its module.
    others = [] if name.startswith("_") else [o for o, t in _sources().items() if name in t and path.stem in t]
    return set().union(*(_uses(each).get(name, set()) for each in {path, *others}))


@cache
def _uses(path: Path) -> dict[str, set[str]]:
    """Return the methods that a module applies to each name; all for a name that it passes on."""
    uses: dict[str, set[str]] = {}
    _note_uses(_tree(path), uses, in_loop=False)
    return uses


def _note_uses(node: ast.AST, uses: dict[str, set[str]], *, in_loop: bool) -> None:
    if isinstance(node, ast.While) and (name := _name_of_token(node.test)):
        # The loop ends at the first position without a match.
        uses.setdefault(name, set()).add("tokens")
        for statement in node.body:
            _note_uses(statement, uses, in_loop=True)
        return
    if isinstance(node, ast.Attribute) and node.attr in APPLYING and (name := _name(node.value)):
        uses.setdefault(name, set()).add(node.attr)
    if isinstance(node, ast.Call):
        # A loop over positions of the text may start a match at every position.
        scanned = (
            node.func.value if isinstance(node.func, ast.Attribute) and in_loop and len(node.args) > 1 else node.func
        )
        for name in map(_name, [*node.args, scanned]):
            uses.setdefault(name, set()).add("finditer")
    in_loop = in_loop or isinstance(node, LOOPS)
    for inner in ast.iter_child_nodes(node):
        _note_uses(inner, uses, in_loop=in_loop)


def _name_of_token(test: ast.expr) -> str:
    """Return the pattern of a loop that runs as long as `match` succeeds."""
    call = test.value if isinstance(test, ast.NamedExpr) else None
    method = call.func if isinstance(call, ast.Call) else None
    return _name(method.value) if isinstance(method, ast.Attribute) and method.attr == "match" else ""


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
