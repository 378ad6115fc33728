"""Growth of the work of a pattern with its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tests.patterns.backtracking import Counter, TooManySteps, Tree, spans
from tests.patterns.evil import Evil, evils

MAX_STEPS: Final = 400_000
FACTOR: Final = 4
# Limit for the growth of the steps with four times the input: 4 is linear, 16 is quadratic.
SUPERLINEAR: Final = 6.5
# Every other method finds all matches.
METHODS: Final = {"match": "match", "fullmatch": "fullmatch", "search": "search", "tokens": "tokens"}


@dataclass(frozen=True)
class Superlinear:
    """An input for which the work of a pattern grows faster than the input."""

    pattern: str | bytes
    mode: str
    evil: Evil
    steps: tuple[int, ...]


def superlinear(pattern: str | bytes, method: str, flags: int = 0, *, thorough: bool = False) -> Superlinear | None:
    """Return the first input that makes `pattern` superlinear, or None.

    Bounds of repeats are lowered, so that short inputs exceed them. The thorough sweep lowers them less and tries more
    inputs.
    """
    tree = Tree(pattern, flags, largest=12 if thorough else 4)
    if not (tree.has_unbounded_repeat or thorough):
        return None
    mode = METHODS.get(method, "finditer")
    inputs = list(evils(tree, thorough=thorough))
    program = tree.program(full=mode == "fullmatch")
    times = 24 if thorough else 10
    for evil in inputs:
        steps = [_steps(program, evil.text(times * size), mode) for size in (1, FACTOR)]
        if steps[1] >= MAX_STEPS:
            return Superlinear(pattern, mode, evil, tuple(steps))
        if steps[1] > SUPERLINEAR * steps[0]:
            # Larger bounds and rare alternatives affect the first step only.
            steps.append(_steps(program, evil.text(times * FACTOR**2), mode))
            if steps[2] > SUPERLINEAR * steps[1]:
                return Superlinear(pattern, mode, evil, tuple(steps))
    return None


def _steps(program: list[Any], text: str, mode: str) -> int:
    counter = Counter(MAX_STEPS)
    try:
        spans(program, text, counter, mode=mode)
    except TooManySteps:
        return MAX_STEPS
    return counter.steps
