"""Report of a comparison: readable lines, and JSON data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any, Final

from unisono.fidelity.comparison import Comparison, Divergence, Statistics, Thresholds
from unisono.fidelity.statistics import Estimate
from unisono.harmony.encoding import Encoding

# Maximum number of differing answers that the report describes.
MAX_DIVERGENCES: Final = 5
# Number of tokens that are printed before and after a difference.
CONTEXT_BEFORE: Final = 16
CONTEXT_AFTER: Final = 8


def to_lines(comparison: Comparison, limits: Thresholds, encoding: Encoding) -> Iterator[str]:
    """Yield the lines of the report."""
    total = comparison.total
    unscored = f", {comparison.unscored} without scores" if comparison.unscored else ""
    yield f"{comparison.answers} answers, {total.tokens} tokens{unscored}"
    yield ""
    yield f"{'place':<12}{'tokens':>8}  {'same choice, %':<25}{'divergence, nats':<28}change of log probability"
    for name, statistics in [("all", total), *((place.value, found) for place, found in comparison.places.items())]:
        yield _row(name, statistics)
    yield ""
    yield from _differences(comparison, encoding)
    exceeded = limits.exceeded_by(total)
    wanted = f"same choice at least {limits.agreement:.2%}, divergence at most {limits.divergence:g} nats"
    yield f"DIFFERENT: beyond the limit of {' and '.join(exceeded)} ({wanted})" if exceeded else f"Equal: {wanted}"


def _row(name: str, statistics: Statistics) -> str:
    agreement = _interval(statistics.agreement, 100, 2)
    divergence, shift = _interval(statistics.divergence, 1, 5), _interval(statistics.shift, 1, 4)
    return f"{name:<12}{statistics.tokens:>8}  {agreement:<25}{divergence:<28}{shift}".rstrip()


def _interval(estimate: Estimate | None, scale: int, digits: int) -> str:
    if estimate is None:
        return "-"
    value = f"{estimate.value * scale:.{digits}f}"
    if not isfinite(estimate.low):
        return value
    return f"{value} ({estimate.low * scale:.{digits}f} to {estimate.high * scale:.{digits}f})"


def _differences(comparison: Comparison, encoding: Encoding) -> Iterator[str]:
    found = comparison.divergences
    if not found:
        return
    yield f"{len(found)} of {comparison.answers} answers have a token at which the backends differ, the first being:"
    for divergence in found[:MAX_DIVERGENCES]:
        yield f"  {divergence.sample.name}, {_in_words(divergence, encoding)}"
        yield f"    {_context(divergence, encoding)}"
    yield ""


def _in_words(divergence: Divergence, encoding: Encoding) -> str:
    place = divergence.sample.places[divergence.position].value
    expected, found = (_spelled([token], encoding) for token in (divergence.expected, divergence.found))
    at = f"token {divergence.position} ({place})"
    if divergence.expected == divergence.found:
        return f"{at}: both choose {expected}, but their distributions differ by {divergence.nats:.4f} nats"
    return f"{at}: {found} instead of {expected}, which the reference prefers by {divergence.preference:.2f} nats"


def _context(divergence: Divergence, encoding: Encoding) -> str:
    tokens, at = divergence.sample.tokens, divergence.position
    before = _text(tokens[max(at - CONTEXT_BEFORE, 0) : at], encoding)
    own = _text(tokens[at : at + 1], encoding)
    after = _text(tokens[at + 1 : at + 1 + CONTEXT_AFTER], encoding)
    return f"{before} >>{own}<< {after}"


def _spelled(tokens: list[int], encoding: Encoding) -> str:
    return f"'{_text(tokens, encoding)}'"


def _text(tokens: Any, encoding: Encoding) -> str:
    # Control characters of a model's output must not reach a terminal.
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in encoding.decode(tokens))


def to_json(comparison: Comparison, limits: Thresholds, encoding: Encoding) -> dict[str, object]:
    """Return the report as JSON data; the bounds of an unbounded interval are null."""
    return {
        "object": "unisono.comparison",
        "equal": not limits.exceeded_by(comparison.total),
        "exceeded": list(limits.exceeded_by(comparison.total)),
        "limits": asdict(limits),
        "answers": comparison.answers,
        "unscored": comparison.unscored,
        "total": _json_of(comparison.total),
        "places": {place.value: _json_of(found) for place, found in comparison.places.items()},
        "divergences": [_divergence_json(found, encoding) for found in comparison.divergences],
    }


def _json_of(statistics: Statistics) -> dict[str, object]:
    return {name: _estimate_json(value) for name, value in asdict(statistics).items()}


def _estimate_json(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return {name: each if isfinite(each) else None for name, each in value.items()}


def _divergence_json(divergence: Divergence, encoding: Encoding) -> dict[str, object]:
    sample, at = divergence.sample, divergence.position
    return {
        "answer": sample.name,
        "position": at,
        "place": sample.places[at].value,
        "token": sample.tokens[at],
        "expected": divergence.expected,
        "found": divergence.found,
        "preference": divergence.preference,
        "nats": divergence.nats,
        "context": _context(divergence, encoding),
    }
