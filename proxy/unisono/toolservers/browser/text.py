"""Text format of pages: wrapped and numbered lines, windows, links.

All functions are pure. Token counts are estimated as four bytes of UTF-8 each. That is accurate enough for a limit and
needs no vocabulary.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Final

# Line width in characters.
WIDTH: Final = 80
# Average size of a token of English text, for the size of a page window.
BYTES_PER_TOKEN: Final = 4
# Lines with more characters are split before they are wrapped, because wrapping a long word takes quadratic time.
LONG_LINE: Final = 4000

_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and line feed
    "\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff"  # zero width, or a change of text direction
    "\ud800-\udfff\U000e0000-\U000e0fff]"  # lone surrogates; tag characters, which can spell invisible text
)
_BRACKETS: Final = str.maketrans({"【": "〖", "】": "〗"})
# Link texts contain no links, because `cleaned` replaces their brackets.
_LINK: Final = re.compile(r"【\d+†([^†【】]*)((?:†[^【】]*)?)】")
_SPACE: Final = re.compile(r"\s+")


def cleaned(text: str) -> str:
    """Remove invisible characters from foreign text and replace the brackets that mark links."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _UNSEEN.sub("", text).translate(_BRACKETS)


def one_line(text: str, most: int = 300) -> str:
    """Return cleaned text on one line of at most `most` characters."""
    flat = _SPACE.sub(" ", cleaned(text[: 8 * most])).strip()
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def link(number: int, text: str, domain: str = "") -> str:
    """Return a link in the model's format. `domain` is set for links to other domains."""
    label = text.replace("†", "‡")
    return f"【{number}†{label}†{domain}】" if domain else f"【{number}†{label}】"


def without_links(lines: Sequence[str]) -> list[str]:
    """Replace links with their texts. Line numbers stay the same."""

    def said(found: re.Match[str]) -> str:
        return found[1] + "\n" * found[2].count("\n")

    return _LINK.sub(said, "\n".join(lines)).split("\n")


def wrapped(text: str) -> tuple[str, ...]:
    """Wrap text into lines of at most `WIDTH` characters. Empty lines are preserved."""
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= WIDTH and "\t" not in line:
            lines.append(line)
            continue
        for start in range(0, len(line), LONG_LINE):
            piece = line[start : start + LONG_LINE]
            lines += textwrap.wrap(piece, WIDTH, replace_whitespace=False, drop_whitespace=False)
    return tuple(lines)


def numbered(lines: Sequence[str], first: int) -> str:
    return "\n".join(f"L{number}: {line}" for number, line in enumerate(lines, first))


def window(lines: Sequence[str], first: int, tokens: int, most: int | None = None) -> int:
    """Return the index after the last line of a view that starts at the index `first`.

    The view contains lines until their size reaches `tokens`; the line that crosses this limit is included. It has at
    most `most` lines (None: no such limit).
    """
    remaining = tokens * BYTES_PER_TOKEN
    end = first
    until = len(lines) if most is None else min(len(lines), first + most)
    while end < until and remaining > 0:
        remaining -= len(f"L{end}: {lines[end]}\n".encode("utf-8", "replace"))
        end += 1
    return end


def display(cursor: int, title: str, url: str, body: str, lines: tuple[int, int, int]) -> str:
    """Return a view for the model: a header with the cursor, then `body`.

    `lines` contains the 0-based numbers of the first line, the last line, and the last line of the whole page.
    """
    where = f" ({url})" if url else ""
    first, last, total = lines
    return f"[{cursor}] {title}{where}\n**viewing lines [{first} - {last}] of {total}**\n\n{body}"
