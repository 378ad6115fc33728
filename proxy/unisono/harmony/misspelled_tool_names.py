"""Correction of tool names that models misspell or shorten.

A misspelled name may differ from the declared name in case, prefix or separators. The label of a tool's server may be
missing.
"""

from __future__ import annotations

import hashlib
import re

from unisono.core.tool_host import MAX_NAME_LENGTH, SEPARATOR
from unisono.errors import well_formed

# Maximum length of a recipient in characters. No offered tool has a longer name; longer words are text that ran into
# a header.
MAX_RECIPIENT_LENGTH = 256
ILLEGAL = re.compile("[^A-Za-z0-9_-]")
_GLUED_TYPES = ("json", "code")
_PREFIX = re.compile(r"\A(?:functions?[.:/]+)+", re.IGNORECASE)


def marked_name(name: str, turn: int = 0) -> str:
    """Return a legal name for a client's tool whose most similar legal name is taken.

    The result is deterministic. A different `turn` gives a different name.
    """
    stem = ILLEGAL.sub("_", name)[:MAX_NAME_LENGTH].strip("_-") or "tool"
    mark = hashlib.sha256(f"{turn}:{well_formed(name)}".encode()).hexdigest()[:8]
    return f"{stem[: MAX_NAME_LENGTH - 9]}_{mark}"


def corrected(name: str, declared: frozenset[str] | None) -> str | None:
    """Return the one declared tool of which `name` is a known misspelling.

    Return None if `name` is declared itself, or if it matches no tool or several tools.
    """
    if declared is None or name in declared:
        return None
    spellings = _spellings(name)
    fits = _marked(spellings, declared) or spellings & declared
    if not fits:
        # A server's tool is declared with the server's label in front, which models tend to omit.
        fits = {one for one in declared if (bare := one.partition(SEPARATOR)[2]) and bare in spellings}
    return fits.pop() if len(fits) == 1 else None


def resolve(word: str, declared: frozenset[str] | None) -> str | None:
    """Return the one declared tool that `word` names, ignoring case, prefix and separators.

    Return None if no tool or several tools match.
    """
    if not declared or not word or len(word) > MAX_RECIPIENT_LENGTH:
        return None
    bare = _PREFIX.sub("", word)
    spellings = _spellings(bare)
    if exact := _marked(spellings, declared) or declared & spellings:
        return next(iter(exact)) if len(exact) == 1 else None
    folded = set(map(_folded, (*spellings, *_spellings(bare.casefold()))))
    fits = [name for name in declared if _folded(name) in folded]
    return fits[0] if len(fits) == 1 else None


def _marked(spellings: set[str], declared: frozenset[str]) -> set[str]:
    """Return the declared tools that have the marked name of one of the `spellings`."""
    return {marked_name(spelling) for spelling in spellings} & declared


def _folded(name: str) -> str:
    return name.casefold().replace("-", "_")


def _spellings(name: str) -> set[str]:
    """Return the names that the model may have meant by `name`.

    These are `name` itself, and `name` without the prefix `functions`, content types, arguments or punctuation.
    """
    names = {name, name.strip(",;:\"'`()[]"), name.partition("{")[0]}
    for prefix in ("functions.", "functions:", "functions/", "functions"):
        names |= {n[len(prefix) :] for n in names if n.startswith(prefix)}
    for suffix in _GLUED_TYPES:
        names |= {n[: -len(suffix)] for n in names if n.endswith(suffix)}
    # A client's dotted name was declared with `_`; the model may know the original.
    return names | {ILLEGAL.sub("_", n) for n in names}
