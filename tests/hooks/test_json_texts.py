"""Guardrails and JSON: the arguments of calls and answers in JSON are checked by their values, and stay valid."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.conversation import AssistantCall, Conversation, Json, Phase, Preamble
from unisono.core.events import Closed, Item, Text, ToolCall
from unisono.core.generation import FinishReason, Sampling, Usage
from unisono.core.hooks import Answer, Request
from unisono.hooks.blocklist import Blocklist
from unisono.hooks.content_filter import ContentFilter
from unisono.hooks.text_guardrail import Blocked, checked_json

CALL = ToolCall(0, 0, "call_1", "send")
TEXT = Text(0, Phase.FINAL)
FILTER = ContentFilter(
    {
        "patterns": [
            *(
                {"pattern_type": "prebuilt", "pattern_name": name, "action": "MASK"}
                for name in ("email", "ipv4", "url")
            ),
            {"pattern_type": "prebuilt", "pattern_name": "generic_api_key", "action": "MASK"},
            {"pattern_type": "regex", "name": "num", "pattern": "[0-9]{6,}", "action": "MASK"},
            {"pattern_type": "regex", "name": "plate", "pattern": "^[A-Z]{3}[0-9]{4}$", "action": "MASK"},
            {"pattern_type": "regex", "name": "ticket", "pattern": "TICKET-[0-9]+", "action": "BLOCK"},
            {"pattern_type": "regex", "name": "secret", "pattern": "secret.*", "action": "MASK"},
        ]
    }
)
MASKED: Mapping[str, tuple[str, str]] = {
    "address at the beginning of a line": (
        r'{"u": "To:\nann@example.com\nHello"}',
        r'{"u": "To:\n[EMAIL_REDACTED]\nHello"}',
    ),
    "escaped character": (r'{"u":"ann\u0040example.com"}', '{"u":"[EMAIL_REDACTED]"}'),
    "word boundary after an escape": (r'{"u":"a\n10.20.30.40"}', r'{"u":"a\n[IPV4_REDACTED]"}'),
    "words after an escape": (
        r'{"u":"https://x.com/a\nnext line stays"}',
        r'{"u":"[URL_REDACTED]\nnext line stays"}',
    ),
    "number": ('{"u":"x","n":1234567,"b":1}', '{"u":"x","n":"[NUM_REDACTED]","b":1}'),
    "expression to the end of the text": ('{"u":"a secret b","v":1}', '{"u":"a [SECRET_REDACTED]","v":1}'),
    "name of a member": ('{"ann@example.com":1}', '{"[EMAIL_REDACTED]":1}'),
    "array": ('["ann@example.com", "b"]', '["[EMAIL_REDACTED]", "b"]'),
    "JSON in a string": (
        r'{"body":"{\"to\":\"a\\nann@example.com\"}"}',
        r'{"body":"{\"to\":\"a\\n[EMAIL_REDACTED]\"}"}',
    ),
    "repeated name": ('{"a":"ann@example.com","a":"b"}', '{"a":"[EMAIL_REDACTED]","a":"b"}'),
    "no JSON": (r"send ann@example.com", "send [EMAIL_REDACTED]"),
    "unfinished JSON": ('{"a":"ann@example.com', '{"a":"[EMAIL_REDACTED]'),
    "name with a value": (
        '{"api_key": "abcdefghijklmnopqrstuvwxyz", "b": 1}',
        '{"api_key": "[GENERIC_API_KEY_REDACTED]", "b": 1}',
    ),
    "value behind an object": (
        '[{"api_key": 1}, "abcdefghijklmnopqrstuvwxyz"]',
        '[{"api_key": 1}, "abcdefghijklmnopqrstuvwxyz"]',
    ),
    "names that become equal": (
        '[{"ann@example.com":1,"bob@example.com":2},{"ann@example.com":3}]',
        '[{"[EMAIL_REDACTED]":1,"[EMAIL_REDACTED]_2":2},{"[EMAIL_REDACTED]":3}]',
    ),
    "whole value": ('{"plate":"ABC1234","b":"xABC1234"}', '{"plate":"[PLATE_REDACTED]","b":"xABC1234"}'),
    "JSON string": (r'"ann\u0040example.com"', '"[EMAIL_REDACTED]"'),
    "decorator after the end of a line": (
        r'{"code": "import pytest\n\n@pytest.fixture\ndef db(): ..."}',
        r'{"code": "import pytest\n\n@pytest.fixture\ndef db(): ..."}',
    ),
    "nothing": ('{"a": "b", "c": [1, 2.5, true, null]}', '{"a": "b", "c": [1, 2.5, true, null]}'),
}


def request_of(*items: AssistantCall) -> Request:
    return Request("r", "t", "", "m", "chat", Conversation(Preamble(), items), Sampling())


@pytest.mark.parametrize("item", [CALL, TEXT], ids=["call", "answer"])
@pytest.mark.parametrize(("text", "expected"), MASKED.values(), ids=MASKED)
async def test_a_masked_json_text_keeps_its_form(text: str, expected: str, item: Item) -> None:
    new = await FILTER.check_item(request_of(), Closed(item, text))
    assert (text if new is None else new) == expected


@pytest.mark.parametrize(("text", "expected"), MASKED.values(), ids=MASKED)
async def test_an_earlier_call_of_the_request_is_checked_by_its_values(text: str, expected: str) -> None:
    call = AssistantCall("call_1", "send", text)
    changes = await FILTER.before(request_of(call))
    items = (call,) if changes is None else changes.items
    assert items == (AssistantCall("call_1", "send", expected),)


@pytest.mark.parametrize(
    "text", [r'{"u":"TICKET\u002d55"}', '{"u":["TICKET-55"]}', r'{"u":"{\"v\":\"TICKET\\u002d55\"}"}']
)
async def test_an_escape_hides_no_blocked_value(text: str) -> None:
    with pytest.raises(Blocked, match="ticket"):
        await FILTER.check_item(request_of(), Closed(CALL, text))
    blocklist = Blocklist({"patterns": {"ticket": "TICKET-[0-9]+"}})
    with pytest.raises(Blocked, match="ticket"):
        await blocklist.after(request_of(), Answer((Closed(CALL, text),), FinishReason.STOP, Usage()))
    with pytest.raises(Blocked, match="ticket"):
        await blocklist.before(request_of(AssistantCall("call_1", "send", text)))


async def test_values_that_match_only_together_are_not_blocked() -> None:
    both = ContentFilter({"patterns": [{"pattern_type": "regex", "name": "both", "pattern": r"a\W+b"}]})
    assert await both.check_item(request_of(), Closed(CALL, '{"u":"a","v":"b"}')) is None


async def test_a_slow_check_is_made_once_if_it_finds_nothing() -> None:
    checked: list[str] = []

    async def check(text: str) -> str:
        checked.append(text)
        return text.replace("secret", "*")

    assert await checked_json('{"u":"a","v":["b",3]}', check, together=True) == '{"u":"a","v":["b",3]}'
    assert len(checked) == 1
    assert await checked_json('{"u":"a","v":["secret",3]}', check, together=True) == '{"u":"a","v":["*",3]}'


WORDS = st.text(st.characters(exclude_characters='"[{'))  # not JSON themselves
JSON: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner),
)


def strings_of(value: Json) -> list[str]:
    match value:
        case str():
            return [value]
        case list():
            return [text for each in value for text in strings_of(each)]
        case dict():
            return [text for name, each in value.items() for text in (name, *strings_of(each))]
        case _:
            return []


@given(value=st.lists(JSON) | st.dictionaries(WORDS, JSON), is_ascii=st.booleans())
async def test_each_string_of_any_json_is_masked_and_the_json_stays_valid(value: Json, is_ascii: bool) -> None:

    async def mask(text: str) -> str:
        return "*"

    masked = json.loads(await checked_json(json.dumps(value, ensure_ascii=is_ascii), mask))
    assert all(text.startswith("*") for text in strings_of(masked))
