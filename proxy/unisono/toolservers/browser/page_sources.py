"""What the browser needs from outside, as two small ports, and the nouns they speak of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SearchResult:
    """One search result, best first; `snippet` is a few words about it or from it."""

    url: str
    title: str
    snippet: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """What an address gave: its text as it came, and whether that is HTML. `url` is where it really was, behind any
    redirect."""

    url: str
    text: str
    is_html: bool
    title: str = ""


class SearchEngine(Protocol):
    """Finds addresses. `name` says what is searched, as the model is told it."""

    name: str

    async def search(self, query: str, most: int) -> list[SearchResult]:
        """At most `most` results, best first. Raises `BrowsingError`."""
        ...

    async def aclose(self) -> None: ...


class PageReader(Protocol):
    """Reads addresses."""

    def reads(self, url: str) -> bool:
        """Whether addresses of this form are its own."""
        ...

    async def read(self, url: str) -> Document:
        """What is there now. Raises `BrowsingError`."""
        ...

    async def aclose(self) -> None: ...
