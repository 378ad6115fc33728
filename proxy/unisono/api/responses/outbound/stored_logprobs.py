"""Removal of log probabilities from items that have too many of them to be stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

from unisono.core.state_store import StoredItem

# Maximum number of log probabilities in a stored item, alternatives included. A log probability takes about 70 bytes.
MAX_STORED_LOGPROBS: Final = 20_000


def to_stored_output(items: Sequence[StoredItem]) -> tuple[StoredItem, ...]:
    """Return the items in the form to store.

    An item with more than `MAX_STORED_LOGPROBS` log probabilities loses all of them.
    """
    return tuple(_without_logprobs(item) if exceeds_storage(item) else item for item in items)


def exceeds_storage(item: StoredItem) -> bool:
    """Return True if an item has more than `MAX_STORED_LOGPROBS` log probabilities."""
    entries = [entry for part in _parts(item) for entry in part.get("logprobs") or ()]
    return sum(1 + len(entry["top_logprobs"]) for entry in entries) > MAX_STORED_LOGPROBS


def _without_logprobs(item: StoredItem) -> StoredItem:
    parts: list[Any] = [{**part, "logprobs": []} if "logprobs" in part else part for part in _parts(item)]
    return replace(item, wire={**item.wire, "content": parts})


def _parts(item: StoredItem) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", item.wire["content"]) if item.wire.get("type") == "message" else []
