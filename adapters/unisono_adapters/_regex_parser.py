"""Parser for the regular subset of Rust's regular expressions.

The subset has literals, character classes, groups, alternation, quantifiers, and anchors at the beginning and the end.
The tree never accepts a text that the expression does not match. It may accept fewer texts than the expression: `\\d`,
`\\w` and `\\s` accept only ASCII characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TypeAlias

from unisono.core.frozen import dataclass

MAX_NESTING: Final = 40

# Inclusive ranges of code points, sorted and without overlaps.
Ranges: TypeAlias = tuple[tuple[int, int], ...]
# Code point 0 is excluded because it ends a text in llama.cpp.
FIRST_CODE_POINT, LAST_CODE_POINT = 1, 0x10FFFF

_ASCII_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,8})\}")
_GROUP = re.compile(r"\((?:\?:|\?P?<\w+>|(?!\?))")
_QUANTIFIER = re.compile(r"(?:([*+?])|\{([0-9]{1,4})(,([0-9]{1,4})?)?\})\??")
_STACKED = re.compile(r"[*+?{]")
_CLASS_OPERATORS = ("[", "&&", "--", "~~")


class UntranslatableRegex(ValueError):
    """Expression that is outside the subset, or too costly for the grammar engine."""


@dataclass(frozen=True, slots=True)
class CharacterSet:
    """Any one character in these code point ranges. A literal is a range of one code point."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concatenation:
    parts: tuple[RegexNode, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    branches: tuple[RegexNode, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """Repetition of `body`, from `least` to `most` times; a `most` of None is no maximum."""

    body: RegexNode
    least: int
    most: int | None


RegexNode: TypeAlias = CharacterSet | Concatenation | Alternation | Repetition


def parse_regex(pattern: str) -> RegexNode:
    """Return the tree of a regular expression that must match a whole text.

    Raises UntranslatableRegex if the expression is outside the subset.
    """
    return _Parser(pattern).parse()


# Sets of characters


def _union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    gaps, begin = [], FIRST_CODE_POINT
    for first, last in ranges:
        if first > begin:
            gaps.append((begin, first - 1))
        begin = max(begin, last + 1)
    if begin <= LAST_CODE_POINT:
        gaps.append((begin, LAST_CODE_POINT))
    return tuple(gaps)


@dataclass(frozen=True, slots=True)
class _Characters:
    """Set of characters whose exact members are unknown, such as `\\w`.

    `sure` are the characters that certainly belong to the set, and `possible` those that may belong to it.
    """

    sure: Ranges
    possible: Ranges

    @property
    def others(self) -> _Characters:
        return _Characters(complement(self.possible), complement(self.sure))


def _only(first: int, last: int) -> _Characters:
    return _Characters(((first, last),), ((first, last),))


def _shorthand(members: str, possible: Iterable[tuple[int, int]]) -> _Characters:
    sure = _union((ord(each), ord(each)) for each in members)
    return _Characters(sure, _union((*sure, *possible)))


_BEYOND_ASCII: Final = ((0x80, LAST_CODE_POINT),)
_SPACES: Final = (
    (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
_DIGITS: Final = "0123456789"
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_SHORTHANDS: Final = {
    "d": _shorthand(_DIGITS, _BEYOND_ASCII),
    "w": _shorthand(f"{_DIGITS}{_LETTERS}{_LETTERS.upper()}_", _BEYOND_ASCII),
    "s": _shorthand(" \t\n\v\f\r", _SPACES),
}
_ANY: Final = _only(ord("\n"), ord("\n")).others


# Parser


class _Parser:
    """Recursive descent parser of one expression. `_at` is the index of the next character."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def parse(self) -> RegexNode:
        whole = self._alternation(0)
        if self._at < len(self._pattern):
            raise UntranslatableRegex("a closing parenthesis without a group")
        return whole

    def _rest(self) -> str:
        return self._pattern[self._at : self._at + 2]

    def _skip(self, text: str) -> bool:
        if found := self._pattern.startswith(text, self._at):
            self._at += len(text)
        return found

    def _alternation(self, depth: int) -> RegexNode:
        if depth > MAX_NESTING:
            raise UntranslatableRegex("too many nested groups")
        branches = [self._sequence(depth)]
        while self._skip("|"):
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else Alternation(tuple(branches))

    def _sequence(self, depth: int) -> Concatenation:
        # An anchor anywhere else matches only under conditions that a grammar cannot express.
        is_top, has_ended = depth == 0, False
        while is_top and (self._skip("^") or self._skip("\\A")):
            pass
        parts: list[RegexNode] = []
        while self._rest() and self._rest()[0] not in "|)":
            if is_top and (self._skip("$") or self._skip("\\z")):
                has_ended = True
                continue
            if has_ended:
                raise UntranslatableRegex("an end anchor followed by more text")
            parts.append(self._quantified(depth))
        return Concatenation(tuple(parts))

    def _quantified(self, depth: int) -> RegexNode:
        atom = self._atom(depth)
        found = _QUANTIFIER.match(self._pattern, self._at)
        if found is None:
            if self._rest()[:1] == "{":
                raise UntranslatableRegex("an unusual quantifier")
            return atom
        self._at = found.end()
        if _STACKED.match(self._pattern, self._at):
            raise UntranslatableRegex("a quantifier of a quantifier")
        least, most = _bounds(found)
        if most is not None and (most < least or most == 0):
            raise UntranslatableRegex("an unusual quantifier")
        return Repetition(atom, least, most)

    def _atom(self, depth: int) -> RegexNode:
        """Read a character, a class or a group."""
        character = self._rest()[0]
        if character == "(":
            return self._group(depth)
        if character == "[":
            return _node(self._class_content())
        if character == "\\":
            return _node(self._escape())
        if character in "^$*+?{":
            raise UntranslatableRegex("an anchor in the middle, or a quantifier without an expression before it")
        self._at += 1
        return _node(_ANY if character == "." else character)

    def _group(self, depth: int) -> RegexNode:
        opened = _GROUP.match(self._pattern, self._at)
        if opened is None:
            raise UntranslatableRegex("a group with flags")
        self._at = opened.end()
        content = self._alternation(depth + 1)
        if not self._skip(")"):
            raise UntranslatableRegex("an unclosed group")
        return content

    def _escape(self) -> str | _Characters:
        """Read an escaped character or a shorthand class; the next character is the backslash."""
        self._at += 1
        character = self._rest()[:1]
        if found := _HEX.match(self._pattern, self._at):
            self._at = found.end()
            code = int(next(filter(None, found.groups())), 16)
            if not FIRST_CODE_POINT <= code <= LAST_CODE_POINT or 0xD800 <= code < 0xE000:
                raise UntranslatableRegex("an escape for a code point that is not a character")
            return chr(code)
        self._at += 1
        if character in _ASCII_ESCAPES:
            return _ASCII_ESCAPES[character]
        if shorthand := _SHORTHANDS.get(character.lower()):
            return shorthand if character.islower() else shorthand.others
        # In Rust, `\<` and `\>` are word boundaries.
        if not character or character.isalnum() or character in "<>" or character > "~":
            raise UntranslatableRegex("an escape that is not supported")
        return character

    def _class_content(self) -> _Characters:
        """Read a character class; the next character is the opening bracket."""
        self._at += 1
        is_negated = self._skip("^")
        sure: list[tuple[int, int]] = []
        possible: list[tuple[int, int]] = []
        is_first = True
        while is_first or not self._skip("]"):
            item = self._class_item()
            sure += item.sure
            possible += item.possible
            is_first = False
        found = _Characters(_union(sure), _union(possible))
        return found.others if is_negated else found

    def _class_item(self) -> _Characters:
        first = self._class_character()
        if isinstance(first, _Characters):
            return first
        if self._rest()[:1] != "-" or self._rest() == "-]":
            return _only(ord(first), ord(first))
        self._at += 1
        last = self._class_character()
        if isinstance(last, _Characters) or last < first:
            raise UntranslatableRegex("a range with a class as its end, or with its ends reversed")
        return _only(ord(first), ord(last))

    def _class_character(self) -> str | _Characters:
        ahead = self._rest()
        if not ahead or ahead.startswith(_CLASS_OPERATORS):
            raise UntranslatableRegex("an unclosed character class, or a set operation in a character class")
        if ahead[0] == "\\":
            return self._escape()
        self._at += 1
        return ahead[0]


def _bounds(quantifier: re.Match[str]) -> tuple[int, int | None]:
    """Return the minimum and maximum of a quantifier; the maximum is None if there is none."""
    operator, least, has_range, most = quantifier.groups()
    if operator:
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[operator]
    return int(least), int(most) if most else None if has_range else int(least)


def _node(characters: str | _Characters) -> CharacterSet:
    ranges = ((ord(characters), ord(characters)),) if isinstance(characters, str) else characters.sure
    if not ranges:
        raise UntranslatableRegex("a class without characters")
    return CharacterSet(ranges)
