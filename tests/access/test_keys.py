"""Tests of the master key: it is accepted, and everything else fails in the same way."""

from __future__ import annotations

import pytest

from unisono.access.keys import MasterKey, NoKeys
from unisono.core.access import Caller
from unisono.errors import NotAuthenticated

KEY = "sk-unisono-2b7e151628aed2a6"

HOSTILE: dict[str, str | None] = {
    "none": None,
    "empty": "",
    "another key": "sk-unisono-2b7e151628aed2a7",
    "prefix of the key": KEY[:-1],
    "key and more": KEY + "0",
    "key with a NUL": KEY + "\x00",
    "key in another case": KEY.upper(),
    "surrounding spaces": f" {KEY}",
    "ten kilobytes": "k" * 10_000,
    "line break": f"{KEY}\r\nx-admin: 1",
    "SQL": "' OR 1=1 --",
    "glob": "*",
    "lone surrogate": "\udcff",
    "full-width look-alike": "\uff53\uff4b-unisono-2b7e151628aed2a6",
    "emoji": "🔑" * 100,
}


async def test_master_key_is_the_default_tenant() -> None:
    assert await MasterKey(KEY).identify(KEY) == Caller("default", raw=True)


@pytest.mark.parametrize("presented", HOSTILE.values(), ids=HOSTILE)
async def test_any_other_key_is_refused_without_a_reason(presented: str | None) -> None:
    with pytest.raises(NotAuthenticated) as error:
        await MasterKey(KEY).identify(presented)
    assert KEY not in error.value.message
    assert error.value.status == 401


async def test_non_ascii_key_is_accepted() -> None:
    assert (await MasterKey("schlüssel-🔑").identify("schlüssel-🔑")).tenant == "default"


def test_empty_master_key_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        MasterKey("")


@pytest.mark.parametrize("presented", [None, "dummy", ""], ids=["no key", "an SDK's dummy", "empty"])
async def test_every_caller_is_the_local_user_without_keys(presented: str | None) -> None:
    assert await NoKeys().identify(presented) == Caller("local", raw=True)


def test_key_is_not_stored_in_readable_form() -> None:
    assert KEY not in repr(vars(MasterKey(KEY)))
