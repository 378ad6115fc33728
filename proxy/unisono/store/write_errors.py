"""Reasons for refused writes: one table, so that all stores raise the same errors."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.errors import KeyReused, NotFound, StoreConflict, StoreTooLarge, UnisonoError

REFUSALS: Mapping[str, tuple[type[UnisonoError], str]] = {
    "missing": (NotFound, "there is nothing under this id"),
    "exists": (StoreConflict, "there is something else under this id"),
    "finished": (StoreConflict, "the response is finished and cannot change any more"),
    "taken": (StoreConflict, "this run was taken over, or is no longer wanted"),
    "busy": (StoreConflict, "another response is being written here; try again when it is finished"),
    "changed": (StoreConflict, "the conversation was changed meanwhile"),
    "repeated": (StoreConflict, "the conversation has an item of this id already"),
    "gap": (StoreConflict, "the log does not reach this far"),
    "differs": (StoreConflict, "the log says something else here"),
    "large": (StoreTooLarge, "the conversation would be larger than can be stored"),
    "key changed": (StoreConflict, "the key was changed meanwhile"),
    "reused": (KeyReused, "this idempotency key was used with another body"),
}


def refusal(code: str) -> UnisonoError:
    kind, words = REFUSALS[code]
    return kind(words)
