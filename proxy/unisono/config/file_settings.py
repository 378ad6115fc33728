"""Section for the files in requests."""

from __future__ import annotations

from unisono.config.mcp_settings import AllowedHostEntry
from unisono.config.section import Count, Seconds, Section


class FileSettings(Section):
    """Reading of the files in requests."""

    allowed_hosts: tuple[AllowedHostEntry, ...] = ()
    """Hosts from which the gateway downloads files that requests name by URL.
    By default none."""
    max_bytes: Count = 10 * 1024 * 1024
    """Maximum size of a file, in bytes.
    The base64 of a file in a request also counts for `max_body_bytes`."""
    max_pages: Count = 500
    """Maximum number of pages of a PDF."""
    max_characters: Count = 1_000_000
    """Maximum length of the text of a file, in characters."""
    timeout_s: Seconds = 20.0
    """Limit for the download of a file and for the extraction of its text, in seconds each."""
    memory_bytes: Count = 256 * 1024 * 1024
    """Memory of the process that reads an HTML or PDF file, in bytes.
    Each worker runs up to two of them. macOS does not enforce the limit."""
