"""The prompt's ids in an answer are passed over, and nothing else ever is."""

import orjson
import pytest

from unisono.core.generation import OutputForm
from unisono_adapters._completions import ECHO, LONG_EVENT, CompletionFold, without_echo
from unisono_adapters._failures import FailureTable

IDS = list(range(100, 3000))
SPELLED = 'see "prompt_token_ids":[1,2] and \\"prompt_token_ids":[3] ' * 100


def event(**fields: object) -> bytes:
    choice = {"index": 0, "text": "", "token_ids": [5, 6], "finish_reason": None}
    return orjson.dumps({"id": "cmpl-1", "choices": [choice | fields], "usage": None})


def test_a_long_echo_is_left_out_and_all_else_is_as_it_was() -> None:
    echoed = event(prompt_token_ids=IDS, text=SPELLED)
    shorter = without_echo(echoed)
    assert len(shorter) < len(echoed) - 10_000
    assert orjson.loads(shorter) == orjson.loads(event(prompt_token_ids=[], text=SPELLED))


KEPT = {
    "a short event": event(prompt_token_ids=[1, 2, 3]),
    "a text that spells the key": event(text=SPELLED),
    "a list in the list": event(prompt_token_ids=[[1, 2], IDS]),
    "strings in the list": event(prompt_token_ids=["]", *IDS]),
    "no list": event(prompt_token_ids=None, text="x" * LONG_EVENT),
    "cut in the middle": event(prompt_token_ids=IDS)[:-200].rpartition(b"]")[0],
    "written with spaces": event(prompt_token_ids=IDS).replace(b":[", b": ["),
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_what_is_no_plain_echo_stays_as_it_is(kept: bytes) -> None:
    assert without_echo(kept) == kept


def test_the_answers_own_ids_arrive_beside_a_long_echo() -> None:
    fold = CompletionFold(OutputForm.IDS, FailureTable())
    long = event(prompt_token_ids=IDS)
    assert ECHO in long
    chunk = fold.feed([long, event(token_ids=[7])])
    assert chunk is not None
    assert chunk.tokens == [5, 6, 7]
