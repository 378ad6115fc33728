"""Removal of JSON or a code fence that the model writes around the text of a body. Pure."""

from __future__ import annotations

import json
import re
from typing import Final


def without_json(text: str) -> str:
    """Return the free text that a call wraps in an object; any other text unchanged."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    content = value.get("input")
    if content is None and value.keys() == {"patch"}:
        content = value["patch"]
    # Half of a surrogate pair is no character.
    return content if isinstance(content, str) and not _SURROGATE.search(content) else text


_SURROGATE = re.compile("[\ud800-\udfff]")
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
