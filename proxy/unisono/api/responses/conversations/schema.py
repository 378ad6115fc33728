"""What the bodies of requests about conversations may hold."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from unisono.api.fields import Open, Told
from unisono.api.responses.given import GivenItem
from unisono.api.responses.schema import Metadata

MAX_NEW_ITEMS = 20
"""Items one request may add."""


def _no_labels(value: Any) -> Any:
    return {} if value is None else value


def _no_items(value: Any) -> Any:
    return [] if value is None else value


NewItems = Annotated[list[GivenItem], Field(max_length=MAX_NEW_ITEMS)]


Labels = Annotated[Metadata, BeforeValidator(_no_labels), Told(Metadata | None)]
"""Metadata, null for none."""


class NewConversation(Open):
    items: Annotated[NewItems, BeforeValidator(_no_items), Told(NewItems | None)] = Field(default_factory=list)
    metadata: Labels = Field(default_factory=dict)


class ChangedConversation(Open):
    """`metadata` takes the place of all there was."""

    metadata: Labels


class AddedItems(Open):
    items: NewItems
