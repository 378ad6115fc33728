"""Ports of the browser for searching and reading, with their data types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SearchResult:
    """One search result; `snippet` is a short description or quotation."""

    url: str
    title: str
    snippet: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """Text read from a URL, before conversion. `url` is the final one after redirects."""

    url: str
    text: str
    is_html: bool
    title: str = ""


class SearchEngine(Protocol):
    """Source of search results. `name` tells the model what is searched."""

    name: str

    async def search(self, query: str, most: int) -> list[SearchResult]:
        """Return at most `most` results, best first. Raises `BrowsingError` if the search fails."""
        ...

    async def aclose(self) -> None: ...


class PageReader(Protocol):
    """Reader of documents by URL."""

    def reads(self, url: str) -> bool:
        """Return True if this reader handles URLs of this form."""
        ...

    async def read(self, url: str) -> Document:
        """Return the document at a URL. Raises `BrowsingError` if it cannot be read."""
        ...

    async def aclose(self) -> None: ...
