"""What requests about conversations may hold: bodies, and the query of a page of items."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from unisono.api.fields import Open, wrong
from unisono.api.responses.given import GivenItem
from unisono.api.responses.schema import INCLUDABLE, LOGPROBS, Metadata

MAX_NEW_ITEMS = 20
"""Items one request may add."""
MAX_PAGE = 100
DEFAULT_PAGE = 20


def _to_limit(value: Any) -> int:
    """A number as it is written in a query."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 3:
        limit = int(value)
        if 1 <= limit <= MAX_PAGE:
            return limit
    raise wrong(f"must be a number from 1 to {MAX_PAGE}")


def _no_labels(value: Any) -> Any:
    return {} if value is None else value


def _no_items(value: Any) -> Any:
    return [] if value is None else value


NewItems = Annotated[list[GivenItem], Field(max_length=MAX_NEW_ITEMS)]


Labels = Annotated[Metadata, BeforeValidator(_no_labels)]
"""Metadata, null for none."""


class NewConversation(Open):
    items: Annotated[NewItems, BeforeValidator(_no_items)] = Field(default_factory=list)
    metadata: Labels = Field(default_factory=dict)


class ChangedConversation(Open):
    """`metadata` takes the place of all there was."""

    metadata: Labels


class AddedItems(Open):
    items: NewItems


class ItemQuery(Open):
    """`include` may name what OpenAI's may. Nothing is left out of an item here, so nothing has to be asked for."""

    include: list[str] = Field(default_factory=list)

    @field_validator("include")
    @classmethod
    def _includable(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in INCLUDABLE and name != LOGPROBS:
                raise wrong(f"there is no {name[:64]!r}; possible are {', '.join((*INCLUDABLE, LOGPROBS))}")
        return value


class PageQuery(ItemQuery):
    after: str | None = None
    limit: Annotated[int, BeforeValidator(_to_limit)] = DEFAULT_PAGE
    order: Literal["asc", "desc"] = "desc"
