"""Arguments of a call as a JSON value in an answer.

The client sends the value back with its next request. Therefore it must satisfy the limits of a request body, which are
stricter than JSON. Other arguments remain text.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from unisono.api.body import MAX_DEPTH
from unisono.core.json_syntax import is_deeper

# Nesting levels of a request body that surround the arguments of an earlier call, plus a margin.
SURROUNDING_LEVELS: Final = 10
# Maximum nesting depth of arguments that are emitted as a JSON value. orjson parses 1,024 levels, but writes only 254.
MAX_ARGUMENT_LEVELS: Final = MAX_DEPTH - SURROUNDING_LEVELS


def to_value(arguments: str) -> Any:
    """Parse arguments. Return {} for blank text.

    Returns the text itself if it is not valid JSON, or if no request may contain its value.
    """
    if not arguments.strip():
        return {}
    if is_deeper(arguments, MAX_ARGUMENT_LEVELS):
        return arguments
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
