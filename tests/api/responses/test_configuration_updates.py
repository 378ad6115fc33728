"""Settings that `configuration_update` items change, and the size of cached items."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.api.responses.configuration_updates import UNCHANGED, Configuration, configuration_in
from unisono.api.responses.websocket.response_cache import weight
from unisono.core.conversation import AddedTools, Effort, FunctionTool, UserMessage
from unisono.core.state_store import StoredItem

LOW = Configuration(effort=Effort.LOW)


def update(**fields: Any) -> StoredItem:
    return StoredItem("item_1", (), {"type": "configuration_update", **fields})


# Older versions stored these items without validation.
UNREADABLE = {
    "an unknown effort": update(reasoning={"effort": "huge"}),
    "no object": update(reasoning="low"),
    "no format": update(text={}),
    "nothing": update(),
}


@pytest.mark.parametrize("item", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("before", [UNCHANGED, LOW])
def test_an_unreadable_stored_update_has_no_effect(item: StoredItem, before: Configuration) -> None:
    assert configuration_in([item], before) == before


def test_a_later_update_replaces_the_earlier_one() -> None:
    items = [
        update(reasoning={"effort": "high"}),
        StoredItem("m", (UserMessage("Hi"),)),
        update(reasoning={"effort": "low"}),
    ]
    assert configuration_in(items) == LOW


def test_schemas_of_added_tools_count_in_the_cache() -> None:
    schema = {"type": "object", "description": "x" * 1000}
    assert weight([AddedTools((FunctionTool("f", "", schema),))]) > 1000
