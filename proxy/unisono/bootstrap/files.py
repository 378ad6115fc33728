"""Construction of the object that reads the files in requests."""

from __future__ import annotations

from unisono.config import FileSettings
from unisono.documents.extractor import FileLimits
from unisono.documents.reader import DocumentReader
from unisono.documents.text_cache import TextCache
from unisono.net.ssrf_guard import SsrfGuard


def build_file_reader(settings: FileSettings, cache: TextCache) -> DocumentReader:
    """Build the reader. After a reload, `cache` is the one that the previous reader used."""
    limits = FileLimits(
        max_bytes=settings.max_bytes,
        max_pages=settings.max_pages,
        max_characters=settings.max_characters,
        timeout_s=settings.timeout_s,
        memory=settings.memory_bytes,
    )
    return DocumentReader(limits, SsrfGuard([host.rule() for host in settings.allowed_hosts]), cache)
