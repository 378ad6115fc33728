"""Language of the project: listed words, and the first lines of docstrings.

A word list is a minimum: text without these words can still be hard to read.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tests.lint.syntax import nodes_of

# Listed words per 1,000 words, for each kind of text.
MAX_PER_THOUSAND: Final = 2.0
# Characters of the first line of a docstring.
MAX_FIRST_LINE: Final = 90
# Docstrings that open with a subordinate clause, in the whole product.
MAX_CLAUSE_OPENINGS: Final = 40

# Each of these words has a plain alternative in technical English: stored, reported, emitted, requested, waiting.
LISTED: Final = frozenset(
    ("asked", "behind", "comes", "goes", "kept", "nobody", "said", "shown", "somebody")
) | frozenset(("taken", "tells", "told", "whatever", "whoever", "whom"))
# Field names and quoted examples that outsiders rely on.
ALLOWED_PHRASES: Final = ("as asked for", "behind a proxy", "behind a load balancer", "behind nginx", "is taken over")
CLAUSE: Final = re.compile(r"(?:How|So|That|What|Where|Which|Who|Whom|Whose)\b")

_WORD: Final = re.compile(r"[A-Za-z][A-Za-z']*")
_CONSTANT: Final = re.compile(r"[A-Z][A-Z0-9]+_[A-Z0-9_]*[A-Z0-9]")
_NAMED_CONSTANT: Final = re.compile(rf"`({_CONSTANT.pattern})`")
_STRING_OR_COMMENT: Final = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'{3}(?:\\.|[^\\])*?\'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(\#[^\n]*)''', re.DOTALL
)
_CODE: Final = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Text:
    """Text of one kind (`docstring`, `comment`, `message`, `page`) at a place in the project."""

    kind: str
    path: Path
    line: int
    text: str


def listed_words(text: str) -> tuple[Counter[str], int]:
    """Return the listed words in a text, without its code, and the number of all its words."""
    plain = _CODE.sub(" ", text).lower()
    for phrase in ALLOWED_PHRASES:
        plain = plain.replace(phrase, " ")
    words = _WORD.findall(plain)
    return Counter(word for word in words if word in LISTED), len(words)


def texts_of(path: Path) -> tuple[Text, ...]:
    """Return all texts of a Python file or a Markdown page."""
    return _texts(path, path.read_text())


@cache
def _texts(path: Path, source: str) -> tuple[Text, ...]:
    return tuple(_find_texts(path, source))


def _find_texts(path: Path, source: str) -> Iterator[Text]:
    if path.suffix == ".md":
        yield Text("page", path, 1, source)
        return
    nodes = nodes_of(path)
    yield from (Text("docstring", path, line, text) for line, text in docstrings(nodes))
    yield from (Text("comment", path, line, text) for line, text in comments(source))
    yield from (Text("message", path, line, text) for line, text in _messages(nodes))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments with their line numbers.

    The module `tokenize` would take a third of the time of all checks.
    """
    line, end = 1, 0
    for found in _STRING_OR_COMMENT.finditer(source):
        if found[1] is not None:
            line, end = line + source.count("\n", end, found.start()), found.start()
            yield line, found[1].lstrip("# ")


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield docstrings with their lines, including those below an attribute or constant."""
    for node in nodes:
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def _messages(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the texts of raised errors and log records."""
    for node in nodes:
        match node:
            case ast.Raise(exc=ast.Call() as call):
                yield from _strings(call)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "request_log"))):
                yield from _strings(node)


def _strings(call: ast.Call) -> Iterator[tuple[int, str]]:
    for argument in call.args:
        for part in ast.walk(argument):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.lineno, part.value


def check_words(files: list[Path]) -> Iterator[str]:
    """Yield one finding for each kind of text that has too many listed words, with the worst files."""
    found: dict[str, Counter[str]] = {}
    totals: Counter[str] = Counter()
    by_file: dict[str, Counter[Path]] = {}
    for path in files:
        for text in texts_of(path):
            listed, total = listed_words(text.text)
            totals[text.kind] += total
            found.setdefault(text.kind, Counter()).update(listed)
            by_file.setdefault(text.kind, Counter())[path] += sum(listed.values())
    for kind, listed in found.items():
        rate = per_thousand(listed, totals[kind])
        if rate > MAX_PER_THOUSAND:
            worst = ", ".join(f"{path} {count}" for path, count in by_file[kind].most_common(5))
            words = ", ".join(f"{word} {count}" for word, count in listed.most_common(5))
            yield f"{kind}s have {rate:.1f} listed words per 1,000 (at most {MAX_PER_THOUSAND}): {words}; {worst}"


def check_constants(files: list[Path]) -> Iterator[str]:
    """Yield a finding for each constant that a docstring or comment names in backticks and no code has."""
    known: set[str] = set()
    named: list[tuple[Text, str]] = []
    for path in files:
        for node in nodes_of(path):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    known.add(name)
                case ast.Constant(value=str(text)) if len(text) <= MAX_FIRST_LINE:
                    # Environment variables and error codes of others stand in short strings.
                    known.update(_CONSTANT.findall(text) if "`" not in text else ())
        for text in texts_of(path):
            named += [(text, name[1]) for name in _NAMED_CONSTANT.finditer(text.text)]
    for text, name in named:
        if name not in known:
            yield f"{text.path}:{text.line}: the {text.kind} names `{name}`, which does not exist"


def per_thousand(listed: Mapping[str, int], total: int) -> float:
    return 1000 * sum(listed.values()) / max(total, 1)


def check_first_lines(files: list[Path]) -> Iterator[str]:
    """Yield a finding for each docstring whose first line is too long, and one for too many clause openings."""
    clauses: list[str] = []
    for path in files:
        for line, text in docstrings(nodes_of(path)):
            first = text.strip().split("\n")[0]
            if len(first) > MAX_FIRST_LINE:
                yield f"{path}:{line}: the first line of a docstring has {len(first)} characters"
            if CLAUSE.match(first):
                clauses.append(f"{path}:{line}")
    if len(clauses) > MAX_CLAUSE_OPENINGS:
        yield f"{len(clauses)} docstrings open with a clause (at most {MAX_CLAUSE_OPENINGS}): {', '.join(clauses[:10])}"
