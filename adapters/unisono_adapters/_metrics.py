"""The text that Prometheus reads, as far as a gateway needs it: some gauges, summed over what a server is made of.

Whatever else the page holds is skipped: a page that is something else altogether has no sample on it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

LARGEST = 10**15
MAX_SAMPLES = 1_000
MAX_LINE_BYTES = 8_192
_LINE = re.compile(rb"([^\s{]++)(?:\{(.*)\})?[ \t]++(\S++)")
# Linear in the line: the lookbehind allows one start per name, and possessive quantifiers never backtrack.
_LABEL = re.compile(r'(?<!\w)([A-Za-z_]\w*+)\s*+=\s*+"((?:[^"\\\n]++|\\.)*+)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: a number from 0 to `LARGEST`, and the labels it came with, their escapes as they were."""

    value: float
    labels: Mapping[str, str]


def samples(page: bytes, *names: str) -> dict[str, list[Sample]]:
    """The first `MAX_SAMPLES` samples of these names, by name. Lines above `MAX_LINE_BYTES` are skipped."""
    wanted = tuple(name.encode() for name in names)
    lines = (line for line in page.split(b"\n") if line.startswith(wanted) and len(line) <= MAX_LINE_BYTES)
    found: dict[str, list[Sample]] = {}
    for line in islice(filter(None, map(_LINE.match, lines)), MAX_SAMPLES):
        value = _number(line[3])
        if value is not None and line[1] in wanted:
            labels = dict(_LABEL.findall((line[2] or b"").decode("utf-8", errors="replace")))
            found.setdefault(line[1].decode(), []).append(Sample(value, labels))
    return found


def by_part(found: Sequence[Sample], parts: Sequence[str]) -> dict[tuple[str, ...], float]:
    """One number for each part of a server, which are told apart by the labels `parts`. Where a part has several they
    are the same told by several processes, or a sum beside what it is the sum of: the largest of them counts."""
    largest: dict[tuple[str, ...], float] = defaultdict(float)
    for sample in found:
        part = tuple(sample.labels.get(label, "") for label in parts)
        largest[part] = max(largest[part], sample.value)
    return dict(largest)


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= LARGEST else None
