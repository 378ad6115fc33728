"""Error texts that clients recognise by pattern."""

from __future__ import annotations

import re

import pytest

from unisono.core.error_texts import (
    ANTHROPIC_PROMPT_TOO_LONG,
    OPENAI_PROMPT_TOO_LONG,
    PREVIOUS_RESPONSE_NOT_FOUND,
    MatchedText,
)

VALUES = {
    "limit": 131072,
    "tokens": 140000,
    "subject": "your messages",
    "length": "the length of the messages",
    "response_id": "resp_1",
}


@pytest.mark.parametrize("text", [OPENAI_PROMPT_TOO_LONG, ANTHROPIC_PROMPT_TOO_LONG, PREVIOUS_RESPONSE_NOT_FOUND])
def test_the_text_matches_the_patterns_of_every_client(text: MatchedText) -> None:
    message = text.template.format(**VALUES)
    assert text.clients
    assert all(re.search(pattern, message, re.IGNORECASE) for pattern in text.clients.values())
