"""Encoding of request records for both stores."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

import orjson

from unisono.core.request_record import RequestRecord, values_of

_DEFAULTS: Final = {field.name: field.default for field in fields(RequestRecord)}
_STORED_IF_FALSY: Final = ("id", "at", "duration_s", "first_token_s")
_TUPLES: Final = ("recoveries", "notes")


def encode_request(record: RequestRecord) -> bytes:
    """Return the record as JSON, without fields that have their default."""
    # Every default is falsy. The fields in `_STORED_IF_FALSY` have no default, or have a falsy value besides it.
    changed = {
        name: value
        for name, value in zip(_DEFAULTS, values_of(record), strict=True)
        if value or (name in _STORED_IF_FALSY and value is not None)
    }
    try:
        return orjson.dumps(changed)
    except orjson.JSONEncodeError:
        # A name that a client chose may have a lone surrogate.
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
