"""Schemas of the request bodies of the Conversations API."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from unisono.api.field_types import FieldInput, OpenModel
from unisono.api.media import MediaHistory
from unisono.api.responses.input_items import GivenItem
from unisono.api.responses.schema import Metadata

# Maximum number of items that one request may add.
MAX_NEW_ITEMS = 20


def _no_labels(value: Any) -> Any:
    return {} if value is None else value


def _no_items(value: Any) -> Any:
    return [] if value is None else value


NewItems = Annotated[list[GivenItem], Field(max_length=MAX_NEW_ITEMS)]


# Metadata; null means none.
Labels = Annotated[Metadata, BeforeValidator(_no_labels), FieldInput(Metadata | None)]


class AddedItems(MediaHistory):
    """Request with items to store.

    They are history as soon as they are stored, so no media are refused.
    """

    HISTORY = "items"
    KEEPS_NEWEST = False

    items: NewItems


class NewConversation(AddedItems):
    items: Annotated[NewItems, BeforeValidator(_no_items), FieldInput(NewItems | None)] = Field(default_factory=list)
    metadata: Labels = Field(default_factory=dict)


class ChangedConversation(OpenModel):
    """An update of a conversation. `metadata` replaces all earlier metadata."""

    metadata: Labels
