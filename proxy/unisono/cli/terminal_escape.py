"""Escaping of foreign text for terminals: invisible and control characters are spelled out."""

from __future__ import annotations

import os
import sys


def harmless(text: str) -> str:
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def on_one_line(text: str) -> str:
    return harmless(text).replace("\n", "\\n").replace("\t", "\\t")


def has_colour() -> bool:
    """Return whether standard output is a terminal and NO_COLOR is unset (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
