"""Reader of the files in requests: download, format, extraction, and a cache of texts."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from math import inf
from time import monotonic
from typing import Final, TypeVar

from unisono.core.input_files import FileField, FileText, InputFile
from unisono.documents.download import Downloader, DownloadFailed
from unisono.documents.extractor import ExtractedText, FileLimits, TextExtractor
from unisono.documents.formats import SUPPORTED, ExtractProblem, FileFormat, decoded, format_of
from unisono.net.ssrf_guard import SsrfGuard

# Time in seconds after which a file at a URL is downloaded again. Until then, a conversation that is sent again renders
# to the same prompt.
URL_LIFETIME_S: Final = 600.0
# Time in seconds after which a file with a possibly temporary problem is read again.
RETRY_AFTER_S: Final = 60.0
# Time in seconds for which the files of a request may wait for extracting processes.
WAITING_S: Final = 10.0
# Data of at least this size, in bytes, is hashed and decoded in a thread.
OFF_LOOP_BYTES: Final = 256 * 1024

_PROBLEMS: Final = {
    ExtractProblem.BROKEN: "the {format} file is broken",
    ExtractProblem.ENCRYPTED: "the PDF is encrypted; remove its password",
    ExtractProblem.NO_TEXT: "the {format} file contains no text; images in it cannot be read",
    ExtractProblem.TOO_MANY_PAGES: "the PDF has more than {limits.max_pages:,} pages",
    ExtractProblem.TOO_LONG: "the text of the file is longer than {limits.max_characters:,} characters",
    ExtractProblem.TOO_LARGE: "the {format} file needs too much memory to be read",
    ExtractProblem.TOO_SLOW: "the {format} file was not read within {limits.timeout_s:g} s",
}
_TEMPORARY: Final = frozenset({ExtractProblem.TOO_LARGE, ExtractProblem.TOO_SLOW})

Result = TypeVar("Result")


class DocumentReader:
    """Reader of files with `limits`.

    `cache` may come from a previous reader, even if that reader had different limits.
    """

    def __init__(self, limits: FileLimits, guard: SsrfGuard, cache: TextCache | None = None) -> None:
        self._limits = limits
        self._cache = cache or TextCache()
        self._extractor = TextExtractor(limits)
        self._downloader = Downloader(guard, limits.max_bytes, limits.timeout_s)

    @property
    def timeout_s(self) -> float:
        return 2 * self._limits.timeout_s + WAITING_S

    @property
    def max_bytes(self) -> int:
        return self._limits.max_bytes

    async def read(self, file: InputFile, tenant: str) -> FileText:
        """Return the text of a file. Raises FilesBusy if too many files are waiting."""
        key = await _off_loop(lambda: self._key(file, tenant), file.data)
        if (known := self._cache.get(key)) is not None:
            return known
        text, lifetime_s = await (self._at_url(file) if file.url else self._text(file))
        self._cache.put(key, text, lifetime_s)
        return text

    def _key(self, file: InputFile, tenant: str) -> bytes:
        # Tenants do not share texts. Otherwise a quick answer would reveal that another tenant has the same file.
        facts = (tenant, repr(self._limits), file.url, file.name, file.media_type, file.charset)
        head = "\0".join(facts).encode("utf-8", "replace")
        return sha256(b"%d\0%b%b" % (len(head), head, file.data)).digest()

    async def _at_url(self, file: InputFile) -> tuple[FileText, float]:
        try:
            found = await self._downloader.download(file.url, file.name)
        except DownloadFailed as failure:
            problem = FileText(problem=str(failure), field=FileField.URL, is_unsupported=failure.is_forbidden)
            return problem, RETRY_AFTER_S
        text, lifetime_s = await self._text(found)
        if text.problem:
            text = replace(text, field=FileField.URL)
        return text, min(lifetime_s, URL_LIFETIME_S)

    async def _text(self, file: InputFile) -> tuple[FileText, float]:
        """Return the text of a file that contains data, and how many seconds to cache this text."""
        format, limits = format_of(file), self._limits
        if len(file.data) > limits.max_bytes:
            return FileText(problem=f"the file is larger than {limits.max_bytes:,} bytes"), inf
        if not file.data.strip():
            return FileText(problem="the file is empty"), inf
        match format:
            case None:
                return _unsupported(file), inf
            case FileFormat.TEXT:
                text = await _off_loop(lambda: decoded(file.data, file.charset), file.data)
                if text is None:
                    return FileText(problem=f"the file is not {_charset(file)} text"), inf
                if len(text) > limits.max_characters:
                    return self._outcome(ExtractedText(problem=ExtractProblem.TOO_LONG), format), inf
                return FileText(text), inf
            case _:
                extracted = await self._extractor.extract(format, file.data, file.charset)
                return self._outcome(extracted, format), RETRY_AFTER_S if extracted.problem in _TEMPORARY else inf

    def _outcome(self, extracted: ExtractedText, format: FileFormat) -> FileText:
        if extracted.problem is not None:
            return FileText(problem=_PROBLEMS[extracted.problem].format(format=format.upper(), limits=self._limits))
        unread = extracted.unread_pages
        return FileText(extracted.text, f"{unread} of its pages have no text that can be read" if unread else "")


def _charset(file: InputFile) -> str:
    return f"`{file.charset[:40]}`" if file.charset else "UTF-8"


def _unsupported(file: InputFile) -> FileText:
    kind = f"the type `{file.media_type[:80]}`" if file.media_type else "the type of the file"
    problem = f"{kind} is not supported or not known; send {SUPPORTED}, with its media type or a file name"
    return FileText(problem=problem, field=FileField.TYPE, is_unsupported=True)


async def _off_loop(work: Callable[[], Result], data: bytes) -> Result:
    """Return the result of `work`, which runs in a thread if `data` is large."""
    return await asyncio.to_thread(work) if len(data) >= OFF_LOOP_BYTES else work()


MAX_CACHED_CHARACTERS: Final = 16 * 1024 * 1024
# Size that each entry adds to that of its text, in characters.
ENTRY_CHARACTERS: Final = 1_000


class TextCache:
    """Cache of the texts of files. Entries may expire; the least recently used ones are dropped.

    `capacity` is the maximum size of all entries, in characters. `clock` returns seconds.
    """

    def __init__(self, capacity: int = MAX_CACHED_CHARACTERS, clock: Callable[[], float] = monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[FileText, float]] = OrderedDict()
        self._size = 0

    def get(self, key: bytes) -> FileText | None:
        entry = self._entries.get(key)
        if entry is None or self._clock() >= entry[1]:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, text: FileText, lifetime_s: float = inf) -> None:
        """Store a text or a problem for `lifetime_s` seconds.

        An entry that is larger than the whole cache is not stored.
        """
        if _size(text) > self._capacity:
            return
        if (old := self._entries.pop(key, None)) is not None:
            self._size -= _size(old[0])
        self._entries[key] = (text, self._clock() + lifetime_s)
        self._size += _size(text)
        while self._size > self._capacity:
            _, (dropped, _) = self._entries.popitem(last=False)
            self._size -= _size(dropped)


def _size(text: FileText) -> int:
    return ENTRY_CHARACTERS + len(text.text)
