"""Conversion of Ollama's response lines to chunks of text.

On the raw route, each line holds the next piece of text. On the template route, the last line holds the whole answer
as token ids (`context`). On both routes the chunks contain text in which special tokens are spelled out, without the
stop token. The ids of the template route are decoded to text, because Ollama made them by tokenising its own text
again. They carry no more information than that text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.core.generation import Chunk, FinishReason, Prompt
from unisono.errors import BackendError, BackendProtocolError
from unisono.harmony.encoding import load_encoding
from unisono_adapters._events import count, decoded, text_of, token_ids
from unisono_adapters._failures import FailureTable, IdsMissing, is_error

# Ollama's finish reasons. "load" and "unload" mean that Ollama only loaded or unloaded the model, without output.
DONE_REASONS: Mapping[str, FinishReason | type[BackendError]] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "load": BackendError,
    "unload": BackendError,
}


class RawFold:
    """Converter from response lines to chunks, for the raw route.

    `done` becomes True when `feed` returns the last chunk, which has the finish reason. `version` is the version of
    the Ollama server; an empty string means that it is unknown.
    """

    def __init__(self, failures: FailureTable, version: str) -> None:
        self._failures = failures
        self._version = version
        self._last: Mapping[str, Any] = {}
        self._has_output = False
        self.done = False

    def feed(self, events: list[bytes]) -> Chunk | None:
        texts: list[str] = []
        for event in events:
            line = decoded(event)
            if is_error(line):
                raise self._failures.error_object(line, has_output=self._has_output)
            self._has_output = True
            texts.append(self._text(line))
            if line.get("done") is True:
                self._last = line
                self.done = True
                return self._last_chunk("".join(texts))
        return self._chunk("".join(texts)) if events else None

    def _text(self, line: dict[str, Any]) -> str:
        """Return the text of a line. Raises BackendProtocolError if `response` is not a string."""
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
            prompt_tokens=count(self._last.get("prompt_eval_count")) if self._includes_cached() else None,
            cached_tokens=count(self._last.get("prompt_eval_cached_count")),
        )

    def _includes_cached(self) -> bool:
        """Return whether `prompt_eval_count` includes prompt tokens read from the cache.

        In early releases of 0.30, `prompt_eval_count` leaves out the cached tokens. Later releases report the
        cached tokens in a field of their own, `prompt_eval_cached_count`, and include them in `prompt_eval_count`
        as well. Releases before 0.30 always include them.
        """
        if "prompt_eval_cached_count" in self._last:
            return True
        numbers = self._version.split(".")
        return len(numbers) > 1 and numbers[:2] != ["0", "30"]


class TemplateFold(RawFold):
    """Converter for the template route, which yields all text in the last chunk.

    The lines before the last one hold Ollama's own interpretation of the answer, which is ignored. Their empty
    chunks only show that the backend is alive. `prompt` is the prompt that was sent.
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
            raise IdsMissing(
                "the last line of the backend's answer has no `context`; this version of Ollama may be too new for "
                "`route: template`"
            )
        return super()._last_chunk(text_after_prompt(self._prompt, token_ids(self._last.get("context"))))


def text_after_prompt(prompt: Prompt, context: list[int]) -> str:
    """Return the text that follows the prompt in `context`.

    `context` holds the token ids of the prompt and the answer. Raises BackendProtocolError if `context` does not begin
    with the prompt. The comparison covers the text and the control tokens, but not every id: Ollama may have tokenised
    the end of the prompt together with the beginning of the answer.
    """
    assert prompt.text is not None, "a text backend was given a prompt without text"
    encoding = load_encoding()
    whole, sent = encoding.decode_bytes(context), prompt.text.encode()
    structure = encoding.special_ids(prompt.tokens)
    if not whole.startswith(sent) or encoding.special_ids(context)[: len(structure)] != structure:
        raise BackendProtocolError("the `context` in the backend's answer does not begin with the prompt that was sent")
    return whole[len(sent) :].decode("utf-8", errors="replace")
