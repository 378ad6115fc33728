"""One wire name per hosted tool, and back: a model knows tools by names of 64 letters, digits, `_` and `-`.

A tool that has an ordinary name under a server with an ordinary label is `label__tool`; from that the two are read
back as they were. Any other pair gets a readable stem and a digest of both. Names follow from the pair alone, so a
continued conversation calls a tool what it was called before, and no two tools of one table share a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Final

LONGEST: Final = 64
SEPARATOR: Final = "__"
DIGITS: Final = 16

_PLAIN = re.compile(r"[a-zA-Z0-9_-]+")
_ODD = re.compile(r"[^a-zA-Z0-9-]+")


class ToolNames:
    """The names of some hosted tools. `taken` are names that are somebody else's, such as the client's own tools."""

    def __init__(self, tools: Iterable[tuple[str, str]] = (), taken: Iterable[str] = ()) -> None:
        self._taken = frozenset(taken)
        self._names: dict[tuple[str, str], str] = {}
        self._tools: dict[str, tuple[str, str]] = {}
        for label, tool in tools:
            self.add(label, tool)

    def add(self, label: str, tool: str) -> str:
        """The name of `tool` of the server `label`; the same again for one that is known."""
        known = self._names.get((label, tool))
        if known is not None:
            return known
        name = next(name for name in _candidates(label, tool) if name not in self._tools and name not in self._taken)
        self._names[label, tool] = name
        self._tools[name] = (label, tool)
        return name

    def tool(self, name: str) -> tuple[str, str] | None:
        """The label and the tool that `name` stands for; None for a name that is none of these."""
        return self._tools.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)


def _candidates(label: str, tool: str) -> Iterator[str]:
    plain = f"{label}{SEPARATOR}{tool}"
    # The pair must be what reading the name gives back: a label with the separator in it, or one that ends in half of
    # it, would make two pairs of one name.
    if len(plain) <= LONGEST and tool and _PLAIN.fullmatch(plain) and plain.split(SEPARATOR, 1) == [label, tool]:
        yield plain
    # Single underscores only: such a name is never a plain one.
    stem = _ODD.sub("_", f"{label}_{tool}").strip("_")
    attempt = 0
    while True:
        pair = f"{len(label)}:{label}{tool}{attempt or ''}"
        digest = sha256(pair.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
        yield f"{stem[: LONGEST - DIGITS - 1].rstrip('_') or 'tool'}_{digest}"
        attempt += 1
