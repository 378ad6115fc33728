"""Every regular expression of the product runs in time linear in its input."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import pytest

from tests.patterns.backtracking import UNBOUNDED, Counter, Tree, match_end
from tests.patterns.collected import Found, patterns
from tests.patterns.evil import evils
from tests.patterns.sweep import superlinear
from unisono.engine.interventions.message_gate import without_code_fence
from unisono.schemas import formats
from unisono_adapters._load_metrics import MAX_LINE_BYTES, MAX_SAMPLES, samples

FENCE: Final = r"\s*```[A-Za-z0-9_-]*[ \t]*\r?\n(.*?)\r?\n?[ \t]*```\s*\Z"
LABEL: Final = r'([A-Za-z_]\w*)\s*=\s*"((?:[^"\\\n]|\\.)*)"'

SLOW: Final = {
    "code fence": (FENCE, "match", re.DOTALL),
    "metrics label": (LABEL, "findall", 0),
    "nested repeat": (r"(a+)+$", "match", 0),
    "overlapping alternatives": (r"(?:a|a)*b", "match", 0),
    "overlapping neighbours": (r"a*[ab]*c", "match", 0),
    "neighbours overlapping in one letter": (r"[^a-y]*[z0]*c", "match", 0),
    "line end": (r"\s+$", "search", 0),
    "start without an end": (r"<a[^>]*>", "sub", 0),
    "overlapping words": (r"(?:ab|ba|a|b)*c", "match", 0),
    "empty repetition": (r"(?:x?y?)*z", "search", 0),
    "lazy repeat between delimiters": (r"/\*.*?\*/", "finditer", re.DOTALL),
    "bytes": (rb"x*x*y", "match", 0),
    "distant end": (r"begin(\w*)\d*end", "search", 0),
}
LINEAR: Final = {
    "code fence, possessive spaces": (r"\s*+```[a-z]*+\n", "match", 0),
    "atomic": (r"(?>a+)b", "match", 0),
    "look-behind": (r"(?<!\s)\s+$", "search", 0),
    "bounded": (r"<a[^>]{0,300}>", "sub", 0),
    "token": (r"\s*\w+", "tokens", 0),
    "strings": (r'"(?:[^"\\]++|\\.)*+"', "match", 0),
}


def _expressions() -> list[Mapping[str, Any]]:
    """Return the patterns of `_shaped`, which are closure variables of the format checks."""
    checks = [*formats.FORMATS.values(), formats._TIME, formats._DATE_TIME, formats._DATE]
    cells = [cell.cell_contents for check in checks for cell in getattr(check, "__closure__", None) or ()]
    return [{"expression": cell.pattern} for cell in cells if isinstance(cell, re.Pattern)]


# Values of local variables for patterns that are built in functions.
LOCALS: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "unisono.observe.redaction: _any_of(known)": [{"known": ["sk-abcabc", "abcabcabc", "a.b*c"]}],
    "unisono.schemas.formats: expression": _expressions(),
    "unisono.toolservers.browser.html_text: f'</{called}(?![a-z0-9])'": [{"called": "script"}],
}


@cache
def swept() -> list[Found]:
    return patterns(LOCALS)


def _faults(*, thorough: bool) -> list[str]:
    return [
        f"{found.where}: {fault.mode} of {fault.evil} takes {fault.steps} steps"
        for found in swept()
        for mode in sorted(found.modes)
        if (fault := superlinear(found.pattern, mode, found.flags, thorough=thorough)) is not None
    ]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("pattern", "mode", "flags"), SLOW.values(), ids=SLOW)
def test_the_sweep_finds_superlinear_patterns(pattern: str | bytes, mode: str, flags: int) -> None:
    assert superlinear(pattern, mode, flags) is not None


@pytest.mark.parametrize(("pattern", "mode", "flags"), LINEAR.values(), ids=LINEAR)
def test_the_sweep_accepts_linear_patterns(pattern: str | bytes, mode: str, flags: int) -> None:
    assert superlinear(pattern, mode, flags) is None


@pytest.mark.slow
def test_every_pattern_is_linear() -> None:
    assert not _faults(thorough=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_pattern_is_linear_in_the_thorough_sweep() -> None:
    assert not _faults(thorough=True)


@pytest.mark.slow
def test_the_matcher_of_the_sweep_agrees_with_re() -> None:
    """The step counts say something about `re` only if the matcher finds the same matches."""
    for found in swept():
        tree = Tree(found.pattern, found.flags, largest=UNBOUNDED)
        inputs = list(evils(tree))
        for full in (False, True):
            program = tree.program(full=full)
            for evil in inputs[:: max(1, len(inputs) // 20)]:
                text = evil.text(2)
                subject: Any = text.encode("latin-1") if tree.is_bytes else text
                compiled: Any = tree.compiled
                match = (compiled.fullmatch if full else compiled.match)(subject)
                end = match_end(program, text, 0, Counter(10**7))
                assert end == (-1 if match is None else match.end()), (found.where, text)


def test_code_fence_removal_follows_the_grammar() -> None:
    fence = re.compile(FENCE, re.DOTALL)
    random.seed(7)
    pieces = ["```", "`", "\n", "\r\n", "\r", " ", "\t", "json", "{}", "\u00e4", "x", "-"]
    for _ in range(20_000):
        text = "".join(random.choices(pieces, k=random.randrange(12)))
        if random.random() < 0.7:
            text = "```" + random.choice(["", "json", "json \t", "js on"]) + "\n" + text + "```"
        expected = fence.match(text)
        assert without_code_fence(text) == (expected and expected[1]), text


def test_metrics_pages_are_limited_in_lines_and_samples() -> None:
    long = b'g{a="' + b"x" * MAX_LINE_BYTES + b'"} 1\n'
    assert samples(long + b'g{a="b"} 2\n', "g") == {"g": samples(b'g{a="b"} 2\n', "g")["g"]}
    assert len(samples(b"g 1\n" * 3 * MAX_SAMPLES, "g")["g"]) == MAX_SAMPLES
    assert samples(b"gg 1\ng\n g 3\ng{ 2", "g") == {}
