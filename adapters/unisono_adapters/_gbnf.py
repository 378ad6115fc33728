"""Grammars of llama.cpp in its notation GBNF: choices of texts, and regular expressions.

llama.cpp follows every way to read a token, one after the other. An ambiguous grammar therefore stops the whole server:
`(.{1,30}){30}z` was stopped after 100 s without a token. Only expressions with few simultaneous ways are translated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations, product
from typing import Final, assert_never

from unisono.core.frozen import dataclass
from unisono_adapters._regex_syntax import (
    LAST_CODE_POINT,
    Alternation,
    CharacterSet,
    Concatenation,
    Ranges,
    RegexNode,
    Repetition,
    UntranslatableRegex,
    complement,
    parse_regex,
)

# Maximum elements of a grammar with its repetitions expanded, as llama.cpp does.
MAX_ELEMENTS: Final = 1_000
# Maximum transitions and pairs of transitions that are examined, each of which takes about a microsecond.
MAX_WORK: Final = 50_000
# Maximum pairs of different positions that one text can lead to.
MAX_AMBIGUOUS_PAIRS: Final = 40
MAX_CACHED: Final = 64

_PLAIN = re.compile(r"[A-Za-z0-9_ ]")


def choice_grammar(texts: Sequence[str]) -> str:
    """Return a grammar for one of the texts."""
    return "root ::= " + " | ".join(map(_literal, texts))


# A literal, a class, a comment, or the name of a rule.
_GRAMMAR_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|(?P<name>[A-Za-z0-9_-]+)', re.DOTALL)


def client_grammar(grammar: str) -> str:
    """Return a grammar from a client with names of rules that llama.cpp can read.

    vLLM and SGLang allow underscores in them.
    """
    names = {found["name"] for found in _GRAMMAR_TOKEN.finditer(grammar) if found["name"]}
    renamed: dict[str, str] = {}
    for name in sorted(names):
        if "_" in name:
            candidate = name.replace("_", "-")
            while candidate in names or candidate in renamed.values():
                candidate += "-"
            renamed[name] = candidate
    return _GRAMMAR_TOKEN.sub(lambda found: renamed.get(found["name"] or "", found[0]), grammar)


@lru_cache(MAX_CACHED)
def regex_grammar(pattern: str) -> str | None:
    """Return a grammar for a text that matches a valid Rust expression as a whole.

    None if the expression is outside of the regular subset, too large, or too ambiguous.
    """
    try:
        tree = parse_regex(pattern)
        if _size(tree) > MAX_ELEMENTS:
            return None
        _Positions(tree).check_ambiguity()
    except UntranslatableRegex:
        return None
    return f"root ::= {_written(tree)}"


def _size(node: RegexNode) -> int:
    """Return the number of elements with repetitions expanded."""
    match node:
        case CharacterSet():
            return 1
        case Concatenation(parts) | Alternation(parts):
            return sum(map(_size, parts))
        case Repetition(body, least, most):
            return _size(body) * max(least, most or 1)
        case _:
            assert_never(node)


# Notation


def _written(node: RegexNode) -> str:
    match node:
        case CharacterSet(((first, last),)) if first == last:
            return _literal(chr(first))
        case CharacterSet(ranges):
            return _class(ranges)
        case Concatenation(parts):
            return " ".join(_group(part) for part in parts) or _literal("")
        case Alternation(branches):
            return " | ".join(map(_written, branches))
        case Repetition(body, least, most):
            operator = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
            if operator is None:
                operator = f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
            return _group(body) + operator
        case _:
            assert_never(node)


def _group(node: RegexNode) -> str:
    return f"({_written(node)})" if isinstance(node, Alternation | Concatenation) else _written(node)


def _literal(text: str) -> str:
    return f'"{"".join(_spelled(character) for character in text)}"'


_SPELLED: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _spelled(character: str) -> str:
    if character in _SPELLED:
        return _SPELLED[character]
    return character if character >= " " else f"\\x{ord(character):02x}"


def _class(ranges: Ranges) -> str:
    if ranges[-1][1] < LAST_CODE_POINT:
        return f"[{_in_class(ranges)}]"
    return f"[^{_in_class(complement(ranges)) or _code_point(0)}]"


def _in_class(ranges: Ranges) -> str:
    return "".join(
        _code_point(first) if first == last else f"{_code_point(first)}-{_code_point(last)}" for first, last in ranges
    )


def _code_point(code: int) -> str:
    if _PLAIN.match(character := chr(code)):
        return character
    return f"\\x{code:02X}" if code < 0x80 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


# Ambiguity


@dataclass(frozen=True, slots=True)
class _Ends:
    """First and last positions of a part of the expression."""

    first: list[int]
    last: list[int]
    is_nullable: bool


class _Positions:
    """Positions of the characters in an expression, and the transitions between them.

    Two ways from one position to another are two transitions. Every repetition counts as unlimited.
    """

    def __init__(self, tree: RegexNode) -> None:
        # Position 0 is the start.
        self._sets: list[Ranges] = [()]
        self._following: list[list[int]] = [[]]
        # Outermost repetition around each position: inside of it, every position can follow every other one.
        self._loops: list[int] = [0]
        self._work = 0
        self._connect([0], self._add(tree, 0).first)

    def check_ambiguity(self) -> None:
        """Raise UntranslatableRegex if the number of ways to read a text can become large."""
        waiting: list[tuple[int, int]] = []
        pairs: set[tuple[int, int]] = set()
        for position, following in enumerate(self._following):
            self._visit((position, position), combinations(following, 2), pairs, waiting)
        while waiting:
            one, other = pair = waiting.pop()
            self._visit(pair, product(self._following[one], self._following[other]), pairs, waiting)

    def _visit(
        self,
        pair: tuple[int, int],
        moves: Iterable[tuple[int, int]],
        pairs: set[tuple[int, int]],
        waiting: list[tuple[int, int]],
    ) -> None:
        """Add the pairs that one character leads to."""
        for one, other in moves:
            self._count(1)
            if not _overlap(self._sets[one], self._sets[other]):
                continue
            if one == other:
                # Two ways meet inside of a repetition, so they multiply with each round.
                if self._loops[one] and self._loops[one] == self._loops[pair[0]] == self._loops[pair[1]]:
                    raise UntranslatableRegex("an ambiguous repetition")
                continue
            found = (min(one, other), max(one, other))
            if found not in pairs:
                pairs.add(found)
                waiting.append(found)
            if len(pairs) > MAX_AMBIGUOUS_PAIRS:
                raise UntranslatableRegex("ambiguous")

    def _add(self, node: RegexNode, loop: int) -> _Ends:
        match node:
            case CharacterSet(ranges):
                self._sets.append(ranges)
                self._following.append([])
                self._loops.append(loop)
                return _Ends([len(self._sets) - 1], [len(self._sets) - 1], is_nullable=False)
            case Concatenation(parts):
                return self._add_sequence(parts, loop)
            case Alternation(branches):
                ends = [self._add(branch, loop) for branch in branches]
                first = [position for end in ends for position in end.first]
                last = [position for end in ends for position in end.last]
                return _Ends(first, last, any(end.is_nullable for end in ends))
            case Repetition(body, least, most):
                if most == 1:
                    end = self._add(body, loop)
                    return _Ends(end.first, end.last, is_nullable=True)
                end = self._add(body, loop or len(self._sets))
                # llama.cpp rejects unlimited repetitions of nothing.
                if end.is_nullable:
                    raise UntranslatableRegex("a repetition of nothing")
                self._connect(end.last, end.first)
                return _Ends(end.first, end.last, least == 0)
            case _:
                assert_never(node)

    def _add_sequence(self, parts: Sequence[RegexNode], loop: int) -> _Ends:
        first: list[int] = []
        last: list[int] = []
        is_nullable = True
        for part in parts:
            end = self._add(part, loop)
            self._connect(last, end.first)
            first += end.first if is_nullable else []
            last = [*last, *end.last] if end.is_nullable else end.last
            is_nullable = is_nullable and end.is_nullable
        return _Ends(first, last, is_nullable)

    def _connect(self, last: Sequence[int], first: Sequence[int]) -> None:
        self._count(len(last) * len(first))
        for position in last:
            self._following[position] += first

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise UntranslatableRegex("too many transitions")


def _overlap(one: Ranges, other: Ranges) -> bool:
    return any(first <= end and begin <= last for first, last in one for begin, end in other)
