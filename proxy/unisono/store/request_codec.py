"""Encoding of request records for both stores."""

from __future__ import annotations

from itertools import compress
from operator import ne
from typing import Any, Final

import orjson

from unisono.core.request_record import RequestRecord

# Replaces the default of fields that have none. It equals no value, so that these fields are always written.
_NO_DEFAULT: Final = object()
_DEFAULTS: Final = {name: RequestRecord._field_defaults.get(name, _NO_DEFAULT) for name in RequestRecord._fields}
_TUPLES: Final = ("recoveries", "notes")


def encode_request(record: RequestRecord) -> bytes:
    """Return the record as JSON, without fields that have their default."""
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
