"""Every function, class and constant of the product is used by the product."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from tests.lint.syntax import statements, tree_of

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "proxy").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")])
# Entry points and programs in documents name their objects. Routes, commands and validators have decorators.
NAMING = (ROOT / "pyproject.toml", *(ROOT / "docs").glob("*.md"))
USED_ELSEWHERE = {
    "BackendFactory": "protocol for third-party adapters",
    "READ_BY_OTHERS": "a test of the keywords' table",
    "engine_pid": "tests of the engine process",
    "astreaming": "litellm",
    "on_header": "httptools",
    **dict.fromkeys(("send_raw_request", "get_tokens", "set_tokens", "get_client_info", "set_client_info"), "mcp"),
}

_WORD = re.compile(r"[A-Za-z_]\w*")
_KINDS = ("def ", "class ", "\n")


def unused_names(sources: Iterable[Path], naming: Iterable[Path]) -> set[str]:
    """Return the names that occur only once, in their own definition."""
    words = {path: _WORD.findall(path.read_text()) for path in (*sources, *naming)}
    once = {name for name, count in Counter(chain(*words.values())).items() if count == 1}
    return {
        name
        for path in sources
        # A module without a definition of such a name is not parsed.
        if any(f"{kind}{name}" in f"\n{path.read_text()}" for name in once.intersection(words[path]) for kind in _KINDS)
        for name in _defined(tree_of(path))
        if name in once and not name.startswith("__")
    }


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and all(
            ast.unparse(each) in {"property", "staticmethod", "classmethod"} for each in node.decorator_list
        ):
            yield node.name
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_every_name_of_the_product_is_used() -> None:
    assert unused_names(SOURCES, NAMING) == USED_ELSEWHERE.keys()


def test_unused_names_are_found(tmp_path: Path) -> None:
    path, page = tmp_path / "module.py", tmp_path / "page.md"
    path.write_text("ALL = 1\nUSED = 2\n\n\ndef use() -> int:\n    return USED\n\n\n@route\ndef get() -> None: ...\n")
    page.write_text("")
    assert unused_names([path], [page]) == {"ALL", "use"}
    page.write_text("Call `use`.\n")
    assert unused_names([path], [page]) == {"ALL"}
