"""Every field of the SDK's request types is in the table of fields."""

from __future__ import annotations

from sdk_fields import check_rows


def test_the_table_has_every_field_of_the_sdk() -> None:
    check_rows("anthropic")
