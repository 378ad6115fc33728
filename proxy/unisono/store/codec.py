"""Conversion of records to bytes and back: versioned JSON, the same in every store.

A round trip returns an equal record. Decoding raises `StoreUnreadable` if a record is damaged or was written by a newer
version; state is never guessed. Equal records have equal bytes, so repeated writes can be recognised.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Callable, Sequence
from itertools import compress
from operator import ne
from typing import Any, Final, cast

import orjson

from unisono.core.access import KeyDigest, KeyRecord
from unisono.core.budget_period import Period
from unisono.core.conversation import Json, Tokens
from unisono.core.directory import AuditRecord, DirectoryEntry, EntryKind
from unisono.core.frozen import dataclass
from unisono.core.generation import Usage
from unisono.core.item_records import Record, text_of, to_item, to_record
from unisono.core.quotas import KeyLimits
from unisono.core.request_record import RequestRecord
from unisono.core.state_store import Status, StoredConversation, StoredItem, StoredResponse
from unisono.errors import InternalError, StoreTooLarge, StoreUnreadable

VERSION = 1


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StateLimits:
    """Size limits for input, in encoded bytes. Finished answers are stored with `UNLIMITED`.

    An encoded item contains its texts twice: in the item of the client, and in its parsed parts. `response` limits all
    records of a response together.
    """

    item: int = 1 * MIB
    response: int = 8 * MIB
    conversation: int = 32 * MIB


# Limits for finished answers. An answer cannot be generated again, so it is stored whatever its size.
UNLIMITED = StateLimits(item=1 << 53, response=1 << 53, conversation=1 << 53)


def _item(item: StoredItem) -> Record:
    return {"id": item.id, "said": [to_record(part) for part in item.meaning], "shown": dict(item.wire)}


def _to_item(record: Record) -> StoredItem:
    meaning = cast("list[Record]", record["said"])
    return StoredItem(
        text_of(record, "id"),
        tuple(map(to_item, meaning)),
        cast("Record", record["shown"]),
    )


def _dump(record: Record) -> bytes:
    try:
        return orjson.dumps({"v": VERSION, **record})
    except orjson.JSONEncodeError as error:
        raise InternalError(f"the state cannot be encoded as JSON: {error}") from error


def _load(data: bytes) -> Record:
    record = orjson.loads(data)
    if not isinstance(record, dict) or not isinstance(record.get("v"), int):
        raise TypeError("no version")
    if record["v"] > VERSION:
        raise StoreUnreadable(
            "this state was written by a newer version of the gateway; update this gateway to read it"
        )
    return record


def _decoding(read: Callable[[Record], object], *parts: bytes) -> object:
    try:
        record: Record = {}
        for part in parts:
            record |= _load(part)
        return read(record)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreUnreadable("a stored record is damaged") from error


def encode_each(items: Sequence[StoredItem], bounds: StateLimits, at: str | None = None) -> list[bytes]:
    """Encode items. Raises `StoreTooLarge` if one of them exceeds `bounds.item` bytes.

    `at` is the field of the request that contains the items; None if there is no such field.
    """
    encoded = [_dump(_item(item)) for item in items]
    for index, data in enumerate(encoded):
        if len(data) > bounds.item:
            param = None if at is None else f"{at}.{index}"
            name = f"item {index}" if param is None else f"'{param}'"
            raise StoreTooLarge(
                f"{name} cannot be stored: it takes {len(data):,} bytes in the store, which holds texts twice; the "
                f"limit is {bounds.item:,}; shorten it",
                param=param,
            )
    return encoded


def decode_item(data: bytes) -> StoredItem:
    """Decode an item. Raises `StoreUnreadable` if it is damaged or from a newer version."""
    return cast("StoredItem", _decoding(_to_item, data))


def encode_items(key: str, items: Sequence[StoredItem], bounds: StateLimits) -> bytes:
    """Encode items of a response as a record with one field, `key`: `input` or `output`.

    Raises `StoreTooLarge` if an item exceeds `bounds.item` bytes.
    """
    parts = encode_each(items, bounds, at=key if key == "input" else None)
    return b'{"v":%d,"%s":[%s]}' % (VERSION, key.encode(), b",".join(parts))


def encode_head(response: StoredResponse) -> bytes:
    """Encode a response without its items."""
    usage = response.usage
    return _dump(
        {
            "id": response.id,
            "status": response.status.value,
            "model": response.model,
            "created_at": response.created_at,
            "first_day": response.first_day,
            "request": dict(response.request),
            "usage": None if usage is None else {key: getattr(usage, key) for key in Usage.__slots__},
            "error": None if response.error is None else dict(response.error),
            "notes": dict(response.notes),
            "ancestors": list(response.ancestors),
            "conversation": response.conversation,
            **({} if response.seen is None else {"seen": response.seen}),
        }
    )


def encode_response(response: StoredResponse, bounds: StateLimits) -> tuple[bytes, bytes, bytes]:
    """Encode a response as three records: head, input and output.

    Raises `StoreTooLarge` if an item exceeds `bounds.item` bytes, or the three records exceed `bounds.response`.
    """
    parts = (
        encode_head(response),
        encode_items("input", response.input, bounds),
        encode_items("output", response.output, bounds),
    )
    size = sum(map(len, parts))
    if size > bounds.response:
        raise StoreTooLarge(
            f"the response cannot be stored: it takes {size:,} bytes in the store, which holds texts twice; the limit "
            f"is {bounds.response:,}; shorten its input"
        )
    return parts


def decode_response(head: bytes, data: bytes, output: bytes) -> StoredResponse:
    """Decode the three records of a response.

    Raises `StoreUnreadable` if any of the records is damaged or from a newer version.
    """
    return cast("StoredResponse", _decoding(_to_response, data, output, head))


def _to_response(record: Record) -> StoredResponse:
    usage = cast("dict[str, int] | None", record["usage"])
    return StoredResponse(
        id=text_of(record, "id"),
        status=Status(text_of(record, "status")),
        model=text_of(record, "model"),
        created_at=cast("float", record["created_at"]),
        first_day=text_of(record, "first_day"),
        request=cast("Record", record["request"]),
        input=tuple(map(_to_item, cast("list[Record]", record["input"]))),
        output=tuple(map(_to_item, cast("list[Record]", record["output"]))),
        usage=None if usage is None else Usage(**usage),
        error=cast("Record | None", record["error"]),
        notes=cast("Record", record["notes"]),
        ancestors=tuple(cast("list[str]", record["ancestors"])),
        conversation=cast("str | None", record["conversation"]),
        seen=cast("int | None", record.get("seen")),
    )


def encode_conversation(conversation: StoredConversation) -> bytes:
    """Encode a conversation without its items and counters, which are stored separately."""
    return _dump(
        {
            "id": conversation.id,
            "created_at": conversation.created_at,
            "first_day": conversation.first_day,
            "metadata": dict(conversation.metadata),
        }
    )


def decode_conversation(data: bytes, revision: int, added: int = 0) -> StoredConversation:
    """Decode a conversation. Raises `StoreUnreadable` if it is damaged or from a newer version."""
    return cast(
        "StoredConversation",
        _decoding(
            lambda record: StoredConversation(
                text_of(record, "id"),
                cast("float", record["created_at"]),
                text_of(record, "first_day"),
                cast("Record", record["metadata"]),
                revision,
                added,
            ),
            data,
        ),
    )


# Fields of a key that are stored unchanged.
PLAIN = ("id", "tenant", "created_at", "name", "ending", "expires_at", "revoked_at", "raw", "revision")
# Further such fields, which later versions added. Older records lack them.
ADDED_PLAIN = ("user", "budget", "metadata", "is_blocked", "updated_at", "created_by", "once")
# Fields of an entry of the directory that are stored unchanged.
ENTRY_PLAIN = (
    *("id", "created_at", "updated_at", "alias", "email", "role", "members", "metadata", "budget", "created_by"),
    *("is_blocked", "revision"),
)
# Further fields of this kind, which entries of earlier versions lack.
ADDED_ENTRY_PLAIN = ("generation",)


def encode_key(record: KeyRecord) -> bytes:
    return _dump(
        {
            **{key: getattr(record, key) for key in (*PLAIN, *ADDED_PLAIN)},
            "digests": [{"digest": one.digest, "until": one.until} for one in record.digests],
            "limits": _limits(record.limits),
            "models": _names(record.models),
            "mcp_servers": _names(record.mcp_servers),
            "tags": dict(record.tags),
        }
    )


def _limits(limits: KeyLimits) -> Record:
    period = limits.budget_period
    plain = {key: getattr(limits, key) for key in KeyLimits.__slots__ if key not in ("budget_period", "soft_budget")}
    # Written only if it is set, because earlier versions cannot read limits with an unknown field.
    soft = {} if limits.soft_budget is None else {"soft_budget": limits.soft_budget}
    return {**plain, **soft, "budget_period": [period.kind, period.seconds]}


def _names(names: frozenset[str] | None) -> Json:
    return None if names is None else [*sorted(names)]


def decode_key(data: bytes) -> KeyRecord:
    """Decode a key. Raises `StoreUnreadable` if it is damaged or from a newer version."""
    return cast("KeyRecord", _decoding(_to_key, data))


def _to_key(record: Record) -> KeyRecord:
    plain: dict[str, Any] = {key: record[key] for key in PLAIN}
    plain |= {key: record[key] for key in ADDED_PLAIN if key in record}
    return KeyRecord(
        **plain,
        digests=tuple(KeyDigest(**one) for one in cast("list[dict[str, Any]]", record["digests"])),
        limits=_to_limits(record["limits"]),
        models=_to_names(record["models"]),
        mcp_servers=_to_names(record["mcp_servers"]),
        tags=cast("dict[str, str]", record["tags"]),
    )


def _to_limits(value: Json) -> KeyLimits:
    limits = dict(cast("dict[str, Any]", value))
    return KeyLimits(**{**limits, "budget_period": Period(*limits["budget_period"])})


def _to_names(names: Json) -> frozenset[str] | None:
    return None if names is None else frozenset(cast("list[str]", names))


def encode_entry(entry: DirectoryEntry) -> bytes:
    plain = {key: getattr(entry, key) for key in (*ENTRY_PLAIN, *ADDED_ENTRY_PLAIN)}
    return _dump({**plain, "kind": entry.kind, "limits": _limits(entry.limits), "models": _names(entry.models)})


def decode_entry(data: bytes) -> DirectoryEntry:
    """Decode an entry of the directory.

    Raises `StoreUnreadable` if it is damaged or from a newer version.
    """
    return cast("DirectoryEntry", _decoding(_to_entry, data))


def _to_entry(record: Record) -> DirectoryEntry:
    plain: dict[str, Any] = {key: record[key] for key in ENTRY_PLAIN}
    plain |= {key: record[key] for key in ADDED_ENTRY_PLAIN if key in record}
    kind, limits = EntryKind(text_of(record, "kind")), _to_limits(record["limits"])
    return DirectoryEntry(kind=kind, **plain, limits=limits, models=_to_names(record["models"]))


def encode_audit(audit: AuditRecord) -> bytes:
    return _dump({key: getattr(audit, key) for key in AuditRecord.__slots__})


def decode_audit(data: bytes) -> AuditRecord:
    """Decode an audit record. Raises `StoreUnreadable` if it is damaged or from a newer version."""

    def read(record: Record) -> AuditRecord:
        fields: dict[str, Any] = {key: record[key] for key in AuditRecord.__slots__}
        return AuditRecord(**fields)

    return cast("AuditRecord", _decoding(read, data))


def encode_tokens(tokens: Tokens) -> bytes:
    """Encode tokens with four bytes each, little-endian."""
    # Machines of both byte orders may share one store.
    packed = array.array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def decode_tokens(data: bytes) -> Tokens:
    packed = array.array("I", data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


# Replaces the default of fields that have none. It equals no value, so that these fields are always written.
_NO_DEFAULT: Final = object()
_DEFAULTS: Final = {name: RequestRecord._field_defaults.get(name, _NO_DEFAULT) for name in RequestRecord._fields}
_TUPLES: Final = ("recoveries", "notes")


def encode_request(record: RequestRecord) -> bytes:
    """Return the record as JSON. Fields that have their default value are left out."""
    changed = dict(compress(zip(_DEFAULTS, record, strict=True), map(ne, record, _DEFAULTS.values())))
    try:
        return orjson.dumps(changed)
    except orjson.JSONEncodeError:
        # A name that a client chose may contain a lone surrogate.
        return orjson.dumps({name: _replaced(value) for name, value in changed.items()})


def _replaced(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def decode_request(data: bytes) -> RequestRecord:
    values = orjson.loads(data)
    known: dict[str, Any] = {name: value for name, value in values.items() if name in _DEFAULTS}
    known.update({name: tuple(known[name]) for name in _TUPLES if name in known})
    if "attempts" in known:
        known["attempts"] = tuple((str(name), str(failure)) for name, failure in known["attempts"])
    return RequestRecord(**known)
