"""Regular expressions from clients, run by an engine that takes time linear in the text.

The engine is that of Rust, which pydantic includes. Python's own engine can take exponential time. Rust's engine lacks
look-around and back references, which no backend grammar supports either. Its time is also linear in the size of the
expression, and it cannot be interrupted. Therefore the costs of compilation and matching are estimated in advance.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

# Maximum characters of one expression.
MAX_CHARACTERS: Final = 1_000
# Maximum work of compiling one expression, in units of about a microsecond.
MAX_WORK: Final = 100_000

# Product of text characters and expression positions that takes as long as one validation step.
_MATCHING_PER_STEP: Final = 2_000
# With at least this work, a compiled expression takes megabytes, so only a few such expressions are cached.
_LARGE: Final = 5_000
_CACHED, _LARGE_CACHED = 64, 8

# An unclosed bracket extends to the end of the expression, which the engine then rejects. A search for its end from
# each of many such brackets would take quadratic time.
_TOKEN = re.compile(
    r"""(?P<word>\\(?:[wW]|[pP](?:\{[^}]*+(?:\}|\Z)|.)))
      | (?P<digit>\\[dD])
      | (?P<space>\\[sS])
      | (?P<one>\\(?:[xuU]\{[^}]*+(?:\}|\Z)|.))
      | (?P<group>\((?:\?P?<[^>]*+(?:>|\Z)|\?(?P<flags>[A-Za-z-]*):)?)
      | (?P<end>\))
      | (?P<repeat>\{(?P<min>\d*)(?P<range>,(?P<max>\d*))?\})
      | (?P<any>\.)
      | (?P<operator>[*+?|])
      | (?P<class>\[\^?\]?)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_FLAGS = re.compile(r"\(\?([A-Za-z-]+)\)")
_IN_CLASS = re.compile(
    r"""(?P<word>\\(?:[wW]|[pP](?:\{[^}]*+(?:\}|\Z)|.)))
      | (?P<digit>\\[dD])
      | (?P<one>\\(?:[xuU]\{[^}]*+(?:\}|\Z)|.))
      | (?P<open>\[\^?\]?)
      | (?P<close>\])
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_NON_ASCII = re.compile(r"\\[xuU]|[^\x00-\x7f]")
# Compilation work of a range of non-ASCII characters if case is ignored.
_CASE_FOLDING_WORK: Final = 2_500
# Compilation work of character classes. The word characters of Unicode form hundreds of ranges.
_CLASS_WORK: Final = {"word": 350, "digit": 15, "space": 3, "any": 3}


class BadPattern(ValueError):
    """An expression is rejected. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Size:
    """Cost of an expression with its repetitions expanded."""

    positions: int = 0
    work: int = 0  # of compilation, in microseconds

    def __add__(self, other: Size) -> Size:
        return Size(self.positions + other.positions, self.work + other.work)

    def times(self, count: int) -> Size:
        return Size(self.positions * count, self.work * count)


def size_of(pattern: str) -> Size:
    """Estimate the size of an expression; the estimate may be too high, but not too low.

    Raises BadPattern for ambiguous syntax.
    """
    sums, last, at, ignores_case = [Size()], Size(), 0, False
    while at < len(pattern):
        if flags := _FLAGS.match(pattern, at):
            ignores_case = _check_flags(flags[1]) or ignores_case
            at = flags.end()
            continue
        token = _TOKEN.match(pattern, at)
        assert token is not None, "every character matches a token"
        at = token.end()
        match token.lastgroup:
            case "group":
                ignores_case = _check_flags(token["flags"] or "") or ignores_case
                sums[-1] += last
                sums.append(Size())
                last = Size(1, 1)
            case "end" if len(sums) > 1:
                last = sums.pop() + last
            case "repeat":
                last = last.times(max(int(token["min"] or 0), int(token["max"] or 0), 1))
            case "operator":
                continue
            case kind:
                sums[-1] += last
                last = Size(1, _CLASS_WORK.get(kind or "", 1))
                if kind == "class":
                    work, at = _class_work(pattern, at)
                    last = Size(1, work)
    folded = pattern.count("-") * _CASE_FOLDING_WORK if ignores_case and _NON_ASCII.search(pattern) else 0
    return sum(sums, last + Size(0, folded))


def _check_flags(flags: str) -> bool:
    """Return True if the flags include `i`, which ignores case.

    Raises BadPattern for the flag `x`.
    """
    if "x" in flags:
        raise BadPattern("it uses the flag x")
    return "i" in flags


def _class_work(pattern: str, at: int) -> tuple[int, int]:
    """Return the estimated work of a character class, and the index after its end.

    `at` is the index after the opening bracket.
    """
    work, depth = 3, 1
    while depth and at < len(pattern):
        token = _IN_CLASS.match(pattern, at)
        assert token is not None, "every character matches a token"
        at = token.end()
        work += _CLASS_WORK.get(token.lastgroup or "", 1)
        depth += {"open": 1, "close": -1}.get(token.lastgroup or "", 0)
    return work, at


class Expression:
    """Compiled expression.

    Raises BadPattern if the expression is too large, or the engine does not support it.
    """

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_CHARACTERS:
            raise BadPattern(f"it has more than {MAX_CHARACTERS:,} characters")
        self.size = size_of(pattern)
        if self.size.work > MAX_WORK:
            raise BadPattern("it is too large once its repetitions, such as `{1,1000}`, are expanded")
        compiled: Callable[[str], SchemaValidator] = _compiled if self.size.work < _LARGE else _large_compiled
        self._compiled = compiled(pattern)

    def steps(self, text: str) -> int:
        """Return an upper bound of the time for matching `text`, in validation steps."""
        return 1 + len(text) * self.size.positions // _MATCHING_PER_STEP

    def found(self, text: str) -> bool:
        """Return True if the expression matches anywhere in `text`."""
        try:
            self._compiled.validate_python(text)
        except ValidationError:
            return False
        return True


def _compile(pattern: str) -> SchemaValidator:
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        reason = str(error).rpartition("error: ")[2].strip()
        raise BadPattern(f"it is not a supported regular expression: {' '.join(reason.split())[:200]}") from error


_compiled = lru_cache(_CACHED)(_compile)
_large_compiled = lru_cache(_LARGE_CACHED)(_compile)
