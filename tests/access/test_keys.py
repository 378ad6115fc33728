"""Keys: the right one is let in, everything else fails the same way."""

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
    "surrounding space": f" {KEY}",
    "ten kilobytes": "k" * 10_000,
    "line break": f"{KEY}\r\nx-admin: 1",
    "SQL": "' OR 1=1 --",
    "glob": "*",
    "lone surrogate": "\udcff",
    "full-width look-alike": "\uff53\uff4b-unisono-2b7e151628aed2a6",
    "emoji": "🔑" * 100,
}


async def test_the_master_key_is_the_default_tenant() -> None:
    assert await MasterKey(KEY).identify(KEY) == Caller("default", raw=True)


@pytest.mark.parametrize("presented", HOSTILE.values(), ids=HOSTILE)
async def test_anything_but_the_key_is_refused_without_saying_why_it_differs(presented: str | None) -> None:
    with pytest.raises(NotAuthenticated) as refused:
        await MasterKey(KEY).identify(presented)
    assert KEY not in refused.value.message
    assert refused.value.status == 401


async def test_a_key_outside_ascii_works() -> None:
    assert (await MasterKey("schlüssel-🔑").identify("schlüssel-🔑")).tenant == "default"


def test_an_empty_master_key_cannot_be_configured() -> None:
    with pytest.raises(ValueError, match="empty"):
        MasterKey("")


@pytest.mark.parametrize("presented", [None, "dummy", ""], ids=["no key", "an SDK's dummy", "empty"])
async def test_without_keys_everyone_is_the_local_user(presented: str | None) -> None:
    assert await NoKeys().identify(presented) == Caller("local", raw=True)


def test_the_key_is_not_kept_in_readable_form() -> None:
    assert KEY not in repr(vars(MasterKey(KEY)))
