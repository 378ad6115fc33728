"""Query parameters for stored objects, validated like the fields of a body."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from unisono.api.answer_types import ABSENT
from unisono.api.field_types import FieldInput, QueryModel, invalid_field
from unisono.api.responses.schema import INCLUDABLE

MAX_PAGE = 100
DEFAULT_PAGE = 20


def _to_limit(value: Any) -> int:
    """Parse the query parameter `limit`, the page size."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 3:
        limit = int(value)
        if 1 <= limit <= MAX_PAGE:
            return limit
    raise invalid_field(f"must be a number from 1 to {MAX_PAGE}")


MAX_EVENT_DIGITS = 15


def _to_event(value: Any) -> int:
    """Parse `starting_after`, the number of the last event that the client has received."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= MAX_EVENT_DIGITS:
        return int(value)
    raise invalid_field(f"must be the number of an event: 1 to {MAX_EVENT_DIGITS} digits")


def _to_flag(value: Any) -> bool:
    if value in ("true", "false"):
        return bool(value == "true")
    raise invalid_field("must be true or false")


Included = Annotated[str, Field(json_schema_extra={"enum": [*INCLUDABLE]})]
Limit = Annotated[int, BeforeValidator(_to_limit), FieldInput(Annotated[int, Field(ge=1, le=MAX_PAGE)])]
EventNumber = Annotated[
    int, BeforeValidator(_to_event), FieldInput(Annotated[int, Field(ge=0, lt=10**MAX_EVENT_DIGITS)])
]


class ItemQuery(QueryModel):
    """Query for items. OpenAI's `include` has no effect, because all fields are always returned."""

    include: list[Included] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _join_includes(cls, query: Any) -> Any:
        # Clients name the parameter `include` or `include[]`. A single value of `include[]` arrives as a string.
        bracketed = query.pop("include[]", [])
        bracketed = [bracketed] if isinstance(bracketed, str) else bracketed
        return {**query, "include": [*query.get("include", ()), *bracketed]}

    @field_validator("include")
    @classmethod
    def _includable(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in INCLUDABLE:
                raise invalid_field(f"unknown value {name[:64]!r}; must be one of {', '.join(INCLUDABLE)}")
        return value


class PageQuery(ItemQuery):
    after: str = ABSENT
    limit: Limit = DEFAULT_PAGE
    order: Literal["asc", "desc"] = "desc"


class ResponseQuery(ItemQuery):
    """Query for a whole response, or for its events after number `starting_after`."""

    stream: Annotated[bool, BeforeValidator(_to_flag)] = False
    starting_after: EventNumber = ABSENT
