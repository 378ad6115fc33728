"""Load of a server from its status pages, tried in order.

The operator decides which pages a server has, so a missing one is no error. A server without any page is not
polled for a while, to keep its log clean.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import orjson

from unisono.core.frozen import dataclass
from unisono.core.generation import Load
from unisono.errors import BackendProtocolError
from unisono_adapters._http import BackendHttp

# Reader of Prometheus text: selected gauges, summed over the parts of a server.
#
# All other content is skipped, so an unrelated page has no samples.

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


# Limit for all pages together, in seconds.
LOAD_S = 1.0
# A longer page is an error: its load is then unknown.
MAX_INLINE_PAGE_BYTES = 1024 * 1024
# Larger pages are parsed in a thread, since that takes more than a millisecond.
OFF_LOOP_BYTES = 4 * 1024
# Seconds until a server without any page is polled again.
SILENT_S = 60.0

# Parser of a page; None without a load. Raises BackendProtocolError for a malformed page.
Page = Callable[[bytes], Load | None]


class LoadPages:
    """Load pages of a server by path. The first page with a load is tried first from then on."""

    def __init__(self, wire: BackendHttp, pages: Mapping[str, Page]) -> None:
        self._wire = wire
        self._pages = dict(pages)
        self._silent_until = 0.0

    async def read(self) -> Load | None:
        """Return the load. Raises the `BackendError` family: BackendTimeout after `LOAD_S`."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        if started_at < self._silent_until:
            return None
        for path, page in list(self._pages.items()):
            body = await self._wire.get_page(path, started_at + LOAD_S - loop.time(), MAX_INLINE_PAGE_BYTES)
            load = await _loaded(page, body) if body is not None else None
            if load is not None:
                self._pages = {path: page, **self._pages}
                return load
        self._silent_until = loop.time() + SILENT_S
        return None


async def _loaded(page: Page, body: bytes) -> Load | None:
    return await asyncio.to_thread(page, body) if len(body) > OFF_LOOP_BYTES else page(body)


def document(page: bytes) -> Any:
    """Return a page as decoded JSON. Raises BackendProtocolError if it is not JSON."""
    try:
        return orjson.loads(page)
    except orjson.JSONDecodeError as error:
        raise BackendProtocolError("the backend's load report has an unknown format") from error


def amount(value: object) -> int | None:
    """Return a number of requests or tokens, None for anything else."""
    return value if type(value) is int and 0 <= value <= LARGEST else None


def part(value: object) -> float | None:
    """Return a number from 0 to 1, tolerating rounding above 1; None for anything else."""
    return min(float(value), 1.0) if isinstance(value, int | float) and 0 <= value < 1.01 else None
