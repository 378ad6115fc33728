"""Tests of the codec of stored records: round trips and errors for unreadable records."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.state import EVERY_ITEM, conversation, full_response
from tests.drawn import item, text, tokens
from unisono.core import item_records
from unisono.core.access import KeyDigest, KeyRecord
from unisono.core.budget_period import NO_PERIOD, Period
from unisono.core.conversation import (
    Json,
)
from unisono.core.generation import Usage
from unisono.core.quotas import KeyLimits
from unisono.core.state_store import Status, StoredConversation, StoredItem, StoredResponse
from unisono.errors import InternalError, StoreUnreadable
from unisono.store import codec
from unisono.store.codec import StateLimits

BOUNDS = StateLimits()

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | text
scalars |= st.floats(allow_nan=False, allow_infinity=False)
json: st.SearchStrategy[Json] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=8
)
objects = st.dictionaries(text, json, max_size=4)
items = st.builds(StoredItem, text, st.lists(item, max_size=3).map(tuple), objects)
counts = st.integers(0, 10**9)
responses = st.builds(
    StoredResponse,
    id=text,
    status=st.sampled_from(Status),
    model=text,
    created_at=st.floats(0, 1e11),
    first_day=text,
    request=objects,
    input=st.lists(items, max_size=3).map(tuple),
    output=st.lists(items, max_size=3).map(tuple),
    usage=st.none() | st.builds(Usage, counts, counts, counts, counts),
    error=st.none() | objects,
    notes=objects,
    ancestors=st.lists(text, max_size=3).map(tuple),
    conversation=st.none() | text,
)


@given(items)
def test_item_round_trip(item: StoredItem) -> None:
    assert codec.decode_item(codec.encode_each([item], BOUNDS)[0]) == item


times = st.floats(0, 1e11)
names = st.none() | st.frozensets(text, max_size=3)
amounts = st.none() | st.integers(0, 2**53)
periods = st.sampled_from([NO_PERIOD, Period("day"), Period("month"), Period("every", 2_592_000)])
limits = st.builds(KeyLimits, amounts, amounts, amounts, amounts, amounts, periods, times, amounts)
keys = st.builds(
    KeyRecord,
    id=text,
    tenant=text,
    digests=st.lists(st.builds(KeyDigest, text, st.none() | times), max_size=3).map(tuple),
    created_at=times,
    name=text,
    ending=text,
    expires_at=st.none() | times,
    revoked_at=st.none() | times,
    limits=limits,
    models=names,
    mcp_servers=names,
    tags=st.dictionaries(text, text, max_size=3),
    raw=st.booleans(),
    revision=st.integers(0, 10**9),
)


@given(keys)
def test_key_round_trip(key: KeyRecord) -> None:
    assert codec.decode_key(codec.encode_key(key)) == key
    assert codec.encode_key(codec.decode_key(codec.encode_key(key))) == codec.encode_key(key)


@given(responses)
def test_response_round_trip(response: StoredResponse) -> None:
    parts = codec.encode_response(response, BOUNDS)
    assert codec.decode_response(*parts) == response
    assert codec.encode_response(codec.decode_response(*parts), BOUNDS) == parts


@given(st.builds(StoredConversation, text, st.floats(0, 1e11), text, objects, counts))
def test_conversation_round_trip(stored: StoredConversation) -> None:
    assert codec.decode_conversation(codec.encode_conversation(stored), stored.revision) == stored


@given(tokens)
def test_tokens_round_trip(ids: tuple[int, ...]) -> None:
    assert codec.decode_tokens(codec.encode_tokens(ids)) == ids
    assert len(codec.encode_tokens(ids)) == 4 * len(ids)


def as_newer_version(data: bytes) -> bytes:
    return orjson.dumps({**orjson.loads(data), "v": codec.VERSION + 1, "more": "than is known"})


def test_record_of_a_newer_version_is_unreadable() -> None:
    head, input_, output = codec.encode_response(full_response(), BOUNDS)
    for parts in (
        (as_newer_version(head), input_, output),
        (head, as_newer_version(input_), output),
        (head, input_, as_newer_version(output)),
    ):
        with pytest.raises(StoreUnreadable, match="newer version"):
            codec.decode_response(*parts)
    with pytest.raises(StoreUnreadable, match="newer version"):
        codec.decode_item(as_newer_version(codec.encode_each([EVERY_ITEM[0]], BOUNDS)[0]))
    with pytest.raises(StoreUnreadable, match="newer version"):
        codec.decode_conversation(as_newer_version(codec.encode_conversation(conversation())), 0)


DAMAGED = {
    "empty": b"",
    "truncated": b'{"v":1,"id":"a","said":[],"sho',
    "not an object": b"[1]",
    "no version": b'{"id":"a","said":[],"shown":{}}',
    "version of the wrong type": b'{"v":"1","id":"a","said":[],"shown":{}}',
    "missing field": b'{"v":1,"id":"a","said":[]}',
    "field of the wrong type": b'{"v":1,"id":7,"said":[],"shown":{}}',
    "unknown item kind": b'{"v":1,"id":"a","said":[{"kind":"smell"}],"shown":{}}',
    "unknown phase": b'{"v":1,"id":"a","said":[{"kind":"message","text":"","phase":"later"}],"shown":{}}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_record_is_unreadable(name: str) -> None:
    with pytest.raises(StoreUnreadable, match="damaged"):
        codec.decode_item(DAMAGED[name])


def test_item_that_is_not_json_is_an_internal_error() -> None:
    with pytest.raises(InternalError):
        codec.encode_each([StoredItem("a", (), {"lone": "\ud800"})], BOUNDS)[0]
    with pytest.raises(InternalError):
        codec.encode_each([StoredItem("a", (), {"huge": 2**70})], BOUNDS)[0]


def test_every_conversation_item_type_has_a_record_name() -> None:
    assert set(item_records.KIND) == {type(part) for item in EVERY_ITEM for part in item.meaning}
