"""Log probabilities of a backend that sends other values than numbers are left out, and never an error."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from unisono.core.generation import VOCABULARY, Chunk, OutputForm, TokenLogprob
from unisono_adapters._completions import CompletionFold
from unisono_adapters._failures import FailureTable
from unisono_adapters.llamacpp import LlamaCppFold

HELLO = 13225
NONE = [None]
BARE = [TokenLogprob(HELLO, -1.0)]


def completions(**logprobs: Any) -> bytes:
    choice = {"text": "Hello", "token_ids": [HELLO], "finish_reason": None, "logprobs": logprobs}
    return orjson.dumps({"object": "text_completion", "choices": [choice]})


def llamacpp(*entries: Any) -> bytes:
    return orjson.dumps({"content": "Hello", "tokens": [HELLO], "completion_probabilities": entries})


def entry(*top: Any, **fields: Any) -> dict[str, Any]:
    return {"id": HELLO, "logprob": -1, "top_logprobs": [*top], **fields}


COMPLETIONS: dict[str, tuple[bytes, list[TokenLogprob | None]]] = {
    "null": (completions(token_logprobs=[None]), NONE),
    "text": (completions(token_logprobs=["x"]), NONE),
    "alternative null": (completions(token_logprobs=[-1], top_logprobs=[{"a": None, "b": [1]}]), BARE),
    "long id": (completions(token_logprobs=[-1], top_logprobs=[{f"token_id:{'9' * 5000}": -1}]), BARE),
    "unknown id": (completions(token_logprobs=[-1], top_logprobs=[{f"token_id:{VOCABULARY}": -1}]), BARE),
}
LLAMACPP: dict[str, tuple[bytes, list[TokenLogprob | None]]] = {
    "no id": (llamacpp({"logprob": -1}), NONE),
    "list as id": (llamacpp({"id": [1], "logprob": -1}), NONE),
    "null": (llamacpp(entry(logprob=None)), NONE),
    "alternatives": (llamacpp(entry(7, {"id": VOCABULARY, "logprob": -1}, {"id": -4, "logprob": -1}, {})), BARE),
}


def logprobs_in(chunk: Chunk | None) -> list[TokenLogprob | None]:
    assert chunk is not None
    return [*chunk.logprobs]


@pytest.mark.parametrize("case", COMPLETIONS)
def test_values_of_the_completions_api(case: str) -> None:
    sent, expected = COMPLETIONS[case]
    fold = CompletionFold(OutputForm.IDS, FailureTable(), has_logprobs=True)
    assert logprobs_in(fold.feed([sent])) == expected


@pytest.mark.parametrize("case", LLAMACPP)
def test_values_of_llamacpp(case: str) -> None:
    sent, expected = LLAMACPP[case]
    assert logprobs_in(LlamaCppFold(FailureTable()).feed([sent])) == expected
