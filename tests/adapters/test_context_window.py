"""Tests of token counts in errors about an exceeded context window."""

from __future__ import annotations

import pytest

from unisono.core.error_texts import read_counts

REPORTS: dict[str, tuple[str, tuple[int, int]]] = {
    "vllm": (
        "This model's maximum context length is 4096 tokens. However, you requested 100 output tokens and your prompt "
        "contains at least 5000 input tokens, for a total of at least 5100 tokens.",
        (5000, 4096),
    ),
    "vllm with output tokens": (
        "This model's maximum context length is 4096 tokens. However, you requested 100 output tokens and your prompt "
        "contains at least 4000 input tokens, for a total of at least 4100 tokens.",
        (4100, 4096),
    ),
    "vllm without counts": ("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", (0, 0)),
    "sglang": ("The input (5000 tokens) is longer than the model's context length (4096 tokens).", (5000, 4096)),
    "sglang with output tokens": (
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of "
        "4100 tokens: 4000 tokens from the input messages and 100 tokens for the completion.",
        (4100, 4096),
    ),
    "llama.cpp": (
        "request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it",
        (9000, 8192),
    ),
    "openai": (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens.",
        (9001, 8192),
    ),
    "anthropic": ("prompt is too long: 210000 tokens > 200000 maximum", (210000, 200000)),
    "gemini": (
        "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
        (1200000, 1048576),
    ),
    "limit only": ("maximum context length is 4096", (0, 4096)),
    "no numbers": ("the context window is full", (0, 0)),
}


@pytest.mark.parametrize(("text", "counts"), REPORTS.values(), ids=REPORTS)
def test_token_counts_are_read_from_each_error_message(text: str, counts: tuple[int, int]) -> None:
    assert read_counts(text) == counts
