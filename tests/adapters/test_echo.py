"""Tests of removing the echoed prompt ids from completion events; nothing else is removed."""

import orjson
import pytest

from unisono.core.generation import OutputForm
from unisono_adapters._completions import ECHO, LONG_EVENT, CompletionFold, without_echo
from unisono_adapters._failures import FailureTable

IDS = list(range(100, 3000))
TEXT_WITH_KEYS = 'see "prompt_token_ids":[1,2] and \\"prompt_token_ids":[3] ' * 100


def event(**fields: object) -> bytes:
    choice = {"index": 0, "text": "", "token_ids": [5, 6], "finish_reason": None}
    return orjson.dumps({"id": "cmpl-1", "choices": [choice | fields], "usage": None})


def test_long_echo_is_removed_and_the_rest_is_unchanged() -> None:
    original = event(prompt_token_ids=IDS, text=TEXT_WITH_KEYS)
    shorter = without_echo(original)
    assert len(shorter) < len(original) - 10_000
    assert orjson.loads(shorter) == orjson.loads(event(prompt_token_ids=[], text=TEXT_WITH_KEYS))


UNCHANGED = {
    "short event": event(prompt_token_ids=[1, 2, 3]),
    "text that contains the key": event(text=TEXT_WITH_KEYS),
    "nested list": event(prompt_token_ids=[[1, 2], IDS]),
    "strings in the list": event(prompt_token_ids=["]", *IDS]),
    "not a list": event(prompt_token_ids=None, text="x" * LONG_EVENT),
    "truncated": event(prompt_token_ids=IDS)[:-200].rpartition(b"]")[0],
    "spaces around the colon": event(prompt_token_ids=IDS).replace(b":[", b": ["),
}


@pytest.mark.parametrize("data", UNCHANGED.values(), ids=UNCHANGED)
def test_event_without_a_plain_echo_is_unchanged(data: bytes) -> None:
    assert without_echo(data) == data


def test_output_ids_are_read_beside_a_long_echo() -> None:
    fold = CompletionFold(OutputForm.IDS, FailureTable())
    echo_event = event(prompt_token_ids=IDS)
    assert ECHO in echo_event
    chunk = fold.feed([echo_event, event(token_ids=[7])])
    assert chunk is not None
    assert chunk.tokens == [5, 6, 7]
