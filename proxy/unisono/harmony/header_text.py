"""Text form of header tokens: marker ids as surrogates, everything else decoded."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.generation import CHANNEL, CONSTRAIN, START
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import C, S, T

_SENTINELS = {START: S, CHANNEL: C, CONSTRAIN: T}


def header_text(encoding: Encoding, tokens: Sequence[int]) -> tuple[str, bool]:
    """Return the text, and whether all of it was UTF-8; invalid bytes become U+FFFD."""
    parts: list[str] = []
    run: list[int] = []
    whole = True
    for token in [*tokens, START]:
        if token not in _SENTINELS:
            run.append(token)
            continue
        if run:
            raw = encoding.decode_bytes(run)
            parts.append(raw.decode("utf-8", errors="replace"))
            whole = whole and _is_text(raw)
            run = []
        parts.append(_SENTINELS[token])
    return "".join(parts[:-1]), whole


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
