"""Arguments of calls that no answer can contain as JSON."""

from __future__ import annotations

import orjson
import pytest

from unisono.api.tool_calls import MAX_ARGUMENT_LEVELS, to_value
from unisono.observe.span_content import _call


def nested(depth: int) -> str:
    return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


@pytest.mark.parametrize(
    ("arguments", "is_value"),
    {
        "maximum depth": (nested(MAX_ARGUMENT_LEVELS), True),
        "too deep": (nested(MAX_ARGUMENT_LEVELS + 1), False),
        "too deep for the writer": (nested(300), False),
        "brackets in a text": (orjson.dumps({"a": "[" * 1_000}).decode(), True),
        "a number out of range": ('{"a":1e999}', False),
        "half a character": ('{"a":"\\ud800"}', False),
        "invalid JSON": ('{"a"', False),
    }.values(),
)
def test_only_arguments_that_a_request_may_contain_become_a_value(arguments: str, is_value: bool) -> None:
    assert to_value(arguments) == (orjson.loads(arguments) if is_value else arguments)
    orjson.dumps(to_value(arguments))


def test_deeply_nested_arguments_are_traced_as_text() -> None:
    assert _call("call_1", "f", nested(300), 10_000)["arguments"] == nested(300)
