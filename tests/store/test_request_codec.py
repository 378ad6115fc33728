"""Encoding of request records: without defaults, and readable by other versions."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from unisono.core.request_record import RequestRecord
from unisono.store.codec import decode_request, encode_request

RECORD = RequestRecord("req_1", 1000.0, 0.5, status=200, recoveries=("late-call",), attempts=(("a", "x"), ("b", "")))


@pytest.mark.parametrize("name", RequestRecord._fields)
def test_a_falsy_value_survives_if_it_is_not_the_default(name: str) -> None:
    for value in ("", 0, 0.0, (), None):
        if type(value) is type(getattr(RECORD, name)) or (name == "first_token_s" and value == 0.0):
            changed: dict[str, Any] = {name: value}
            record = RECORD._replace(**changed)
            assert decode_request(encode_request(record)) == record


def test_defaults_are_not_stored() -> None:
    assert orjson.loads(encode_request(RECORD)) == {
        "id": "req_1",
        "at": 1000.0,
        "duration_s": 0.5,
        "status": 200,
        "recoveries": ["late-call"],
        "attempts": [["a", "x"], ["b", ""]],
    }


def test_fields_of_a_newer_version_are_ignored() -> None:
    data = orjson.dumps({**orjson.loads(encode_request(RECORD)), "newer": 1})
    assert decode_request(data) == RECORD
