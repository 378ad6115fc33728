"""Records survive the way to bytes and back, and what cannot be read says why."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.state import EVERY_ITEM, conversation, full_response
from tests.drawn import item, text, tokens
from unisono.core import item_records
from unisono.core.access import NO_PERIOD, KeyDigest, KeyLimits, KeyRecord, Period
from unisono.core.conversation import (
    Json,
)
from unisono.core.generation import Usage
from unisono.core.state_store import StateLimits, Status, StoredConversation, StoredItem, StoredResponse
from unisono.errors import InternalError, StoreUnreadable
from unisono.store import codec

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
def test_an_item_survives_the_way_to_bytes_and_back(item: StoredItem) -> None:
    assert codec.decode_item(codec.encode_item(item, BOUNDS)) == item


times = st.floats(0, 1e11)
names = st.none() | st.frozensets(text, max_size=3)
amounts = st.none() | st.integers(0, 2**53)
periods = st.sampled_from([NO_PERIOD, Period("day"), Period("month"), Period("every", 2_592_000)])
limits = st.builds(KeyLimits, amounts, amounts, amounts, amounts, amounts, periods, times)
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
def test_a_key_survives_the_way_to_bytes_and_back(key: KeyRecord) -> None:
    assert codec.decode_key(codec.encode_key(key)) == key
    assert codec.encode_key(codec.decode_key(codec.encode_key(key))) == codec.encode_key(key)


@given(responses)
def test_a_response_survives_the_way_to_bytes_and_back(response: StoredResponse) -> None:
    parts = codec.encode_response(response, BOUNDS)
    assert codec.decode_response(*parts) == response
    assert codec.encode_response(codec.decode_response(*parts), BOUNDS) == parts


@given(st.builds(StoredConversation, text, st.floats(0, 1e11), text, objects, counts))
def test_a_conversation_survives_the_way_to_bytes_and_back(kept: StoredConversation) -> None:
    assert codec.decode_conversation(codec.encode_conversation(kept), kept.revision) == kept


@given(tokens)
def test_tokens_survive_the_way_to_bytes_and_back(ids: tuple[int, ...]) -> None:
    assert codec.decode_tokens(codec.encode_tokens(ids)) == ids
    assert len(codec.encode_tokens(ids)) == 4 * len(ids)


def newer(data: bytes) -> bytes:
    return orjson.dumps({**orjson.loads(data), "v": codec.VERSION + 1, "more": "than is known"})


def test_a_record_of_a_newer_version_says_so() -> None:
    head, given_, output = codec.encode_response(full_response(), BOUNDS)
    for parts in ((newer(head), given_, output), (head, newer(given_), output), (head, given_, newer(output))):
        with pytest.raises(StoreUnreadable, match="newer version"):
            codec.decode_response(*parts)
    with pytest.raises(StoreUnreadable, match="newer version"):
        codec.decode_item(newer(codec.encode_item(EVERY_ITEM[0], BOUNDS)))
    with pytest.raises(StoreUnreadable, match="newer version"):
        codec.decode_conversation(newer(codec.encode_conversation(conversation())), 0)


DAMAGED = {
    "nothing": b"",
    "cut": b'{"v":1,"id":"a","said":[],"sho',
    "no object": b"[1]",
    "no version": b'{"id":"a","said":[],"shown":{}}',
    "a version that is no number": b'{"v":"1","id":"a","said":[],"shown":{}}',
    "a field missing": b'{"v":1,"id":"a","said":[]}',
    "a field of another type": b'{"v":1,"id":7,"said":[],"shown":{}}',
    "an item nobody knows": b'{"v":1,"id":"a","said":[{"kind":"smell"}],"shown":{}}',
    "a phase nobody knows": b'{"v":1,"id":"a","said":[{"kind":"message","text":"","phase":"later"}],"shown":{}}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_record_is_not_guessed_at(name: str) -> None:
    with pytest.raises(StoreUnreadable, match="damaged"):
        codec.decode_item(DAMAGED[name])


def test_what_is_not_json_is_not_kept() -> None:
    with pytest.raises(InternalError):
        codec.encode_item(StoredItem("a", (), {"lone": "\ud800"}), BOUNDS)
    with pytest.raises(InternalError):
        codec.encode_item(StoredItem("a", (), {"huge": 2**70}), BOUNDS)


def test_every_item_of_a_conversation_has_a_name_in_records() -> None:
    assert set(item_records.KIND) == {type(part) for item in EVERY_ITEM for part in item.meaning}
