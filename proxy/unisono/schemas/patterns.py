"""Regular expressions from clients, run by an engine with time linear in the text.

This is Rust's engine, as bundled with pydantic; Python's can take forever on one line of text. The Rust engine lacks
look-around and back references, which no backend grammar supports either. Its time is also linear in the size of the
expression, and compilation cannot be interrupted. Both costs are estimated from the expression before compilation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

LONGEST: Final = 1_000
"""Maximum characters of one expression."""
MOST_WORK: Final = 100_000
"""Maximum work of compiling one expression, in units of about a microsecond."""

_WORK_PER_STEP: Final = 2_000
"""Product of text characters and expression positions that costs one validation step."""
_COSTLY: Final = 5_000
"""Work from which a compiled expression takes megabytes, so that few are cached."""
_KEPT, _COSTLY_KEPT = 64, 8

# An unclosed bracket extends to the end of the expression, which the engine then rejects. A search for its end from
# each of many such brackets would take quadratic time.
_TOKEN = re.compile(
    r"""(?P<letters>\\(?:[wW]|[pP](?:\{[^}]*+(?:\}|\Z)|.)))
      | (?P<digits>\\[dD])
      | (?P<some>\\[sS])
      | (?P<one>\\(?:[xuU]\{[^}]*+(?:\}|\Z)|.))
      | (?P<group>\((?:\?P?<[^>]*+(?:>|\Z)|\?(?P<within>[A-Za-z-]*):)?)
      | (?P<end>\))
      | (?P<repeat>\{(?P<least>\d*)(?P<range>,(?P<most>\d*))?\})
      | (?P<any>\.)
      | (?P<nothing>[*+?|])
      | (?P<class>\[\^?\]?)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_FLAGS = re.compile(r"\(\?([A-Za-z-]+)\)")
_IN_CLASS = re.compile(
    r"""(?P<letters>\\(?:[wW]|[pP](?:\{[^}]*+(?:\}|\Z)|.)))
      | (?P<digits>\\[dD])
      | (?P<one>\\(?:[xuU]\{[^}]*+(?:\}|\Z)|.))
      | (?P<open>\[\^?\]?)
      | (?P<close>\])
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_FAR = re.compile(r"\\[xuU]|[^\x00-\x7f]")
_FOLDING: Final = 2_500
"""Work of a range across all scripts when case is ignored."""
WORK: Final = {"letters": 350, "digits": 15, "some": 3, "any": 3}
"""Work of classes with several ranges: the letters of all scripts form hundreds."""


class BadPattern(ValueError):
    """Reason why an expression is rejected."""


@dataclass(frozen=True, slots=True)
class Size:
    """Cost of an expression with its repetitions expanded.

    `places` counts its positions, `work` the microseconds of compilation.
    """

    places: int = 0
    work: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.places + other.places, self.work + other.work)

    def times(self, count: int) -> Size:
        return Size(self.places * count, self.work * count)


def size_of(pattern: str) -> Size:
    """Estimate the size, rather too high than too low. Raises BadPattern for ambiguous syntax."""
    sums, last, place, folds = [Size()], Size(), 0, False
    while place < len(pattern):
        if flags := _FLAGS.match(pattern, place):
            folds = _check_flags(flags[1]) or folds
            place = flags.end()
            continue
        token = _TOKEN.match(pattern, place)
        assert token is not None, "any character is one"
        place = token.end()
        match token.lastgroup:
            case "group":
                folds = _check_flags(token["within"] or "") or folds
                sums[-1] += last
                sums.append(Size())
                last = Size(1, 1)
            case "end" if len(sums) > 1:
                last = sums.pop() + last
            case "repeat":
                last = last.times(max(int(token["least"] or 0), int(token["most"] or 0), 1))
            case "nothing":
                continue
            case kind:
                sums[-1] += last
                last = Size(1, WORK.get(kind or "", 1))
                if kind == "class":
                    work, place = _class_work(pattern, place)
                    last = Size(1, work)
    folded = pattern.count("-") * _FOLDING if folds and _FAR.search(pattern) else 0
    return sum(sums, last + Size(0, folded))


def _check_flags(flags: str) -> bool:
    """Return True if the flags ignore case. Raises BadPattern."""
    if "x" in flags:
        raise BadPattern("its flag x would leave out spaces")
    return "i" in flags


def _class_work(pattern: str, place: int) -> tuple[int, int]:
    """Return the work of the character class that opens at `place`, and its end."""
    work, depth = 3, 1
    while depth and place < len(pattern):
        token = _IN_CLASS.match(pattern, place)
        assert token is not None, "any character is one"
        place = token.end()
        work += WORK.get(token.lastgroup or "", 1)
        depth += {"open": 1, "close": -1}.get(token.lastgroup or "", 0)
    return work, place


class Expression:
    """Compiled expression. Raises BadPattern if the engine cannot run it."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > LONGEST:
            raise BadPattern(f"it has more than {LONGEST:,} characters")
        self.size = size_of(pattern)
        if self.size.work > MOST_WORK:
            raise BadPattern("with what it repeats written out it is too large")
        compiled: Callable[[str], SchemaValidator] = _compiled if self.size.work < _COSTLY else _costly_compiled
        self._compiled = compiled(pattern)

    def steps(self, text: str) -> int:
        """Return an upper estimate of the match time, in validation steps."""
        return 1 + len(text) * self.size.places // _WORK_PER_STEP

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
        why = str(error).rpartition("error: ")[2].strip()
        raise BadPattern(f"it is no regular expression that can be run: {' '.join(why.split())[:200]}") from error


_compiled = lru_cache(_KEPT)(_compile)
_costly_compiled = lru_cache(_COSTLY_KEPT)(_compile)
