"""Names of the code on a page: each is looked up in the files that the same line links to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_LINK = re.compile(r"\[`([^`]+)`\]\(([^)#\s]+\.py)\)")
_SPAN = re.compile(r"`([^`]+)`")
# Table cells, and parts of sentences: the names in a segment belong to the files in it.
_SEGMENTS = re.compile(r"\||;|\.(?=\s|$)")
# A class, a constant, a method, or a function with an underscore. A plain word is a name only beside a link: otherwise
# it is a package or a value.
_NAME = re.compile(r"[A-Z]\w*(\.\w+)*|[a-z]\w*(\.\w+)+|[a-z]+(_\w+)+")
_WORD = re.compile(r"[a-z]+")
_NOT_NAMES = frozenset({"pyproject.toml", "unisono_adapters", "schema.py", "inbound.py", "outbound.py"})


def wrong_names(page: str, folder: Path) -> Iterator[str]:
    """Yield each wrong name on a page.

    A name is wrong if its file is absent, if its file does not define it, or if it has no file.
    """
    for segment in _segments(page):
        defined: dict[str, frozenset[str]] = {}
        for label, target in _LINK.findall(segment):
            path = (folder / target).resolve()
            if not path.is_file():
                yield f"{label}: there is no file {target}"
            elif not path.as_posix().endswith(f"/{label}"):
                yield f"{label}: the link leads to {target}"
            else:
                defined[label] = _defined(path)
        for name in dict.fromkeys(_SPAN.findall(_LINK.sub("", segment))):
            is_name = _NAME.fullmatch(name) or (defined and _WORD.fullmatch(name))
            if is_name and name not in _NOT_NAMES and not any(name in names for names in defined.values()):
                yield f"{name}: not defined in {', '.join(defined) or 'a linked file'}"


def _segments(page: str) -> Iterator[str]:
    """Yield parts of table rows and of paragraphs, without blocks of code."""
    page = re.sub(r"^```.*?^```$", "", page, flags=re.S | re.M)
    # A paragraph is one line, like a table row.
    page = re.sub(r"(?<=[^\n|])\n(?=[^\n|])", " ", page)
    yield from (segment for line in page.splitlines() for segment in _SEGMENTS.split(line))


@cache
def _defined(path: Path) -> frozenset[str]:
    return frozenset(_names_in(ast.parse(path.read_text()).body))


def _names_in(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Yield classes, functions, methods and constants; `Class.method` for what a class contains."""
    for node in body:
        match node:
            case ast.ClassDef(name=name, body=members):
                yield prefix + name
                yield from _names_in(members, f"{prefix}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name
            case ast.Assign(targets=targets):
                yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name
