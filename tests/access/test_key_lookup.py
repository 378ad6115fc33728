"""Virtual keys: how one is made and known again, and how seldom the store is asked."""

from __future__ import annotations

import asyncio
import string
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.access.key_format import Mint
from unisono.access.key_lifecycle import issued, revoked, rotated
from unisono.access.key_lookup import FRESH_S, MAX_CACHED_KEYS, VirtualKeys
from unisono.core.access import Caller, KeyLimits, KeyRecord
from unisono.errors import StoreUnavailable
from unisono.store.sqlite import SqliteStore

NOW = 1_790_000_000.5
SALT = b"a salt for tests, long enough"
MINT = Mint(SALT)


# -- minting


def test_keys_are_told_from_all_others_by_their_form_and_seal() -> None:
    keys = {MINT.new() for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        assert key.startswith("sk-uni-")
        assert len(key) == 63
        assert MINT.issued(key)
        assert not Mint(b"another salt").issued(key)


@given(st.integers(7, 62), st.sampled_from(string.ascii_letters + string.digits + "-_"))
def test_a_key_with_a_letter_changed_was_never_made(place: int, letter: str) -> None:
    key = MINT.new()
    other = key[:place] + letter + key[place + 1 :]
    assert MINT.issued(other) == (other == key)


@given(st.text(max_size=80) | st.from_regex(r"sk-uni-[A-Za-z0-9_-]{50,60}", fullmatch=True))
def test_what_anybody_makes_up_was_not_made(presented: str) -> None:
    assert not MINT.issued(presented)


def test_a_digest_says_nothing_without_the_salt() -> None:
    key = MINT.new()
    assert MINT.digest(key) == Mint(SALT).digest(key) != Mint(b"another salt").digest(key)
    assert key not in repr(issued(MINT, NOW))


# -- issuing


def test_a_new_key_is_a_tenant_of_its_own_unless_it_is_given_one() -> None:
    new = issued(MINT, NOW)
    assert new.record.tenant == new.record.id
    assert issued(MINT, NOW, tenant="team").record.tenant == "team"
    assert new.record.limits == KeyLimits(budget_since=NOW)
    assert [one.digest for one in new.record.digests] == [MINT.digest(new.plaintext)]
    assert new.plaintext.endswith(new.record.ending)


GRACES = {"none": (0.0, []), "an hour": (3600.0, [NOW + 3600.0])}


@pytest.mark.parametrize(("grace_s", "until"), GRACES.values(), ids=GRACES)
def test_a_rotated_key_is_the_same_with_another_secret(grace_s: float, until: list[float]) -> None:
    first = issued(MINT, NOW, tenant="team")
    second = rotated(first.record, MINT, NOW, grace_s)
    assert (second.record.id, second.record.tenant) == (first.record.id, "team")
    assert second.record.digests[0].digest == MINT.digest(second.plaintext)
    assert second.record.digests[0].until is None
    assert [one.until for one in second.record.digests[1:]] == until


def test_no_rotation_lets_an_earlier_secret_live_longer_than_it_was_to() -> None:
    first = rotated(issued(MINT, NOW).record, MINT, NOW, 60.0).record
    second = rotated(first, MINT, NOW + 30, 3600.0).record
    assert [one.until for one in second.digests] == [None, NOW + 3630, NOW + 60]
    assert [one.until for one in rotated(second, MINT, NOW + 61, 10.0).record.digests] == [None, NOW + 71, NOW + 71]


def test_a_key_is_revoked_once() -> None:
    gone = revoked(issued(MINT, NOW).record, NOW)
    assert gone.revoked_at == NOW
    assert revoked(gone, NOW + 5) is gone
    assert not gone.is_valid(NOW)


# -- looking up


@dataclass
class Counting(SqliteStore):
    """A store that counts what it is asked, and may be away."""

    asked: list[str] = field(default_factory=list)
    away: bool = False
    late: int = 0
    """How many of the next questions are not answered in time."""
    held: asyncio.Event | None = None

    def __post_init__(self) -> None:
        super().__init__(None)

    async def key_of(self, digest: str) -> KeyRecord | None:
        self.asked.append(digest)
        if self.held is not None:
            await self.held.wait()
        if self.away or self.late > 0:
            self.late -= 1
            raise StoreUnavailable("away")
        return await super().key_of(digest)


@dataclass
class Desk:
    store: Counting
    now: float = NOW
    ticks: float = 100.0
    salt: bytes = SALT
    salted: int = 0
    saltless: bool = False

    def keys(self, *, known_while_down: bool = False) -> VirtualKeys:
        async def salt() -> bytes:
            self.salted += 1
            if self.saltless:
                raise StoreUnavailable("away")
            return self.salt

        return VirtualKeys(
            self.store,
            salt,
            known_while_down=known_while_down,
            clock=lambda: self.now,
            monotonic=lambda: self.ticks,
        )

    async def issue(self, **fields: object) -> tuple[KeyRecord, str]:
        new = issued(MINT, self.now, tenant="team")
        return await self.store.put_key(replace(new.record, **fields)), new.plaintext  # type: ignore[arg-type]


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    store = Counting()
    await store.start()
    yield Desk(store)
    await store.aclose()


async def test_a_key_becomes_its_caller(desk: Desk) -> None:
    limits, models = KeyLimits(rpm=1), frozenset({"gpt-oss"})
    record, key = await desk.issue(limits=limits, models=models, tags={"a": "b"}, expires_at=NOW + 1)
    caller = await desk.keys().find(key)
    assert caller == Caller("team", record.id, limits, models, None, {"a": "b"}, False, NOW + 1)


async def test_the_store_is_asked_once_in_half_a_second(desk: Desk) -> None:
    _, key = await desk.issue()
    keys = desk.keys()
    for _ in range(10):
        assert await keys.find(key)
    assert len(desk.store.asked) == 1
    desk.ticks += FRESH_S
    assert await keys.find(key)
    assert len(desk.store.asked) == 2


async def test_the_store_is_asked_once_for_all_who_wait_and_whoever_leaves_takes_nothing_along(desk: Desk) -> None:
    _, key = await desk.issue()
    keys, desk.store.held = desk.keys(), asyncio.Event()
    waiting = [asyncio.create_task(keys.find(key)) for _ in range(50)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    desk.store.held.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(caller, Caller) for caller in found[1:])
    assert len(desk.store.asked) == 1


async def test_a_failure_nobody_waits_for_any_more_is_nobodys(desk: Desk) -> None:
    _, key = await desk.issue()
    keys, desk.store.held, desk.store.away = desk.keys(), asyncio.Event(), True
    waiting = asyncio.create_task(keys.find(key))
    await asyncio.sleep(0.01)
    waiting.cancel()
    desk.store.held.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0.01)


async def test_what_was_not_made_here_is_never_asked_for(desk: Desk) -> None:
    keys = desk.keys()
    for presented in ("", "sk-uni-", "sk-uni-" + "A" * 56, Mint(b"another").new(), "\udcff", "k" * 10_000):
        assert await keys.find(presented) is None
    assert desk.store.asked == []


async def test_a_secret_that_changed_with_its_store_is_noticed_without_asking_often(desk: Desk) -> None:
    keys, other = desk.keys(), Mint(b"made after the store lost everything")
    _, old = await desk.issue()
    new = issued(other, desk.now, tenant="team")
    await desk.store.put_key(new.record)
    assert await keys.find(old) is not None
    assert [await keys.find(new.plaintext) for _ in range(10)] == [None] * 10
    assert desk.salted == 1
    desk.salt, desk.ticks = b"made after the store lost everything", desk.ticks + FRESH_S
    assert await keys.find(new.plaintext) is not None
    assert await keys.find(old) is None
    desk.saltless, desk.ticks = True, desk.ticks + FRESH_S
    assert [await keys.find(MINT.new()) for _ in range(10)] == [None] * 10
    assert desk.salted == 3


async def test_a_key_that_is_nowhere_kept_is_remembered_as_that_for_as_long(desk: Desk) -> None:
    keys, key = desk.keys(), MINT.new()
    for _ in range(10):
        assert await keys.find(key) is None
    assert len(desk.store.asked) == 1


async def test_a_change_is_seen_after_half_a_second_and_time_passes_at_once(desk: Desk) -> None:
    record, key = await desk.issue(expires_at=NOW + 10)
    keys = desk.keys()
    assert await keys.find(key)
    changed = await desk.store.put_key(replace(record, models=frozenset()))
    desk.ticks += FRESH_S
    caller = await keys.find(key)
    assert caller is not None
    assert caller.models == frozenset()
    desk.now = NOW + 10
    assert await keys.find(key) is None
    desk.now = NOW
    await desk.store.put_key(revoked(changed, NOW))
    desk.ticks += FRESH_S
    assert await keys.find(key) is None


async def test_an_earlier_secret_is_good_for_its_grace(desk: Desk) -> None:
    record, key = await desk.issue()
    await desk.store.put_key(rotated(record, MINT, NOW, 60.0).record)
    keys = desk.keys()
    assert await keys.find(key)
    desk.now = NOW + 60
    assert await keys.find(key) is None


async def test_what_is_remembered_is_bounded(desk: Desk) -> None:
    keys = desk.keys()
    for _ in range(MAX_CACHED_KEYS + 50):
        await keys.find(MINT.new())
    assert len(keys._cache) == MAX_CACHED_KEYS
    assert keys._lookups == {}


async def test_a_store_that_is_late_once_refuses_nobody(desk: Desk) -> None:
    _, key = await desk.issue()
    keys = desk.keys()
    desk.store.late = 1
    assert await keys.find(key)
    desk.ticks += FRESH_S
    desk.store.late = 2
    with pytest.raises(StoreUnavailable):
        await keys.find(key)


@pytest.mark.parametrize("known", [False, True], ids=["refuse", "known keys"])
async def test_without_the_store_only_known_keys_are_good_and_only_where_that_is_wanted(
    desk: Desk, known: bool
) -> None:
    _, seen = await desk.issue()
    _, unseen = await desk.issue()
    gone, gone_key = await desk.issue()
    await desk.store.put_key(revoked(gone, NOW))
    keys = desk.keys(known_while_down=known)
    assert await keys.find(seen)
    assert await keys.find(gone_key) is None
    desk.store.away = True
    desk.ticks += FRESH_S
    with pytest.raises(StoreUnavailable):
        await keys.find(unseen)
    if not known:
        with pytest.raises(StoreUnavailable):
            await keys.find(seen)
        return
    asked = len(desk.store.asked)
    for _ in range(10):
        assert await keys.find(seen)
        assert await keys.find(gone_key) is None
    # It is not asked again for every request while it does not answer.
    assert len(desk.store.asked) == asked
    desk.store.away = False
    desk.ticks += FRESH_S
    assert await keys.find(unseen)


async def test_whoever_began_something_is_found_by_the_keys_id(desk: Desk) -> None:
    record, _ = await desk.issue(limits=KeyLimits(rpm=3))
    keys = desk.keys()
    await desk.store.put_key(revoked(record, NOW))
    assert await keys.caller("team", record.id) == record.caller
    for tenant, key in (("other", record.id), ("team", "key_none")):
        nobody = await keys.caller(tenant, key)
        assert (nobody.tenant, nobody.key) == (tenant, key)
        assert not nobody.may_use_model("gpt-oss")
        assert nobody.mcp_servers == frozenset()
