"""A backtracking matcher for the parse trees of `re` that counts its steps.

It tries the same alternatives in the same order as `re` does, so its number of steps grows as the time of `re` does.
A count, unlike a time, is the same on every machine and in every run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any, Final

UNBOUNDED: Final = int(_constants.MAXREPEAT)
CHARACTERS: Final = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN)
REPEATS: Final = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)

SET, SPLIT, JUMP, AT, ATOMIC, LOOK, MARK, PROGRESS = range(8)

Instruction = tuple[int, Any, Any]


def children(op: Any, value: Any) -> list[Any]:
    """Return the parts of a parse tree item that are themselves lists of items."""
    if op in REPEATS:
        return [value[2]]
    if op is _constants.SUBPATTERN:
        return [value[3]]
    if op is _constants.BRANCH:
        return list(value[1])
    if op is _constants.ATOMIC_GROUP:
        return [value]
    return [value[1]] if op in (_constants.ASSERT, _constants.ASSERT_NOT) else []


class TooManySteps(Exception):
    """Raised when the step limit is reached before the end of the match."""


class Counter:
    """Number of steps and their limit."""

    def __init__(self, limit: int) -> None:
        self.steps = 0
        self.limit = limit


class Tree:
    """One parsed pattern.

    Bounded repeats have at most `largest` repetitions.
    """

    def __init__(self, pattern: str | bytes, flags: int = 0, *, largest: int = UNBOUNDED) -> None:
        self.is_bytes = isinstance(pattern, bytes)
        self.compiled = re.compile(pattern, flags)
        self.parsed = _parser.parse(pattern, flags & ~re.DEBUG)
        self.flags = int(self.parsed.state.flags)
        self._largest = largest
        self._members: dict[tuple[int, str, int], bool] = {}
        self._single: dict[tuple[int, int], re.Pattern[Any]] = {}
        self.alphabet = frozenset[str]()
        self.has_unbounded_repeat = False
        self._note_repeats(self.parsed)

    def accepts(self, item: tuple[Any, Any], character: str, flags: int) -> bool:
        """Whether one item of the parse tree matches one character, by `re` itself."""
        found = self._members.get((id(item), character, flags))
        if found is None:
            single = self._single.get((id(item), flags))
            if single is None:
                state = _parser.State()
                state.flags = flags
                single = _compiler.compile(_parser.SubPattern(state, [item]), flags)
                self._single[id(item), flags] = single
            subject = character.encode("latin-1") if self.is_bytes else character
            found = self._members[id(item), character, flags] = single.match(subject) is not None
        return found

    def _note_repeats(self, items: Iterable[tuple[Any, Any]]) -> None:
        for op, value in items:
            self.has_unbounded_repeat |= op in REPEATS and value[1] == UNBOUNDED
            for inner in children(op, value):
                self._note_repeats(inner)

    def bounds(self, low: int, high: int) -> tuple[int, int]:
        low = min(int(low), self._largest)
        return low, UNBOUNDED if high == UNBOUNDED else max(low, min(int(high), self._largest))

    def program(self, *, full: bool = False) -> list[Instruction]:
        """Return the instructions of the pattern over `alphabet`, which has to be set before."""
        program: list[Instruction] = []
        self._emit(program, self.parsed, self.flags)
        if full:
            program.append((AT, _constants.AT_END_STRING, self.flags))
        return program

    def _emit(self, out: list[Instruction], items: Iterable[tuple[Any, Any]], flags: int) -> None:
        for item in items:
            op, value = item
            if op in CHARACTERS:
                out.append((SET, frozenset(c for c in self.alphabet if self.accepts(item, c, flags)), None))
            elif op is _constants.AT:
                out.append((AT, value, flags))
            elif op is _constants.SUBPATTERN:
                self._emit(out, value[3], (flags | value[1]) & ~value[2])
            elif op is _constants.BRANCH:
                self._branch(out, value[1], flags)
            elif op in REPEATS:
                self._repeat(out, op, value, flags)
            elif op is _constants.ATOMIC_GROUP:
                out.append((ATOMIC, self._inner(value, flags), None))
            elif op in (_constants.ASSERT, _constants.ASSERT_NOT):
                width = value[1].getwidth()[0] if value[0] < 0 else 0
                out.append((LOOK, self._inner(value[1], flags), (width, op is _constants.ASSERT)))
            else:
                raise NotImplementedError(f"{op} in {self.compiled.pattern!r}")

    def _inner(self, items: Iterable[tuple[Any, Any]], flags: int) -> list[Instruction]:
        program: list[Instruction] = []
        self._emit(program, items, flags)
        return program

    def _branch(self, out: list[Instruction], branches: Iterable[Any], flags: int) -> None:
        jumps = []
        *most, last = branches
        for branch in most:
            split = len(out)
            out.append((SPLIT, 0, 0))
            self._emit(out, branch, flags)
            jumps.append(len(out))
            out.append((JUMP, 0, None))
            out[split] = (SPLIT, split + 1, len(out))
        self._emit(out, last, flags)
        for jump in jumps:
            out[jump] = (JUMP, len(out), None)

    def _repeat(self, out: list[Instruction], op: Any, value: Any, flags: int) -> None:
        if op is _constants.POSSESSIVE_REPEAT:
            program: list[Instruction] = []
            self._repeat(program, _constants.MAX_REPEAT, value, flags)
            out.append((ATOMIC, program, None))
            return
        low, high = self.bounds(*value[:2])
        for _ in range(low):
            self._emit(out, value[2], flags)
        splits = []
        if high == UNBOUNDED:
            splits.append(len(out))
            can_be_empty = value[2].getwidth()[0] == 0
            out.append((SPLIT, 0, 0))
            out += [(MARK, splits[0], None)] if can_be_empty else []
            self._emit(out, value[2], flags)
            out += [(PROGRESS, splits[0], None)] if can_be_empty else []
            out.append((JUMP, splits[0], None))
        for _ in range(0 if high == UNBOUNDED else high - low):
            splits.append(len(out))
            out.append((SPLIT, 0, 0))
            self._emit(out, value[2], flags)
        is_lazy = op is _constants.MIN_REPEAT
        for split in splits:
            out[split] = (SPLIT, len(out), split + 1) if is_lazy else (SPLIT, split + 1, len(out))


def match_end(program: list[Instruction], text: str, start: int, counter: Counter) -> int:
    """Return the end of the match at `start`, or -1. Raises TooManySteps."""
    size, end_of_program = len(text), len(program)
    marks: tuple[tuple[int, int], ...] = ()
    todo = [(0, start, marks)]
    while todo:
        at, position, marks = todo.pop()
        while at < end_of_program:
            counter.steps += 1
            op, first, second = program[at]
            at += 1
            if op == SET:
                if position < size and text[position] in first:
                    position += 1
                    continue
                break
            if op == SPLIT:
                todo.append((second, position, marks))
                at = first
            elif op == JUMP:
                at = first
            elif op == MARK:
                marks = (*(mark for mark in marks if mark[0] != first), (first, position))
            elif op == PROGRESS:
                # An empty repetition is not repeated.
                if (first, position) in marks:
                    break
            elif op == AT:
                if not _is_at(first, second, text, position):
                    break
            elif op == ATOMIC:
                position = match_end(first, text, position, counter)
                if position < 0:
                    break
            elif not _looks(first, second, text, position, counter):
                break
        else:
            return position
        if counter.steps > counter.limit:
            raise TooManySteps
    return -1


def _looks(program: list[Instruction], how: tuple[int, bool], text: str, position: int, counter: Counter) -> bool:
    width, wanted = how
    found = position >= width and match_end(program, text, position - width, counter) >= 0
    return found is wanted


def _is_at(where: Any, flags: int, text: str, position: int) -> bool:
    if where is _constants.AT_BEGINNING and flags & re.MULTILINE:
        return position == 0 or text[position - 1] == "\n"
    if where in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING):
        return position == 0
    if where is _constants.AT_END_STRING:
        return position == len(text)
    if where is _constants.AT_END:
        is_last = position == len(text) or position == len(text) - 1
        return position == len(text) or (text[position] == "\n" and (is_last or bool(flags & re.MULTILINE)))
    if where in (_constants.AT_BOUNDARY, _constants.AT_NON_BOUNDARY):
        word = [0 <= place < len(text) and _is_word(text[place]) for place in (position - 1, position)]
        return (word[0] != word[1]) is (where is _constants.AT_BOUNDARY)
    raise NotImplementedError(str(where))


def _is_word(character: str) -> bool:
    return character == "_" or character.isalnum()


def spans(program: list[Instruction], text: str, counter: Counter, *, mode: str) -> list[tuple[int, int]]:
    """Return the matches that `re` finds with the method `mode`.

    `mode` is match, fullmatch, search or finditer. With `tokens`, each match has to start at the end of the previous
    one.
    """
    found: list[tuple[int, int]] = []
    start = 0
    while start <= len(text):
        end = match_end(program, text, start, counter)
        if end >= 0:
            found.append((start, end))
        if mode in ("match", "fullmatch") or (found and mode == "search") or (end <= start and mode == "tokens"):
            break
        start = max(end, start + 1)
    return found
