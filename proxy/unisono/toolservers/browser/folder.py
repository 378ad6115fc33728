"""Search engine and page reader for a local folder.

It is meant for private documents, and for machines without a network. URLs are `file:///` and the path below the
folder. A URL is looked up among the files found by the scan and is never used as a path. Therefore `..`, symbolic links
and hidden files cannot be opened. Results are ranked by BM25, with a higher weight for words in titles.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from unisono.errors import ConfigError
from unisono.toolservers.browser.html_text import read_html
from unisono.toolservers.browser.page_sources import Document, SearchResult
from unisono.toolservers.browser.text import one_line, without_links
from unisono.toolservers.browser.visited_pages import BrowsingError

MAX_FILES: Final = 20_000
FILE_BYTES: Final = 2 * 1024 * 1024
SNIPPET: Final = 300
PREFIX: Final = "file:///"

HTML: Final = frozenset({".html", ".htm", ".xhtml"})
_TEXT_NAMES = """
    .txt .md .markdown .rst .adoc .org .tex .csv .tsv .json .jsonl .yaml .yml .toml .ini .cfg .conf .xml .log
    .sql .py .pyi .js .ts .tsx .jsx .css .c .h .cc .cpp .hpp .rs .go .java .kt .swift .rb .php .sh .r .lua .pl
"""
TEXT: Final = HTML | frozenset(_TEXT_NAMES.split())

_WORD = re.compile(r"\w+")
_HEADING = re.compile(r"^\s{0,3}#{1,6}\s+(.+)$", re.MULTILINE)
# Parameters of BM25: saturation of the term frequency, and normalisation by the length of a document.
_K1, _B = 1.2, 0.75
_TITLE_WEIGHT = 4
MAX_WORD_LENGTH = 40


@dataclass(frozen=True, slots=True)
class FolderFile:
    """Indexed file. `stamp` contains modification time and size, to detect changes."""

    url: str
    path: Path
    stamp: tuple[int, int]
    title: str
    text: str
    words: Counter[str]
    length: int


def words_of(text: str) -> list[str]:
    return [word[:MAX_WORD_LENGTH] for word in _WORD.findall(text.casefold())]


class Folder:
    """Search engine and reader for the text files below `root`.

    Each search uses the current files. Raises `ConfigError` if the folder does not exist.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        if not self._root.is_dir():
            raise ConfigError(f"{root}: the folder does not exist; create it or correct the path")
        self.name = "folder"
        self._entries: dict[str, FolderFile] = {}
        self._refreshing = asyncio.Lock()

    async def search(self, query: str, most: int) -> list[SearchResult]:
        query_words = set(words_of(query)[:64])
        await self._refreshed()
        return await asyncio.to_thread(self._ranked, query_words, most)

    def reads(self, url: str) -> bool:
        return url[:5].lower() == "file:"

    async def read(self, url: str) -> Document:
        # The model may open a file without a previous search, if it knows the URL.
        if not self._entries:
            await self._refreshed()
        entry = self._entries.get(_normalized(url))
        if entry is None:
            raise BrowsingError("the document does not exist")
        try:
            source = await asyncio.to_thread(_contents, self._root, entry.path)
        except OSError:
            raise BrowsingError("the document cannot be read") from None
        return Document(entry.url, source, entry.path.suffix.lower() in HTML, entry.title)

    async def aclose(self) -> None:
        """Do nothing: no resources are open."""

    async def _refreshed(self) -> None:
        async with self._refreshing:
            self._entries = await asyncio.to_thread(self._scan)

    def _scan(self) -> dict[str, FolderFile]:
        entries = {}
        for path, stamp in _files(self._root):
            url = PREFIX + quote(path.relative_to(self._root).as_posix())
            known = self._entries.get(url)
            # Only changed files are read again.
            if known is not None and known.stamp == stamp:
                entries[url] = known
                continue
            try:
                entries[url] = _entry(url, path, stamp, _contents(self._root, path))
            except OSError:
                continue  # deleted, or no longer readable, since it was listed
        return entries

    def _ranked(self, query_words: set[str], most: int) -> list[SearchResult]:
        entries = list(self._entries.values())
        if not entries:
            return []
        mean = sum(entry.length for entry in entries) / len(entries) or 1.0
        weights = {}
        for word in query_words:
            having = sum(1 for entry in entries if word in entry.words)
            if having:
                weights[word] = math.log(1 + (len(entries) - having + 0.5) / (having + 0.5))
        scored = []
        for entry in entries:
            score = 0.0
            for word, weight in weights.items():
                times = entry.words[word]
                score += weight * times * (_K1 + 1) / (times + _K1 * (1 - _B + _B * entry.length / mean))
            if score > 0:
                scored.append((-score, entry.url, entry))
        scored.sort(key=lambda row: row[:2])
        return [
            SearchResult(entry.url, entry.title, _snippet(entry.text, query_words)) for _, _, entry in scored[:most]
        ]


def _files(root: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Yield text files below `root` in a fixed order, without symbolic links and hidden files."""
    found = 0
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".") or path.suffix.lower() not in TEXT:
                continue
            try:
                status = path.lstat()
            except OSError:
                continue
            if not stat.S_ISREG(status.st_mode) or status.st_size > FILE_BYTES:
                continue
            yield path, (status.st_mtime_ns, status.st_size)
            found += 1
            if found >= MAX_FILES:
                return


def _contents(root: Path, path: Path) -> str:
    """Read a file. Raises OSError if it has become a link or leads out of the folder."""
    if not path.resolve().is_relative_to(root):
        raise PermissionError(path)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        return file.read(FILE_BYTES).decode("utf-8", "replace")


def _entry(url: str, path: Path, stamp: tuple[int, int], source: str) -> FolderFile:
    title = ""
    if path.suffix.lower() in HTML:
        read = read_html(source, url)
        title, source = read.title, "\n".join(without_links(read.text.split("\n")))
    elif (heading := _HEADING.search(source)) is not None:
        title = one_line(heading[1])
    title = title or path.stem
    words = words_of(source)
    counted = Counter(words)
    for word in words_of(f"{title} {path.stem}"):
        counted[word] += _TITLE_WEIGHT
    return FolderFile(url, path, stamp, title, source, counted, len(words))


def _snippet(text: str, query_words: set[str]) -> str:
    """Return a short part of the text, from the line that contains the most query words."""
    best, most = 0, 0
    at = 0
    for line in text.splitlines(keepends=True):
        matches = len(query_words.intersection(words_of(line[: 4 * SNIPPET])))
        if matches > most:
            best, most = at, matches
        at += len(line)
    return one_line(text[best : best + 2 * SNIPPET], SNIPPET)


def _normalized(url: str) -> str:
    """Normalize a URL for lookup: `file:/a b.md` and `file:///a%20b.md` are the same."""
    path = url[5:].lstrip("/").split("#")[0].split("?")[0]
    return PREFIX + quote(unquote(path))
