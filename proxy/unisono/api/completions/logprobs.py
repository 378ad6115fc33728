"""Log probabilities of a choice in the form of OpenAI's legacy Completions API.

Each token of the answer has one entry, special tokens included. If the choice repeats the prompt, each token of the
prompt has an entry too. vLLM has the same form, and evaluation tools depend on it.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Any

from unisono.core.emitted_logprobs import LogprobLog, ScoredToken
from unisono.core.generation import ALL_STOP_TOKENS, FIRST_SPECIAL
from unisono.engine.request import RawPrompt


class LegacyLogprobs:
    """Converter of the log probabilities of one choice, part by part.

    `top` is the number of alternatives for each token. `repeated_prompt` is the text before the answer, or "" if the
    choice does not repeat the prompt.
    """

    def __init__(self, raw: RawPrompt, top: int, repeated_prompt: str) -> None:
        self._raw = raw
        self._top = top
        # Offsets count characters of the text. One character may consist of several tokens.
        self._offset = len(repeated_prompt)
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._count = 0  # tokens of the answer so far
        self._has_started = False

    def next_part(self, log: LogprobLog | None, size: int) -> dict[str, Any]:
        """Return the entries of the tokens that were generated since the last call.

        `size` is the number of tokens of the answer so far. The first part begins with the entries of the prompt's
        tokens, if `log` contains any. If `log` is None, the part is empty.
        """
        part: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if log is None:
            return part
        if not self._has_started:
            self._has_started = True
            before = LegacyLogprobs(RawPrompt(hides_special=False, shows_stop=True), self._top, "")
            before._append(part, log, log.prompt)
        self._append(part, log, log.scored(self._count, size))
        self._count = size
        return part

    def _append(self, part: dict[str, list[Any]], log: LogprobLog, tokens: Iterable[ScoredToken]) -> None:
        for token, value in tokens:
            spelled = log.token_bytes(token)
            part["tokens"].append(_text(spelled))
            part["token_logprobs"].append(None if value is None else value.logprob)
            part["top_logprobs"].append(
                None if value is None else _ranked(log, [*value.top[: self._top], (token, value.logprob)])
            )
            part["text_offset"].append(self._offset)
            self._offset += self._length(token, spelled)

    def _length(self, token: int, spelled: bytes) -> int:
        """Return the number of characters that a token, with the bytes `spelled`, adds to the text."""
        if token < FIRST_SPECIAL:
            return len(self._decoder.decode(spelled))
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        is_stop = token in self._raw.stop_tokens | ALL_STOP_TOKENS
        is_hidden = self._raw.hides_special or (is_stop and not self._raw.shows_stop)
        return len(rest) + (0 if is_hidden else len(spelled))


def _ranked(log: LogprobLog, alternatives: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Return the log probabilities of alternatives by their text.

    If several alternatives have the same text, only the most likely of them is returned.
    """
    ranked: dict[str, float] = {}
    for token, value in alternatives:
        ranked.setdefault(_text(log.token_bytes(token)), value)
    return ranked


def _text(spelled: bytes) -> str:
    # A token may be a part of a character.
    return spelled.decode("utf-8", "replace")
