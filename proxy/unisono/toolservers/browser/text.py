"""How a page is written for the model: lines of a fixed width, their numbers, the window it sees, and links.

All pure. A window is bounded in tokens, which are taken for four bytes of UTF-8 each: close enough for a bound, and it
needs no vocabulary.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Final

WIDTH: Final = 80
"""Characters in a line."""
BYTES_PER_TOKEN: Final = 4
LONG_LINE: Final = 4000
"""Characters; longer ones are cut before they are wrapped, since wrapping one word takes its length squared."""

_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls but tabs and line feeds
    "\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff"  # no width, or a change of direction
    "\ud800-\udfff\U000e0000-\U000e0fff]"  # halves of pairs; tags, which spell text that nobody sees
)
_BRACKETS: Final = str.maketrans({"【": "〖", "】": "〗"})
# A link holds no other: `cleaned` replaces the brackets of its text.
_LINK: Final = re.compile(r"【\d+†([^†【】]*)((?:†[^【】]*)?)】")
_SPACE: Final = re.compile(r"\s+")


def cleaned(text: str) -> str:
    """Text of others: without what nobody sees, and without the brackets that mean a link."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _UNSEEN.sub("", text).translate(_BRACKETS)


def one_line(text: str, most: int = 300) -> str:
    """Cleaned, on one line, at most `most` characters long."""
    flat = _SPACE.sub(" ", cleaned(text[: 8 * most])).strip()
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def link(number: int, text: str, domain: str = "") -> str:
    """A link as the model reads it; `domain` where it leads away from the page's own."""
    shown = text.replace("†", "‡")
    return f"【{number}†{shown}†{domain}】" if domain else f"【{number}†{shown}】"


def without_links(lines: Sequence[str]) -> list[str]:
    """The same lines with what the links say in their place; no line gets another number."""

    def said(found: re.Match[str]) -> str:
        return found[1] + "\n" * found[2].count("\n")

    return _LINK.sub(said, "\n".join(lines)).split("\n")


def wrapped(text: str) -> tuple[str, ...]:
    """Lines of at most `WIDTH` characters; empty ones stay."""
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
    """One past the last line of a view that begins at `first`: as many as fit into `tokens`, the line at the border
    included, and `most` at the most."""
    left = tokens * BYTES_PER_TOKEN
    end = first
    until = len(lines) if most is None else min(len(lines), first + most)
    while end < until and left > 0:
        left -= len(f"L{end}: {lines[end]}\n".encode("utf-8", "replace"))
        end += 1
    return end


def display(cursor: int, title: str, url: str, body: str, shown: tuple[int, int, int]) -> str:
    """What the model gets: the header with its cursor, then `body`. `shown` is first line, last line, last there is."""
    where = f" ({url})" if url else ""
    first, last, total = shown
    return f"[{cursor}] {title}{where}\n**viewing lines [{first} - {last}] of {total}**\n\n{body}"
