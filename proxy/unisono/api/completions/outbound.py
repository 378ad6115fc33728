"""Conversion of engine events to completions, streamed and whole.

Both forms have the same content. The token ids of a choice are those in the journal of its generation, which never
contains tokens whose text is not emitted yet. Each token of the answer has one log probability, special tokens
included. If the choice repeats the prompt, each token of the prompt has one too. vLLM has the same form, and evaluation
tools depend on it.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import orjson

from unisono.api.answer_report import to_about
from unisono.api.answer_types import ABSENT, About, AnswerModel, CompletionObject, Count, TokenUsageObject
from unisono.api.collected_answer import CollectedAnswer
from unisono.api.sse import DONE, error_event, event
from unisono.core.emitted_logprobs import LogprobLog, ScoredToken
from unisono.core.events import Delta, Event, Finished
from unisono.core.frozen import dataclass
from unisono.core.generation import ALL_STOP_TOKENS, ENDOFTEXT, FIRST_SPECIAL, STOP_TOKENS, Usage
from unisono.engine.request import GenerationReport, RawPrompt
from unisono.errors import UnisonoError


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


# Models of the answers of the Completions API.


class CompletionLogprobs(AnswerModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class CompletionDelta(AnswerModel):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | Count | None = None
    token_ids: list[Count] = ABSENT
    prompt_token_ids: list[Count] | None = None


class CompletionChoice(CompletionDelta):
    finish_reason: Literal["stop", "length"]
    stop_reason: str | Count | None


class CompletionUsage(TokenUsageObject):
    """Token usage of all choices."""


class Completion(CompletionObject):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: CompletionUsage
    unisono: About


class CompletionChunk(CompletionObject):
    object: Literal["text_completion"]
    choices: list[CompletionDelta]
    usage: CompletionUsage | None = None
    unisono: About = ABSENT


STOPS = frozenset({*STOP_TOKENS, ENDOFTEXT})


@dataclass(frozen=True, slots=True)
class CompletionFrame:
    """Fields common to all chunks of an answer, and output options.

    `prompts` and `texts` have one entry per choice: the prompt, and its text if the choice repeats the prompt, else "".
    """

    id: str
    created: int
    model: str
    prompts: Sequence[RawPrompt]
    texts: Sequence[str]
    per_prompt: int = 1
    has_token_ids: bool = False
    fingerprint: str | None = None
    notes: tuple[str, ...] = ()
    include_usage: bool = False
    # Number of alternatives for the log probability of each token; None for no log probabilities.
    logprobs: int | None = None

    @property
    def head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def prompt_text(self, index: int, report: GenerationReport) -> str:
        """Return the prompt (after changes by hooks) that a choice repeats; "" if there is none."""
        replaced = report.facts.replaced_prompt
        return replaced if replaced is not None and self.texts[index] else self.texts[index]

    def logprobs_of(self, index: int, report: GenerationReport) -> LegacyLogprobs | None:
        """Return the log probabilities of a choice; None if they were not requested."""
        if self.logprobs is None:
            return None
        return LegacyLogprobs(self.prompts[index], self.logprobs, self.prompt_text(index, report))

    def choice(
        self, index: int, text: str, tokens: Sequence[int], report: GenerationReport, *, first: bool
    ) -> dict[str, Any]:
        """Return the fields of a choice, with its next text and tokens.

        If `first` is True, these are the first fields of the choice, and include the prompt if the client requested it.
        The tokens of a text are omitted if a hook has changed the text.
        """
        if first:
            text = self.prompt_text(index, report) + text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if self.has_token_ids:
            choice["token_ids"] = None if report.facts.is_masked else list(tokens)
            if first:
                is_replaced = report.facts.replaced_prompt is not None
                choice["prompt_token_ids"] = None if is_replaced else list(self.prompts[index].tokens) or None
        return choice

    def ended(self, index: int, finished: Finished, report: GenerationReport) -> dict[str, Any]:
        """Return the finish fields. `stop_reason` is the matched stop string or stop token id."""
        last = report.journal[-1] if report.journal else None
        by_token = last in STOPS | self.prompts[index].stop_tokens
        stop = finished.stop_sequence if finished.stop_sequence is not None else (last if by_token else None)
        return {"finish_reason": finished.reason.value, "stop_reason": stop if finished.reason == "stop" else None}

    def usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Return the usage of all choices together.

        A prompt that several choices share is counted once.
        """
        prompts = [usages[at : at + self.per_prompt] for at in range(0, len(usages), self.per_prompt)]
        sent = sum(max(usage.prompt_tokens for usage in of_one) for of_one in prompts)
        completion_tokens = sum(usage.completion_tokens for usage in usages)
        cached = sum(max(usage.cached_tokens for usage in of_one) for of_one in prompts)
        return {
            "prompt_tokens": sent,
            "completion_tokens": completion_tokens,
            "total_tokens": sent + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def to_completion(
    results: Sequence[CollectedAnswer], reports: Sequence[GenerationReport], frame: CompletionFrame
) -> dict[str, Any]:
    """Return the whole answer, with one choice per result."""
    choices = []
    for index, (result, report) in enumerate(zip(results, reports, strict=True)):
        text = "".join(closed.text for closed in result.items)
        choice = frame.choice(index, text, report.journal, report, first=True)
        if (logprobs := frame.logprobs_of(index, report)) is not None and not report.facts.is_masked:
            choice["logprobs"] = logprobs.next_part(report.facts.logprobs, len(report.journal))
        choices.append(choice | frame.ended(index, result.finished, report))
    usage = frame.usage([result.finished.usage for result in results])
    return {**frame.head, "choices": choices, "usage": usage, "unisono": to_about(reports, frame.notes)}


class CompletionStreamChunks:
    """Converter from the batches of all choices to the bytes of one stream.

    The last JSON chunk contains the `unisono` object.
    """

    def __init__(self, frame: CompletionFrame, reports: Sequence[GenerationReport]) -> None:
        self._frame = frame
        self._reports = reports
        # Number of emitted tokens of each choice.
        self._emitted = [0] * len(reports)
        self._logprobs: list[LegacyLogprobs | None] = [None] * len(reports)
        self._has_started = [False] * len(reports)
        self._finished: dict[int, Finished] = {}

    def write(self, index: int, batch: Sequence[Event]) -> bytes:
        """Return the chunks of one batch of choice `index`.

        The batch that ends the last choice ends the stream.
        """
        frame, report = self._frame, self._reports[index]
        text = "".join(entry.text for entry in batch if isinstance(entry, Delta))
        first, self._has_started[index] = not self._has_started[index], True
        if first:
            self._logprobs[index] = frame.logprobs_of(index, report)
        tokens = report.journal[self._emitted[index] :]
        self._emitted[index] += len(tokens)
        choice = frame.choice(index, text, tokens, report, first=first)
        if (logprobs := self._logprobs[index]) is not None and not report.facts.is_masked:
            choice["logprobs"] = logprobs.next_part(report.facts.logprobs, self._emitted[index])
        if not batch or not isinstance(last := batch[-1], Finished):
            return self._chunk([choice]) if choice["text"] else b""
        self._finished[index] = last
        choice |= frame.ended(index, last, report)
        if len(self._finished) < len(self._reports):
            return self._chunk([choice])
        if not frame.include_usage:
            return self._chunk([choice], **self._about()) + DONE
        usages = [self._finished[at].usage for at in range(len(self._reports))]
        return self._chunk([choice]) + self._usage_chunk(usages) + DONE

    def broken(self, error: UnisonoError) -> bytes:
        """Return the last events of a failed stream: the usage so far, if requested, and the error."""
        if not self._frame.include_usage:
            return error_event(error, self._about())
        return self._usage_chunk([report.facts.usage for report in self._reports]) + error_event(error)

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self._frame.include_usage else {}
        return event(orjson.dumps({**self._frame.head, "choices": choices, **usage, **more}))

    def _usage_chunk(self, usages: Sequence[Usage]) -> bytes:
        """Return the chunk with the usage of all choices."""
        return self._chunk([], usage=self._frame.usage(usages), **self._about())

    def _about(self) -> dict[str, Any]:
        return {"unisono": to_about(self._reports, self._frame.notes)}
