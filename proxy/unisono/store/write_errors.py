"""Reasons for refused writes: one table, so that all stores raise the same errors."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.core.error_texts import ConversationConflict
from unisono.errors import KeyReused, NotFound, StoreConflict, StoreTooLarge, UnisonoError
from unisono.store.codec import StateLimits

REFUSALS: Mapping[str, tuple[type[UnisonoError], str]] = {
    "missing": (NotFound, "nothing is stored under this id"),
    "exists": (StoreConflict, "a different object is already stored under this id"),
    "finished": (StoreConflict, "the response is finished and can no longer change"),
    "taken": (
        StoreConflict,
        "this process no longer holds the lease: another process took it over, or the response was cancelled",
    ),
    "busy": (ConversationConflict, ConversationConflict.IN_USE),
    "changed": (ConversationConflict, "The conversation was changed by another request; read it again and retry."),
    "repeated": (StoreConflict, "the conversation already has an item with this id"),
    "gap": (StoreConflict, "the stored log ends before the position of this write"),
    "differs": (StoreConflict, "the stored log differs from this write"),
    "large": (
        StoreTooLarge,
        f"the conversation would have more than {StateLimits().conversation:,} bytes, the limit; start a new one",
    ),
    "key changed": (StoreConflict, "the key was changed by another request; read it again and retry"),
    "entry changed": (StoreConflict, "the entry was changed by another request; read it again and retry"),
    "reused": (KeyReused, "this idempotency key was already used with another request body"),
}


def refusal(code: str) -> UnisonoError:
    kind, words = REFUSALS[code]
    return kind(words)
