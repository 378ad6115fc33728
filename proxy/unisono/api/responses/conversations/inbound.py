"""From requests about conversations to what is asked of the store: pure, state and ids come in as arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from unisono.api.responses.inbound import to_entries
from unisono.api.responses.input_conversion import InputConversion, KnownState
from unisono.api.responses.input_items import InputApprovalResponse, InputCallOutput, InputItem
from unisono.api.responses.items import NewId
from unisono.core.state_store import StoredItem

_POSSIBLE = re.compile(r"[A-Za-z0-9_-]{1,128}")


def possible(name: str) -> bool:
    """Whether `name` can be an id of ours; anything else need not be looked for."""
    return _POSSIBLE.fullmatch(name) is not None


def wanted_ids(items: Sequence[InputItem]) -> tuple[str, ...]:
    """Ids under which items may have been kept that new ones lean on, each once."""
    return tuple(dict.fromkeys(item.id for item in items if item.id and possible(item.id)))


def leans_on_earlier(items: Sequence[InputItem]) -> bool:
    """Whether what the conversation holds already decides if these items may follow it."""
    return any(isinstance(item, InputCallOutput | InputApprovalResponse) for item in items)


def to_added(items: Sequence[InputItem], known: KnownState, new_id: NewId) -> tuple[StoredItem, ...]:
    """New items as they are kept. Raises InvalidRequest for an output without a call before it, and NotFound for a
    reference to nothing, naming the field."""
    reading = InputConversion(known)
    reading.add(known.earlier)
    return to_entries(items, reading, new_id, "items")
