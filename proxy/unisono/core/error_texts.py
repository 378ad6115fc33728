"""Error texts that clients match by their words, and token counts in such texts of backends."""

from __future__ import annotations

import re
from typing import Final

from unisono.core.frozen import dataclass


@dataclass(frozen=True, slots=True)
class MatchedText:
    """Error text that clients recognise by its words; `clients` maps client names to patterns."""

    template: str
    clients: dict[str, str]


# Do not reword the texts in this table. After the first two, the named clients compact the conversation; otherwise
# they end the session. After the third, they send the whole conversation again. All other error texts may change.
OPENAI_PROMPT_TOO_LONG: Final = MatchedText(
    "This model's maximum context length is {limit} tokens, but {subject} resulted in {tokens} tokens. "
    "Please reduce {length}.",
    {"opencode": "maximum context length", "LiteLLM": "maximum context length is"},
)
ANTHROPIC_PROMPT_TOO_LONG: Final = MatchedText(
    "prompt is too long: {tokens} tokens > {limit} maximum",
    {"Claude Code": r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"},
)

PREVIOUS_RESPONSE_NOT_FOUND: Final = MatchedText(
    "Previous response with id '{response_id}' not found.",
    {"bridges for Codex": r"previous response with id .* not found"},
)

# Backends differ in wording, not in order: the limit follows a word for it, except in Anthropic's own message.
_LIMIT: Final = re.compile(
    r"(?:context (?:length|window|size)|maximum|limit)[^\d]{0,40}(\d{1,9})|> (\d{1,9}) maximum", re.IGNORECASE
)
_NUMBER: Final = re.compile(r"\d{1,9}")


def read_counts(text: str) -> tuple[int, int]:
    """Return (requested tokens, limit) from a backend's report; 0 if not stated."""
    found = _LIMIT.search(text)
    if found is None:
        return 0, 0
    limit = int(found[1] or found[2])
    # Prompt, output and their sum may all be named; the smallest number above the limit is the one that did not fit.
    above = [number for number in map(int, _NUMBER.findall(text)) if number > limit]
    return min(above, default=0), limit
