"""Reader of Prometheus text: selected gauges, summed over the parts of a server.

All other content is skipped, so an unrelated page has no samples.
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
    """One sample: a number from 0 to `LARGEST` and its labels, with escapes unchanged."""

    value: float
    labels: Mapping[str, str]


def samples(page: bytes, *names: str) -> dict[str, list[Sample]]:
    """Return the first `MAX_SAMPLES` samples of these names, by name.

    Lines longer than `MAX_LINE_BYTES` are skipped.
    """
    encoded_names = tuple(name.encode() for name in names)
    lines = (line for line in page.split(b"\n") if line.startswith(encoded_names) and len(line) <= MAX_LINE_BYTES)
    found: dict[str, list[Sample]] = {}
    for line in islice(filter(None, map(_LINE.match, lines)), MAX_SAMPLES):
        value = _number(line[3])
        if value is not None and line[1] in encoded_names:
            labels = dict(_LABEL.findall((line[2] or b"").decode("utf-8", errors="replace")))
            found.setdefault(line[1].decode(), []).append(Sample(value, labels))
    return found


def by_part(found: Sequence[Sample], parts: Sequence[str]) -> dict[tuple[str, ...], float]:
    """Return one number for each part of a server; the labels `parts` identify a part.

    Several values of a part are repeated by several processes, or include their sum: the largest one counts.
    """
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
