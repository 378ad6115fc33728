"""Ollama's response lines: text deltas, or the whole answer in the last line, by route.

Both become text with special tokens spelled and the stop token hidden. The last line of the template route
holds ids, but of text that was tokenised again. They carry no more information than the text, in which a typed
marker can still be distinguished from a real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.core.generation import Chunk, FinishReason, Prompt
from unisono.errors import BackendError, BackendProtocolError
from unisono.harmony.encoding import load_encoding
from unisono_adapters._events import count, decoded, text_of, token_ids
from unisono_adapters._failures import FailureTable, IdsMissing, is_error

# Finish reasons; the last two mean that the model was loaded or unloaded without output.
DONE_REASONS: Mapping[str, FinishReason | type[BackendError]] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "load": BackendError,
    "unload": BackendError,
}


class RawFold:
    """Converter from lines to chunks. `done` is set with the chunk that holds the finish.

    `version` is the server's, empty if unknown.
    """

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
        """Return the text of a line. Raises BackendProtocolError if it has no string."""
        return text_of(line.get("response"))

    def _chunk(self, text: str) -> Chunk | None:
        return Chunk(text=text) if text else None

    def _last_chunk(self, text: str) -> Chunk:
        reason = self._last.get("done_reason")
        meaning = DONE_REASONS.get(reason) if isinstance(reason, str) else None
        if meaning is None:
            raise BackendProtocolError("the backend sent an unknown finish reason")
        if not isinstance(meaning, FinishReason):
            raise meaning("the backend loaded or unloaded its model and generated nothing")
        return Chunk(
            text=text,
            finish=meaning,
            prompt_tokens=count(self._last.get("prompt_eval_count")) if self._has_cached_count() else None,
            cached_tokens=count(self._last.get("prompt_eval_cached_count")),
        )

    def _has_cached_count(self) -> bool:
        """Return whether `prompt_eval_count` includes cached tokens.

        It does in all versions except the first releases of 0.30. A version that reports the cached part
        separately counts both.
        """
        if "prompt_eval_cached_count" in self._last:
            return True
        numbers = self._version.split(".")
        return len(numbers) > 1 and numbers[:2] != ["0", "30"]


class TemplateFold(RawFold):
    """Converter for the template route, which yields empty chunks until the last line.

    Earlier lines hold Ollama's own interpretation of the answer and serve only as a sign of life. `prompt` is
    the one that was sent.
    """

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
            raise IdsMissing("the backend's answer has no `context`; its version may be too new for this route")
        return super()._last_chunk(text_after_prompt(self._prompt, token_ids(self._last.get("context"))))


def text_after_prompt(prompt: Prompt, context: list[int]) -> str:
    """Return the text in `context` after the prompt. Raises BackendProtocolError on a mismatch.

    Only texts and control tokens are compared, not every id: the prompt's end may have been tokenised together
    with the following text.
    """
    assert prompt.text is not None, "a text backend was given a prompt without text"
    encoding = load_encoding()
    whole, sent = encoding.decode_bytes(context), prompt.text.encode()
    structure = encoding.special_ids(prompt.tokens)
    if not whole.startswith(sent) or encoding.special_ids(context)[: len(structure)] != structure:
        raise BackendProtocolError("the `context` in the backend's answer does not begin with the prompt that was sent")
    return whole[len(sent) :].decode("utf-8", errors="replace")
