"""Grammars in llama.cpp's notation GBNF, for choices of texts and regular expressions.

For every token, llama.cpp follows all ways to parse the text so far, one after the other. With an ambiguous grammar
there are so many ways that the whole server stalls: with `(.{1,30}){30}z` it generated no token in 100 seconds.
Therefore this module translates an expression only if the number of ways stays small.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations, product
from typing import Final, assert_never

from unisono.core.frozen import dataclass
from unisono_adapters._regex_parser import (
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

# Maximum number of elements in a grammar, counted after the repetitions are expanded, since llama.cpp expands them.
MAX_ELEMENTS: Final = 1_000
# Maximum number of transitions and of pairs of transitions that the check looks at. Each takes about a microsecond.
MAX_WORK: Final = 50_000
# Maximum number of pairs of different positions in the expression that the same text can reach.
MAX_AMBIGUOUS_PAIRS: Final = 40
MAX_CACHED: Final = 64

_PLAIN = re.compile(r"[A-Za-z0-9_ ]")


def choice_grammar(texts: Sequence[str]) -> str:
    """Return a grammar that accepts exactly the given texts."""
    return "root ::= " + " | ".join(map(_literal, texts))


# A literal, a character class, a comment, or the name of a rule.
_GRAMMAR_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|(?P<name>[A-Za-z0-9_-]+)', re.DOTALL)


def client_grammar(grammar: str) -> str:
    """Return a client's grammar with its rules renamed so that llama.cpp can read it.

    vLLM and SGLang allow underscores in the names of rules; llama.cpp does not.
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
    """Return a grammar for texts that a regular expression matches completely.

    `pattern` must be valid in Rust's syntax. Returns None if the expression uses a feature outside the regular
    subset, or if it is too large or too ambiguous.
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
    """Return the number of elements in the tree, with all repetitions expanded."""
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
    """Positions at which a match of a part of the expression can begin and end.

    The match begins at one of `first` and ends at one of `last`.

    `is_nullable` is True if the part also matches the empty text.
    """

    first: list[int]
    last: list[int]
    is_nullable: bool


class _Positions:
    """Positions of the characters in an expression, and the transitions between the positions.

    If there are two ways from one position to another, there are two transitions. The check treats every repetition
    as unlimited.
    """

    def __init__(self, tree: RegexNode) -> None:
        # Position 0 is the start.
        self._sets: list[Ranges] = [()]
        self._following: list[list[int]] = [[]]
        # Outermost repetition around each position; 0 outside of repetitions.
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
        """Add to `pairs` and `waiting` the positions that the next character can reach from `pair`.

        Two positions form a pair if two ways to read the same text lead to them. `moves` are the pairs of following
        positions. Raises UntranslatableRegex if two ways meet again inside a repetition.
        """
        for one, other in moves:
            self._count(1)
            if not _overlap(self._sets[one], self._sets[other]):
                continue
            if one == other:
                # Two ways meet inside a repetition, so the number of ways multiplies with each round.
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
                # llama.cpp rejects unlimited repetitions of an expression that can be empty.
                if end.is_nullable:
                    raise UntranslatableRegex("a repetition of an expression that can be empty")
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
