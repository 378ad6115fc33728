"""What Ollama's lines say: deltas of text, or the whole turn in the last line, by the route taken.

Both come out as text with the special tokens spelled and the stop token hidden. What the last line of the template
route holds are ids, but ids of text that was tokenised again: they know no more than the text, and in the text a marker
that the model only typed can still be told from one it meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.core.generation import Chunk, FinishReason, Prompt
from unisono.errors import BackendError, BackendProtocolError
from unisono.harmony.encoding import load_encoding
from unisono_adapters._events import count, decoded, text_of, token_ids
from unisono_adapters._failures import FailureTable, IdsMissing, is_error

DONE_REASONS: Mapping[str, FinishReason | type[BackendError]] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "load": BackendError,
    "unload": BackendError,
}
"""Why a stream is done; the last two say that the model was loaded or dropped and nothing was generated."""


class RawFold:
    """Lines in, chunks out. `done` is set with the chunk that holds the finish. `version` is the server's, empty when
    it is not known."""

    def __init__(self, failures: FailureTable, version: str) -> None:
        self._failures = failures
        self._version = version
        self._last: Mapping[str, Any] = {}
        self.done = False

    def feed(self, events: list[bytes]) -> Chunk | None:
        texts: list[str] = []
        for event in events:
            line = decoded(event)
            if is_error(line):
                raise self._failures.error_object(line)
            texts.append(self._text(line))
            if line.get("done") is True:
                self._last = line
                self.done = True
                return self._last_chunk("".join(texts))
        return self._chunk("".join(texts)) if events else None

    def _text(self, line: dict[str, Any]) -> str:
        """What the line brings. Raises BackendProtocolError."""
        return text_of(line.get("response"))

    def _chunk(self, text: str) -> Chunk | None:
        return Chunk(text=text) if text else None

    def _last_chunk(self, text: str) -> Chunk:
        reason = self._last.get("done_reason")
        meaning = DONE_REASONS.get(reason) if isinstance(reason, str) else None
        if meaning is None:
            raise BackendProtocolError("the backend ended for a reason nobody knows")
        if not isinstance(meaning, FinishReason):
            raise meaning("the backend loaded or dropped its model and generated nothing")
        return Chunk(
            text=text,
            finish=meaning,
            prompt_tokens=count(self._last.get("prompt_eval_count")) if self._counts_all() else None,
            cached_tokens=count(self._last.get("prompt_eval_cached_count")),
        )

    def _counts_all(self) -> bool:
        """Whether `prompt_eval_count` counts what came from the cache too: it does, but for the first releases of
        0.30. One that tells the cached part apart counts both."""
        if "prompt_eval_cached_count" in self._last:
            return True
        numbers = self._version.split(".")
        return len(numbers) > 1 and numbers[:2] != ["0", "30"]


class TemplateFold(RawFold):
    """What the lines before the last bring is Ollama's own reading of the turn, and only a sign of life here: empty
    chunks. `prompt` is what was sent."""

    def __init__(self, failures: FailureTable, version: str, prompt: Prompt) -> None:
        super().__init__(failures, version)
        self._prompt = prompt

    def _text(self, line: dict[str, Any]) -> str:
        text_of(line.get("response"))
        return ""

    def _chunk(self, text: str) -> Chunk | None:
        return Chunk()

    def _last_chunk(self, text: str) -> Chunk:
        if self._last.get("context") is None:
            raise IdsMissing("the backend ended without its context; its version may be too new for this route")
        return super()._last_chunk(behind(self._prompt, token_ids(self._last.get("context"))))


def behind(prompt: Prompt, context: list[int]) -> str:
    """The text in `context` behind the prompt it begins with. Raises BackendProtocolError when it does not.

    Texts and control tokens are compared, not every id: the prompt's end may have been tokenised together with the
    text behind it.
    """
    assert prompt.text is not None, "a text backend was given a prompt without text"
    encoding = load_encoding()
    whole, sent = encoding.decode_bytes(context), prompt.text.encode()
    structure = encoding.special_ids(prompt.tokens)
    if not whole.startswith(sent) or encoding.special_ids(context)[: len(structure)] != structure:
        raise BackendProtocolError("the backend's context does not begin with the ids of the prompt it was sent")
    return whole[len(sent) :].decode("utf-8", errors="replace")
