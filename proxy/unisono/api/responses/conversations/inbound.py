"""Conversion of conversation requests to store operations.

Pure: state and ids are arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unisono.api.responses.inbound import to_entries
from unisono.api.responses.input_conversion import InputConversion
from unisono.api.responses.input_items import (
    InputApprovalResponse,
    InputCallOutput,
    InputClientToolOutput,
    InputItem,
    InputMcpCall,
    InputSealed,
    InputSearchOutput,
)
from unisono.api.responses.items import NewId
from unisono.api.responses.known_state import KnownState
from unisono.core.state_store import StoredItem

DEPENDENT_ITEMS = (
    *(InputCallOutput, InputClientToolOutput, InputSearchOutput),
    *(InputApprovalResponse, InputMcpCall, InputSealed),
)
_POSSIBLE = re.compile(r"[A-Za-z0-9_-]{1,128}")


def is_possible_id(name: str) -> bool:
    """Return True if `name` can be an id of this gateway."""
    return _POSSIBLE.fullmatch(name) is not None


def referenced_ids(items: Sequence[InputItem]) -> tuple[str, ...]:
    """Return the unique ids of stored items that new items may depend on."""
    return tuple(dict.fromkeys(item.id for item in items if item.id and is_possible_id(item.id)))


def depends_on_earlier(items: Sequence[InputItem]) -> bool:
    """Return True if the content of items depends on earlier ones, such as the call of a result."""
    return any(isinstance(item, DEPENDENT_ITEMS) for item in items)


def to_added(items: Sequence[InputItem], known: KnownState, new_id: NewId) -> tuple[tuple[StoredItem, ...], list[str]]:
    """Convert new items for storage. Returns them and the notes on them.

    Raises InvalidRequest for an output without an earlier call, and NotFound for a reference to a missing item,
    naming the field.
    """
    reading = InputConversion(known)
    reading.add(known.earlier)
    return to_entries(items, reading, new_id, "items"), reading.notes
