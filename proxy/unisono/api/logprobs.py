"""Log probabilities of visible tokens in the form of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from unisono.core.emitted_logprobs import LogprobLog
from unisono.core.generation import TokenLogprob

# Maximum number of alternatives for a token, as in OpenAI's APIs.
MAX_TOP_LOGPROBS: Final = 20


def to_entries(log: LogprobLog | None, item: int, text: str, top: int) -> list[dict[str, Any]]:
    """Return an entry for each token that ends in `text`, with at most `top` alternatives.

    `text` is the next part of the text of the item with the 0-based index `item`. Text that the gateway inserts has no
    entries. Without a `log`, there are no entries.
    """
    if log is None:
        return []
    return [_entry(log, value, spelled, top) for spelled, value in log.emitted(item, text)]


def to_choice_logprobs(
    content: Sequence[Mapping[str, Any]] | None, refusal: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the `logprobs` of a choice of Chat Completions.

    `content` and `refusal` contain one entry per token of the respective text. None means that the choice has no such
    text.
    """
    return {"content": content, "refusal": refusal}


def _entry(log: LogprobLog, value: TokenLogprob, spelled: bytes, top: int) -> dict[str, Any]:
    alternatives = [_token(log.token_bytes(token), logprob) for token, logprob in value.top[:top]]
    return {**_token(spelled, value.logprob), "top_logprobs": alternatives}


def _token(spelled: bytes, logprob: float) -> dict[str, Any]:
    # A token may contain only some bytes of a character. Clients join the `bytes` of several tokens.
    return {"token": spelled.decode("utf-8", "replace"), "logprob": logprob, "bytes": [*spelled]}
