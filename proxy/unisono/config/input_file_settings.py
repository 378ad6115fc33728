"""Section `unisono.files`: files that requests contain or refer to by URL."""

from __future__ import annotations

from unisono.config.mcp_settings import AllowedHostEntry
from unisono.config.section_base import Count, Seconds, Section


class FileSettings(Section):
    """Reading of the files in requests."""

    allowed_hosts: tuple[AllowedHostEntry, ...] = ()
    """Hosts from which the gateway downloads files whose URLs are in requests.
    By default none."""
    max_bytes: Count = 10 * 1024 * 1024
    """Maximum size of a file, in bytes.
    A file in a request is encoded as base64, whose size is also limited by `max_body_bytes`."""
    max_pages: Count = 500
    """Maximum number of pages of a PDF."""
    max_characters: Count = 1_000_000
    """Maximum length of the text in a file, in characters."""
    timeout_s: Seconds = 20.0
    """Time limit in seconds for downloading a file, and the same limit for reading its text."""
    memory_bytes: Count = 256 * 1024 * 1024
    """Maximum memory of a process that reads an HTML or PDF file, in bytes.
    Each worker runs up to two such processes. macOS does not enforce the limit."""
