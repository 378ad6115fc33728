"""Load of a backend server, read from its status pages.

The pages of a kind of server are requested in order until one reports the load. The operator decides which pages
a server has, so a missing page is not an error. If a server has no such page at all, it is not polled again for
`SILENT_S` seconds, so that its log does not fill with 404s.
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

# Reading of Prometheus text: only the samples of the requested names are parsed, and all other lines are skipped.
# A page in any other format therefore yields no samples.

# Largest sample value that is accepted.
LARGEST = 10**15
MAX_SAMPLES = 1_000
MAX_LINE_BYTES = 8_192
_LINE = re.compile(rb"([^\s{]++)(?:\{(.*)\})?[ \t]++(\S++)")
# Linear in the line: the lookbehind allows one start per name, and possessive quantifiers never backtrack.
_LABEL = re.compile(r'(?<!\w)([A-Za-z_]\w*+)\s*+=\s*+"((?:[^"\\\n]++|\\.)*+)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One Prometheus sample: a value from 0 to `LARGEST`, and its labels.

    Escape sequences in label values are not decoded.
    """

    value: float
    labels: Mapping[str, str]


def samples(page: bytes, *names: str) -> dict[str, list[Sample]]:
    """Return the samples of these metric names on a page, keyed by metric name.

    At most `MAX_SAMPLES` samples are returned; the rest of the page is ignored. Lines longer than
    `MAX_LINE_BYTES` are skipped.
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
    """Return one number for each part of a server, such as an engine or a scheduler.

    `parts` are the names of the labels that identify a part. The keys of the result are the values of these labels. If
    a part has several samples, its largest value is returned: the samples are repetitions by several processes, or one
    of them is the sum of the others.
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


# Time limit in seconds for reading all pages of a server together.
LOAD_S = 1.0
# A larger page raises BackendProtocolError, and the load of the server is unknown.
MAX_INLINE_PAGE_BYTES = 1024 * 1024
# Pages larger than this are parsed in a thread, because parsing them takes more than a millisecond.
OFF_LOOP_BYTES = 4 * 1024
# Seconds until a server that has none of the pages is polled again.
SILENT_S = 60.0

# Parser of a page. It returns None if the page does not report a load, and raises BackendProtocolError if the page
# is malformed.
Page = Callable[[bytes], Load | None]


class LoadPages:
    """Status pages of a server, with a parser for each path.

    A page that has reported a load is requested before the other pages from then on.
    """

    def __init__(self, wire: BackendHttp, pages: Mapping[str, Page]) -> None:
        self._wire = wire
        self._pages = dict(pages)
        self._silent_until = 0.0

    async def read(self) -> Load | None:
        """Return the load of the server, or None if no page reports it.

        Raises BackendTimeout after `LOAD_S` seconds, and other subclasses of BackendError.
        """
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
    """Decode a JSON page. Raises BackendProtocolError if the page is not JSON."""
    try:
        return orjson.loads(page)
    except orjson.JSONDecodeError as error:
        raise BackendProtocolError("the backend's load report has an unknown format") from error


def amount(value: object) -> int | None:
    """Return `value` if it is a plausible number of requests or tokens, else None."""
    return value if type(value) is int and 0 <= value <= LARGEST else None


def part(value: object) -> float | None:
    """Return `value` if it is a fraction from 0 to 1, else None.

    A value slightly above 1 is a rounding error and is returned as 1.
    """
    return min(float(value), 1.0) if isinstance(value, int | float) and 0 <= value < 1.01 else None
