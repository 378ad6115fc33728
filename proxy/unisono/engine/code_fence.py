"""Removal of a Markdown code fence around a whole answer, in one pass over the text."""

from __future__ import annotations

import re
from typing import Final

FENCE: Final = "```"
_LANGUAGE = re.compile(r"[A-Za-z0-9_-]*")


def without_code_fence(text: str) -> str | None:
    """Return the content of the code block that `text` consists of; None if it is anything else."""
    # No regular expression reads the text: it is long, and the model and the prompt choose its content.
    block = text.strip()
    if not block.startswith(FENCE):
        return None
    opening, _, rest = block.removeprefix(FENCE).partition("\n")
    if not rest.endswith(FENCE) or _LANGUAGE.fullmatch(opening.removesuffix("\r").rstrip(" \t")) is None:
        return None
    return rest.removesuffix(FENCE).rstrip(" \t").removesuffix("\n").removesuffix("\r")
