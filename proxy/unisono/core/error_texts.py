"""Errors and error texts that several packages share.

The texts are those that clients match, and those about time limits and incomplete answers. `read_counts` reads token
counts in the errors of backends. `close_matches` finds names to suggest. `ConversationConflict` is the error for a
conversation that is in use or was changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Final

from unisono.core.frozen import dataclass
from unisono.core.generation import Timeouts
from unisono.errors import StoreConflict


@dataclass(frozen=True, slots=True)
class MatchedText:
    """Error text that clients recognise by its words.

    `clients` maps the name of a client to the regular expression with which this client recognises the text.
    """

    template: str
    clients: dict[str, str]


# Do not reword the texts in this table. When the named clients recognise one of the first two texts, they compact the
# conversation; for an unknown error, they end the session. When they recognise the third text, they send the whole
# conversation again. All other error texts may change.
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

# Backends use different words, but the limit always follows a word such as "maximum". In Anthropic's message, the
# limit is followed by that word.
_LIMIT: Final = re.compile(
    r"(?:context (?:length|window|size)|maximum|limit)[^\d]{0,40}(\d{1,9})|> (\d{1,9}) maximum", re.IGNORECASE
)
_NUMBER: Final = re.compile(r"\d{1,9}")


def read_counts(text: str) -> tuple[int, int]:
    """Return (requested tokens, limit) from a backend's error text; 0 for a missing count."""
    found = _LIMIT.search(text)
    if found is None:
        return 0, 0
    limit = int(found[1] or found[2])
    # The text may state the tokens of the prompt, of the output and their sum. The smallest number above the limit is
    # the number that did not fit.
    above = [number for number in map(int, _NUMBER.findall(text)) if number > limit]
    return min(above, default=0), limit


# The gateway learns the usual times of a deployment and may shorten the limits of an attempt accordingly.
LATE_START_REMEDY = (
    "if it needs more time, raise `first_token_timeout_s` of the model; if the limit was shorter than that setting, "
    "raise `min_first_token_timeout_s`"
)


def seconds(value: float) -> str:
    """Return a duration in seconds with its unit, rounded, for example `2.5 s`."""
    return f"{value:.0f} s" if value >= 99.5 else f"{value:.3g} s"


def no_first_token(server: str, timeouts: Timeouts) -> str:
    """Return the message for an attempt without a first token; `server` is the subject."""
    if timeouts.total_s <= timeouts.first_token_s:
        return f"{server} sent no first token, and {incomplete(timeouts)}"
    return f"{server} sent no first token within {seconds(timeouts.first_token_s)}; {LATE_START_REMEDY}"


def silent(server: str, timeouts: Timeouts) -> str:
    """Return the message for a server that stopped sending before the end of its answer."""
    return (
        f"{server} sent nothing for {seconds(timeouts.silence_s)} in the middle of its answer; if it needs more time, "
        "raise `stream_timeout` of the model; if the limit was shorter than that setting, raise "
        "`min_silence_timeout_s`"
    )


def incomplete(timeouts: Timeouts) -> str:
    """Return the message for an answer that exceeded its total time limit."""
    # `timeout` limits the whole answer, including the time in the queue and earlier attempts.
    return (
        f"the answer was not complete within its time limit, of which {seconds(timeouts.total_s)} were left for this "
        "attempt; if it needs more time, raise the model's `timeout`"
    )


def close_matches(name: str, names: Sequence[str], *, min_similarity: float = 0.6) -> list[str]:
    """Return up to three of `names` that are similar to `name`, the most similar first.

    `min_similarity` is between 0 and 1, where 1 requires equal names.
    """
    # Imported for the first unknown name only; most processes never see one.
    from difflib import get_close_matches

    return get_close_matches(name, names, cutoff=min_similarity)


class ConversationConflict(StoreConflict):
    """A conversation is in use or was changed. `param` is the field that names the conversation."""

    IN_USE: ClassVar[str] = "The conversation has a response in progress; try again when it has ended."

    def __init__(self, message: str = IN_USE, *, param: str = "conversation") -> None:
        super().__init__(message, param=param)
