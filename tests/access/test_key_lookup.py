"""Tests of virtual keys: their format, their lifecycle and cached lookups."""

from __future__ import annotations

import asyncio
import string
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.access.keys import FRESH_S, MAX_CACHED_KEYS, Mint, VirtualKeys, issued, revoked, rotated
from unisono.core.access import Caller, KeyRecord
from unisono.core.quotas import KeyLimits
from unisono.errors import StoreUnavailable
from unisono.store.sqlite import SqliteStore

NOW = 1_790_000_000.5
SALT = b"a salt for tests, long enough"
MINT = Mint(SALT)


# Key format


def test_generated_key_is_recognized_by_its_format_and_seal() -> None:
    keys = {MINT.new() for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        assert key.startswith("sk-uni-")
        assert len(key) == 63
        assert MINT.issued(key)
        assert not Mint(b"another salt").issued(key)


@given(st.integers(7, 62), st.sampled_from(string.ascii_letters + string.digits + "-_"))
def test_key_with_a_changed_character_is_not_recognized(index: int, character: str) -> None:
    key = MINT.new()
    other = key[:index] + character + key[index + 1 :]
    assert MINT.issued(other) == (other == key)


@given(st.text(max_size=80) | st.from_regex(r"sk-uni-[A-Za-z0-9_-]{50,60}", fullmatch=True))
def test_arbitrary_text_is_not_recognized_as_a_key(presented: str) -> None:
    assert not MINT.issued(presented)


def test_digest_depends_on_the_salt_and_repr_hides_the_key() -> None:
    key = MINT.new()
    assert MINT.digest(key) == Mint(SALT).digest(key) != Mint(b"another salt").digest(key)
    assert key not in repr(issued(MINT, NOW))


# Lifecycle


def test_new_key_is_its_own_tenant_unless_one_is_given() -> None:
    new = issued(MINT, NOW)
    assert new.record.tenant == new.record.id
    assert issued(MINT, NOW, tenant="team").record.tenant == "team"
    assert new.record.limits == KeyLimits(budget_since=NOW)
    assert [one.digest for one in new.record.digests] == [MINT.digest(new.plaintext)]
    assert new.plaintext.endswith(new.record.ending)


GRACES = {"none": (0.0, []), "an hour": (3600.0, [NOW + 3600.0])}


@pytest.mark.parametrize(("grace_s", "until"), GRACES.values(), ids=GRACES)
def test_rotated_key_has_a_new_secret_and_the_same_id(grace_s: float, until: list[float]) -> None:
    first = issued(MINT, NOW, tenant="team")
    second = rotated(first.record, MINT, NOW, grace_s)
    assert (second.record.id, second.record.tenant) == (first.record.id, "team")
    assert second.record.digests[0].digest == MINT.digest(second.plaintext)
    assert second.record.digests[0].until is None
    assert [one.until for one in second.record.digests[1:]] == until


def test_rotation_does_not_extend_the_grace_of_earlier_secrets() -> None:
    first = rotated(issued(MINT, NOW).record, MINT, NOW, 60.0).record
    second = rotated(first, MINT, NOW + 30, 3600.0).record
    assert [one.until for one in second.digests] == [None, NOW + 3630, NOW + 60]
    assert [one.until for one in rotated(second, MINT, NOW + 61, 10.0).record.digests] == [None, NOW + 71, NOW + 71]


def test_repeated_revocation_keeps_the_first_time() -> None:
    revoked_key = revoked(issued(MINT, NOW).record, NOW)
    assert revoked_key.revoked_at == NOW
    assert revoked(revoked_key, NOW + 5) is revoked_key
    assert not revoked_key.is_valid(NOW)


# Lookup


@dataclass
class RecordingStore(SqliteStore):
    """Store that records lookups, can be down, and can fail a number of times."""

    lookups: list[str] = field(default_factory=list)
    is_down: bool = False
    # Number of further lookups that fail.
    failures: int = 0
    blocked_until: asyncio.Event | None = None

    def __post_init__(self) -> None:
        super().__init__(None)

    async def key_of(self, digest: str) -> KeyRecord | None:
        self.lookups.append(digest)
        if self.blocked_until is not None:
            await self.blocked_until.wait()
        if self.is_down or self.failures > 0:
            self.failures -= 1
            raise StoreUnavailable("away")
        return await super().key_of(digest)


@dataclass
class Lookup:
    store: RecordingStore
    now: float = NOW
    monotonic_s: float = 100.0
    salt: bytes = SALT
    salt_reads: int = 0
    is_salt_down: bool = False

    def keys(self, *, known_while_down: bool = False) -> VirtualKeys:
        async def salt() -> bytes:
            self.salt_reads += 1
            if self.is_salt_down:
                raise StoreUnavailable("away")
            return self.salt

        return VirtualKeys(
            self.store,
            salt,
            known_while_down=known_while_down,
            clock=lambda: self.now,
            monotonic=lambda: self.monotonic_s,
        )

    async def issue(self, **fields: object) -> tuple[KeyRecord, str]:
        new = issued(MINT, self.now, tenant="team")
        return await self.store.put_key(replace(new.record, **fields)), new.plaintext  # type: ignore[arg-type]


@pytest.fixture
async def lookup() -> AsyncIterator[Lookup]:
    store = RecordingStore()
    await store.start()
    yield Lookup(store)
    await store.aclose()


async def test_key_is_resolved_to_its_caller(lookup: Lookup) -> None:
    limits, models = KeyLimits(rpm=1), frozenset({"gpt-oss"})
    record, key = await lookup.issue(limits=limits, models=models, tags={"a": "b"}, expires_at=NOW + 1)
    caller = await lookup.keys().find(key)
    assert caller == Caller("team", record.id, limits, models, None, {"a": "b"}, False, NOW + 1)


async def test_store_is_queried_once_per_refresh_interval(lookup: Lookup) -> None:
    _, key = await lookup.issue()
    keys = lookup.keys()
    for _ in range(10):
        assert await keys.find(key)
    assert len(lookup.store.lookups) == 1
    lookup.monotonic_s += FRESH_S
    assert await keys.find(key)
    assert len(lookup.store.lookups) == 2


async def test_concurrent_lookups_share_one_query_even_if_one_is_cancelled(lookup: Lookup) -> None:
    _, key = await lookup.issue()
    keys, lookup.store.blocked_until = lookup.keys(), asyncio.Event()
    waiting = [asyncio.create_task(keys.find(key)) for _ in range(50)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    lookup.store.blocked_until.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(caller, Caller) for caller in found[1:])
    assert len(lookup.store.lookups) == 1


async def test_failed_query_of_a_cancelled_lookup_is_ignored(lookup: Lookup) -> None:
    _, key = await lookup.issue()
    keys, lookup.store.blocked_until, lookup.store.is_down = lookup.keys(), asyncio.Event(), True
    waiting = asyncio.create_task(keys.find(key))
    await asyncio.sleep(0.01)
    waiting.cancel()
    lookup.store.blocked_until.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0.01)


async def test_key_without_a_valid_seal_is_never_queried(lookup: Lookup) -> None:
    keys = lookup.keys()
    for presented in ("", "sk-uni-", "sk-uni-" + "A" * 56, Mint(b"another").new(), "\udcff", "k" * 10_000):
        assert await keys.find(presented) is None
    assert lookup.store.lookups == []


async def test_changed_salt_is_detected_with_few_reads(lookup: Lookup) -> None:
    keys, other = lookup.keys(), Mint(b"made after the store lost everything")
    _, old_key = await lookup.issue()
    new = issued(other, lookup.now, tenant="team")
    await lookup.store.put_key(new.record)
    assert await keys.find(old_key) is not None
    assert [await keys.find(new.plaintext) for _ in range(10)] == [None] * 10
    assert lookup.salt_reads == 1
    lookup.salt, lookup.monotonic_s = b"made after the store lost everything", lookup.monotonic_s + FRESH_S
    assert await keys.find(new.plaintext) is not None
    assert await keys.find(old_key) is None
    lookup.is_salt_down, lookup.monotonic_s = True, lookup.monotonic_s + FRESH_S
    assert [await keys.find(MINT.new()) for _ in range(10)] == [None] * 10
    assert lookup.salt_reads == 3


async def test_unknown_key_is_cached_as_unknown(lookup: Lookup) -> None:
    keys, key = lookup.keys(), MINT.new()
    for _ in range(10):
        assert await keys.find(key) is None
    assert len(lookup.store.lookups) == 1


async def test_changes_are_visible_after_the_refresh_interval_and_expiry_at_once(lookup: Lookup) -> None:
    record, key = await lookup.issue(expires_at=NOW + 10)
    keys = lookup.keys()
    assert await keys.find(key)
    changed = await lookup.store.put_key(replace(record, models=frozenset()))
    lookup.monotonic_s += FRESH_S
    caller = await keys.find(key)
    assert caller is not None
    assert caller.models == frozenset()
    lookup.now = NOW + 10
    assert await keys.find(key) is None
    lookup.now = NOW
    await lookup.store.put_key(revoked(changed, NOW))
    lookup.monotonic_s += FRESH_S
    assert await keys.find(key) is None


async def test_earlier_secret_is_valid_during_its_grace_period(lookup: Lookup) -> None:
    record, key = await lookup.issue()
    await lookup.store.put_key(rotated(record, MINT, NOW, 60.0).record)
    keys = lookup.keys()
    assert await keys.find(key)
    lookup.now = NOW + 60
    assert await keys.find(key) is None


async def test_cache_size_is_limited(lookup: Lookup) -> None:
    keys = lookup.keys()
    for _ in range(MAX_CACHED_KEYS + 50):
        await keys.find(MINT.new())
    assert len(keys._cache) == MAX_CACHED_KEYS
    assert keys._lookups == {}


async def test_single_store_failure_is_retried(lookup: Lookup) -> None:
    _, key = await lookup.issue()
    keys = lookup.keys()
    lookup.store.failures = 1
    assert await keys.find(key)
    lookup.monotonic_s += FRESH_S
    lookup.store.failures = 2
    with pytest.raises(StoreUnavailable):
        await keys.find(key)


@pytest.mark.parametrize("is_known_key_accepted", [False, True], ids=["refuse", "known keys"])
async def test_only_known_keys_are_accepted_without_the_store_if_configured(
    lookup: Lookup, is_known_key_accepted: bool
) -> None:
    _, known_key = await lookup.issue()
    _, unknown_key = await lookup.issue()
    revoked_record, gone_key = await lookup.issue()
    await lookup.store.put_key(revoked(revoked_record, NOW))
    keys = lookup.keys(known_while_down=is_known_key_accepted)
    assert await keys.find(known_key)
    assert await keys.find(gone_key) is None
    lookup.store.is_down = True
    lookup.monotonic_s += FRESH_S
    with pytest.raises(StoreUnavailable):
        await keys.find(unknown_key)
    if not is_known_key_accepted:
        with pytest.raises(StoreUnavailable):
            await keys.find(known_key)
        return
    count = len(lookup.store.lookups)
    for _ in range(10):
        assert await keys.find(known_key)
        assert await keys.find(gone_key) is None
    # It is not queried again for each request while it is down.
    assert len(lookup.store.lookups) == count
    lookup.store.is_down = False
    lookup.monotonic_s += FRESH_S
    assert await keys.find(unknown_key)


async def test_caller_is_found_by_key_id_even_if_the_key_is_revoked(lookup: Lookup) -> None:
    record, _ = await lookup.issue(limits=KeyLimits(rpm=3))
    keys = lookup.keys()
    await lookup.store.put_key(revoked(record, NOW))
    assert await keys.caller("team", record.id) == record.caller
    for tenant, key in (("other", record.id), ("team", "key_none")):
        caller = await keys.caller(tenant, key)
        assert (caller.tenant, caller.key) == (tenant, key)
        assert not caller.may_use_model("gpt-oss")
        assert caller.mcp_servers == frozenset()
