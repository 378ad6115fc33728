"""Reasons why no text can be extracted from a file."""

from __future__ import annotations

from enum import StrEnum


class ExtractProblem(StrEnum):
    """Reason that the extraction process reports, or that is inferred from its exit."""

    BROKEN = "broken"
    ENCRYPTED = "encrypted"
    NO_TEXT = "no_text"
    TOO_MANY_PAGES = "too_many_pages"
    TOO_LONG = "too_long"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
