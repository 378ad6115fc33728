"""How a server is asked for its load: the pages it may tell it on, in order, and what is on them.

Which pages there are is for the operator of the server to decide, so a server without one of them is nothing out of
order. One that has none is left alone for a while, so that its log is not full of our questions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from unisono.core.generation import Load
from unisono.errors import BackendProtocolError
from unisono_adapters._http import BackendHttp
from unisono_adapters._metrics import LARGEST

LOAD_S = 1.0
"""For all pages together."""
LONGEST_PAGE = 1024 * 1024
OFF_LOOP_BYTES = 4 * 1024
"""Larger pages are read in a thread: they take more than a millisecond."""
SILENT_S = 60.0
"""How long a server that has none of its pages is not asked again."""

Page = Callable[[bytes], Load | None]
"""What is on a page; None when the load is not. Raises BackendProtocolError for one that is not what it should be."""


class LoadPages:
    """`pages` are the ways to ask a server, by path: the first that tells something is the one. That one is asked
    first from then on."""

    def __init__(self, wire: BackendHttp, pages: Mapping[str, Page]) -> None:
        self._wire = wire
        self._pages = dict(pages)
        self._silent_until = 0.0

    async def read(self) -> Load | None:
        """Raises the `BackendError` family: BackendTimeout after `LOAD_S`."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        if begun < self._silent_until:
            return None
        for path, page in list(self._pages.items()):
            body = await self._wire.get_page(path, begun + LOAD_S - loop.time(), LONGEST_PAGE)
            told = await _loaded(page, body) if body is not None else None
            if told is not None:
                self._pages = {path: page, **self._pages}
                return told
        self._silent_until = loop.time() + SILENT_S
        return None


async def _loaded(page: Page, body: bytes) -> Load | None:
    return await asyncio.to_thread(page, body) if len(body) > OFF_LOOP_BYTES else page(body)


def document(page: bytes) -> Any:
    """A page that is JSON, decoded. Raises BackendProtocolError."""
    try:
        return orjson.loads(page)
    except orjson.JSONDecodeError as error:
        raise BackendProtocolError("the backend answered a question about its load with something else") from error


def amount(value: object) -> int | None:
    """A number of requests or tokens, None for anything else."""
    return value if type(value) is int and 0 <= value <= LARGEST else None


def part(value: object) -> float | None:
    """A number from 0 to 1, None for anything else; rounding may have made it a little more."""
    return min(float(value), 1.0) if isinstance(value, int | float) and 0 <= value < 1.01 else None
