"""Every field of the newest SDK's request types is in the table of fields."""

from __future__ import annotations

import openai
import pytest
from sdk_fields import check_rows


@pytest.mark.skipif(int(openai.__version__.partition(".")[0]) < 3, reason="the table has the fields of the newest SDK")
def test_the_table_has_every_field_of_the_sdk() -> None:
    check_rows("openai")
