"""Backend that plays recorded token streams of a real model, for tests, demos and reports.

A recording is a JSON file, or JSON lines with one turn per line:

    {"source": "where it comes from", "licence": "SPDX name",
     "turns": [{"last": "Hello", "tokens": [200005, 35644, ...], "finish": "stop"}]}

The backend plays the first turn that matches the prompt. A turn with `last` matches if the last message that is not
from the assistant (a user message or a tool result) has this text. A turn with `ends` matches if the prompt ends
with this text, in which markers such as `<|start|>` are spelled out. A turn that has neither field matches every
prompt, so it must be the last turn. A turn may have `text`, with markers spelled out, instead of `tokens`. `finish`
is "stop" (the default) or "length".

If the prompt already contains the beginning of the recorded answer, the backend plays the rest of the answer. So it can
continue a stream that was interrupted elsewhere. A prompt is refused if it contains the beginning of an answer that
differs from the recorded answer.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson

from unisono.core.conversation import Tokens
from unisono.core.error_texts import seconds
from unisono.core.frozen import dataclass
from unisono.core.generation import (
    CALL,
    END,
    MESSAGE,
    RETURN,
    START,
    VOCABULARY,
    Capabilities,
    Chunk,
    CompletionJob,
    FinishReason,
    Load,
    OutputForm,
)
from unisono.core.ports import BackendOptions
from unisono.core.probe import Check, Finding, Probe
from unisono.errors import BackendError, BackendTimeout, BackendUnavailable, ConfigError
from unisono.harmony.encoding import VocabularyError, load_encoding
from unisono_adapters._constraints import refused_kind

# Packaged recordings by name.
PACKAGED = ("demo",)

_TERMINATORS = (END, CALL, RETURN)


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """Turn of a recording.

    The fields are those of the file, as token ids: `last` is the text of the last message before the answer, and `ends`
    the end of the prompt. If both are None, the turn matches every prompt.
    """

    tokens: Tokens
    finish: FinishReason
    last: Tokens | None = None
    ends: Tokens | None = None


class ReplayBackend:
    """Backend that plays a recording; `model` is the name of a packaged recording, or a file.

    `extra` may contain `recording` (a file to play instead of `model`), `chunk` (tokens per chunk, default 1),
    `interval_s` (seconds to wait before each chunk, default 0) and `context` (the context window to report, in
    tokens, default 131,072).
    """

    def __init__(self, options: BackendOptions) -> None:
        """Raise ConfigError for invalid options."""
        extra = options.extra
        self._name = str(extra.get("recording") or options.model)
        self._chunk = _number(extra.get("chunk", 1), "chunk", int, 1)
        self._interval_s = _number(extra.get("interval_s", 0.0), "interval_s", (int, float), 0)
        self._context = _number(extra.get("context", 131072), "context", int, 1)
        self._recorded_steps: Sequence[RecordedTurn] | None = None
        self._active = 0

    async def probe(self) -> Probe:
        """Read the recording, which proves that it is readable."""
        await self._load()
        able = Capabilities(prompt=OutputForm.IDS, output=OutputForm.IDS, stop_visible=True, context=int(self._context))
        # A recording never changes, so only its readability is checked.
        return Probe(able, (Finding(Check.MODEL, ok=True),))

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        if job.constraint is not None:
            raise refused_kind(job.constraint)
        try:
            limit_s = min(job.timeouts.first_token_s, job.timeouts.total_s)
            async with asyncio.timeout(limit_s):
                turns = await self._load()
        except TimeoutError as error:
            raise BackendTimeout(
                f"the recording was not read within {seconds(limit_s)}; use a smaller recording"
            ) from error
        prompt = tuple(job.prompt.tokens)
        tokens, finish = _answer(turns, prompt)
        if len(tokens) > job.max_tokens or (len(tokens) == job.max_tokens and finish is FinishReason.LENGTH):
            tokens, finish = tokens[: job.max_tokens], FinishReason.LENGTH
        step = int(self._chunk)
        deadline = asyncio.get_running_loop().time() + job.timeouts.total_s
        self._active += 1
        try:
            for start in range(0, max(len(tokens), 1), step):
                await self._pace(job, first=start == 0, deadline=deadline)
                piece = tokens[start : start + step]
                if start + step < len(tokens):
                    yield Chunk(tokens=piece)
                else:
                    yield Chunk(tokens=piece, finish=finish, prompt_tokens=len(prompt))
        finally:
            self._active -= 1

    async def load(self) -> Load | None:
        """Return the number of requests that are being answered; no request ever waits."""
        return Load(self._active, 0)

    async def aclose(self) -> None:
        """Do nothing: the backend holds no resources."""

    async def _pace(self, job: CompletionJob, *, first: bool, deadline: float) -> None:
        """Wait `interval_s` seconds before the next chunk.

        Raises BackendTimeout when a time limit of the job expires first.
        """
        patience = job.timeouts.first_token_s if first else job.timeouts.silence_s
        remaining_s = deadline - asyncio.get_running_loop().time()
        await asyncio.sleep(min(self._interval_s, patience, max(remaining_s, 0)))
        if self._interval_s > patience or self._interval_s > remaining_s:
            raise BackendTimeout("the recording plays too slowly for the request's time limits; lower `interval_s`")

    async def _load(self) -> Sequence[RecordedTurn]:
        if self._recorded_steps is None:
            try:
                # In a thread, since loading the encoding takes half a second.
                self._recorded_steps = await asyncio.to_thread(_read, self._name)
            except (OSError, ValueError, KeyError, TypeError, VocabularyError) as error:
                raise BackendUnavailable("the recording cannot be read") from error
        return self._recorded_steps


def _answer(turns: Sequence[RecordedTurn], prompt: Tokens) -> tuple[Tokens, FinishReason]:
    """Return the recorded tokens that continue `prompt`, and the finish reason.

    Raises BackendError if no turn matches `prompt`.
    """
    last, beginning = _split(prompt)
    refused = False
    for turn in turns:
        if turn.ends is not None:
            if prompt[len(prompt) - len(turn.ends) :] == turn.ends:
                return turn.tokens, turn.finish
        elif turn.last is None or turn.last == last:
            if turn.tokens[: len(beginning)] == beginning:
                return turn.tokens[len(beginning) :], turn.finish
            refused = True
    raise BackendError(
        "the recorded answer differs from the beginning of the answer in this prompt"
        if refused
        else "the recording has no answer to this prompt"
    )


def _split(prompt: Tokens) -> tuple[Tokens, Tokens]:
    """Return the body of the last non-assistant message, and the assistant's tokens after it.

    Both are empty if the prompt is not a Harmony conversation.
    """
    assistant = _assistant()
    starts = [i for i, token in enumerate(prompt) if token == START]
    begun_at = len(prompt)
    for start in reversed(starts):
        if prompt[start + 1 : start + 2] == assistant:
            begun_at = start + 2
            continue
        end = next((i for i in range(start, len(prompt)) if prompt[i] in _TERMINATORS), len(prompt))
        body = next((i + 1 for i in range(start, end) if prompt[i] == MESSAGE), end)
        return prompt[body:end], prompt[begun_at:]
    return (), ()


@functools.cache
def _assistant() -> Tokens:
    return tuple(load_encoding().encode_text("assistant"))


def _read(name: str) -> Sequence[RecordedTurn]:
    """Read the turns of a packaged recording or a file.

    Raises OSError if the file cannot be read. Raises ValueError, KeyError or TypeError if its content is not a
    recording.
    """
    if name in PACKAGED:
        content = files("unisono_adapters").joinpath(f"recordings/{name}.json").read_bytes()
    else:
        content = Path(name).expanduser().read_bytes()
    if name.endswith(".jsonl"):
        turns = [line for line in map(orjson.loads, content.splitlines()) if "tokens" in line or "text" in line]
    else:
        turns = orjson.loads(content)["turns"]
    return tuple(_turn(turn) for turn in turns)


def _turn(turn: dict[str, Any]) -> RecordedTurn:
    encoding = load_encoding()
    tokens = turn["tokens"] if "tokens" in turn else encoding.encode_marked(turn["text"])
    if not all(type(token) is int and 0 <= token < VOCABULARY for token in tokens):
        raise ValueError("tokens must be ids of the vocabulary")
    return RecordedTurn(
        tokens=tuple(tokens),
        finish=FinishReason(turn.get("finish", "stop")),
        last=tuple(encoding.encode_text(turn["last"])) if "last" in turn else None,
        ends=tuple(encoding.encode_marked(turn["ends"])) if "ends" in turn else None,
    )


def _number(value: Any, key: str, kind: Any, least: int) -> float:
    if isinstance(value, bool) or not isinstance(value, kind) or value < least:
        raise ConfigError(f"litellm_params.{key}: must be a number of at least {least}")
    return float(value)
