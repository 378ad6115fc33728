"""Events of a completion stream give the same tokens however many of them arrive in one read."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import examples
from unisono.core.generation import VOCABULARY, Chunk, FinishReason, OutputForm
from unisono.errors import BackendError, BackendProtocolError
from unisono_adapters._completions import CompletionFold
from unisono_adapters._failures import FailureTable


def event(ids: Any, **choice: Any) -> bytes:
    """Return an event with these token ids, as vLLM sends it."""
    fields = {"index": 0, "text": "?", "logprobs": None, "finish_reason": None, "stop_reason": None, **choice}
    return orjson.dumps({"object": "text_completion", "choices": [{**fields, "token_ids": ids}], "usage": None})


END = event([], finish_reason="stop")
COUNTS = orjson.dumps({"choices": [], "usage": {"prompt_tokens": 5}})
DONE = b"[DONE]"
# Events that the typed decoder does not accept, with the exception of the old path; None if it accepts them.
UNUSUAL: dict[str, tuple[bytes, type[Exception] | None]] = {
    "no ids, no text": (event(None, text=""), None),
    "text without ids": (event(None), BackendError),
    "another object": (orjson.dumps({"object": "other", "choices": [{"token_ids": [1], "finish_reason": None}]}), None),
    "usage with every event": (
        orjson.dumps({"choices": [{"token_ids": [1], "finish_reason": None}], "usage": {"prompt_tokens": 5}}),
        None,
    ),
    "error object": (orjson.dumps({"error": {"message": "out of memory", "code": 500}}), BackendError),
    "error beside a choice": (
        orjson.dumps({"error": "x", "choices": [{"token_ids": [1], "finish_reason": None}]}),
        BackendError,
    ),
    "id outside the vocabulary": (event([VOCABULARY]), None),
    "negative id": (event([-1]), BackendProtocolError),
    "id that is a bool": (event([True]), BackendProtocolError),
    "id that is a float": (event([1.0]), BackendProtocolError),
    "no JSON": (b"{", BackendProtocolError),
    "invalid UTF-8": (
        b'{"choices": [{"token_ids": [5], "finish_reason": null}], "object": "text\xffcompletion"}',
        BackendProtocolError,
    ),
    "not an object": (b"7", BackendProtocolError),
    "deep nesting": (b'{"choices":' + b"[" * 5_000 + b"]" * 5_000 + b"}", BackendProtocolError),
}


def fed(reads: list[list[bytes]]) -> tuple[list[int], FinishReason | None]:
    """Return the tokens and the finish reason of a stream."""
    fold = CompletionFold(OutputForm.IDS, FailureTable())
    chunks = [chunk for read in reads if (chunk := fold.feed(read)) is not None]
    last = chunks[-1] if chunks else Chunk()
    return [token for chunk in chunks for token in chunk.tokens], last.finish


EVENTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, VOCABULARY - 1), max_size=3).map(event),
        st.sampled_from([found for found, error in UNUSUAL.values() if error is None]),
    ),
    max_size=12,
)


@settings(max_examples=examples(200), deadline=None)
@given(events=EVENTS, cuts=st.lists(st.integers(0, 15), max_size=6))
def test_the_boundaries_of_reads_change_nothing(events: list[bytes], cuts: list[int]) -> None:
    stream = [*events, END, COUNTS, DONE]
    places = sorted({0, *(cut for cut in cuts if cut < len(stream)), len(stream)})
    reads = [stream[begin:end] for begin, end in pairwise(places)]
    tokens, finish = fed(reads)
    assert (tokens, finish) == fed([[each] for each in stream])
    assert finish is FinishReason.STOP


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_event_is_treated_as_if_it_came_alone(name: str, before: int) -> None:
    found, error = UNUSUAL[name]
    read = [*[event([7])] * before, found]
    fold = CompletionFold(OutputForm.IDS, FailureTable())
    if error is not None:
        with pytest.raises(error):
            fold.feed(read)
        return
    chunk = fold.feed(read)
    assert [*(chunk.tokens if chunk else ())][:before] == [7] * before
