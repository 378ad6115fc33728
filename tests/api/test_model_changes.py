"""Test of changes to stored deployments whose settings cannot be decrypted."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from unisono.api.admin.model_changes import change_model
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.errors import InvalidRequest


async def change(sent: dict[str, Any]) -> DirectoryEntry:
    stored = DirectoryEntry(EntryKind.MODEL, "id-1", 1.0, alias="gpt-oss", metadata={"sealed": "x"})
    admin = Mock(entry=AsyncMock(return_value=stored), clock=lambda: 2.0)
    admin.store.put_entry = AsyncMock(side_effect=lambda entry, audit: entry)
    models = Mock(opened=AsyncMock(return_value=None), check=AsyncMock(), applied=AsyncMock(), visible=dict)
    models.seal = AsyncMock(side_effect=lambda id, settings: settings)
    return await change_model(admin, models, Mock(id="admin"), "id-1", sent)


async def test_a_change_without_a_name_keeps_the_stored_name() -> None:
    sent = {"litellm_params": {"model": "vllm/m"}}
    changed = await change(sent)
    assert (changed.alias, changed.metadata) == ("gpt-oss", {"model_name": "gpt-oss", **sent})


async def test_a_change_without_parameters_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await change({"model_name": "other"})
    assert caught.value.param == "litellm_params"
