"""Unique wire names for server tools; models allow 64 letters, digits, `_` and `-`.

An ordinary tool name under an ordinary server label becomes `label__tool`, from which both can be read back. Any other
pair gets a readable stem and a digest of both. A name depends on the pair alone, so it stays the same in a continued
conversation. No two tools of one table share a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Final

MAX_NAME_LENGTH: Final = 64
SEPARATOR: Final = "__"
DIGITS: Final = 16

_PLAIN = re.compile(r"[a-zA-Z0-9_-]+")
_ODD = re.compile(r"[^a-zA-Z0-9-]+")


class ToolNames:
    """Names of a set of server tools.

    `reserved` are names in other use, such as the client's tools.
    """

    def __init__(self, tools: Iterable[tuple[str, str]] = (), reserved: Iterable[str] = ()) -> None:
        self._taken = frozenset(reserved)
        self._names: dict[tuple[str, str], str] = {}
        self._tools: dict[str, tuple[str, str]] = {}
        for label, tool in tools:
            self.add(label, tool)

    def add(self, label: str, tool: str) -> str:
        """Return the name of `tool` of the server `label`; repeated calls return the same name."""
        known = self._names.get((label, tool))
        if known is not None:
            return known
        name = next(name for name in _candidates(label, tool) if name not in self._tools and name not in self._taken)
        self._names[label, tool] = name
        self._tools[name] = (label, tool)
        return name

    def tool(self, name: str) -> tuple[str, str] | None:
        """Return the label and the tool for `name`; None if unknown."""
        return self._tools.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)


def _candidates(label: str, tool: str) -> Iterator[str]:
    plain = f"{label}{SEPARATOR}{tool}"
    # The plain name must be readable back to the same pair. A label that contains the separator, or ends in half of
    # it, could give two pairs one name.
    if (
        len(plain) <= MAX_NAME_LENGTH
        and tool
        and _PLAIN.fullmatch(plain)
        and plain.split(SEPARATOR, 1) == [label, tool]
    ):
        yield plain
    # Single underscores only, so that this name never equals a plain one.
    stem = _ODD.sub("_", f"{label}_{tool}").strip("_")
    attempt = 0
    while True:
        pair = f"{len(label)}:{label}{tool}{attempt or ''}"
        digest = sha256(pair.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
        yield f"{stem[: MAX_NAME_LENGTH - DIGITS - 1].rstrip('_') or 'tool'}_{digest}"
        attempt += 1
