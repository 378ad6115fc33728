"""A backend that plays recordings: token streams of a real model, for tests, demos and bug reports.

A recording is a JSON file, or JSON lines with one turn per line:

    {"source": "where it comes from", "licence": "SPDX name",
     "turns": [{"last": "Hello", "tokens": [200005, 35644, ...], "finish": "stop"}]}

The first turn that fits the prompt is played. `last` fits when it is the text of the last message that is not the
assistant's (the user's, or a tool's result); `ends` when the prompt ends in that text, markers spelled out; a turn with
neither fits always, so it goes last. `text` may stand for `tokens`, markers spelled out. `finish` is "stop" (as when
it is left out) or "length". A prompt that already holds the beginning of the recorded answer gets the rest of it, so a
broken stream can be continued here; one that went another way than the recording is refused.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson

from unisono.core.conversation import Tokens
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

PACKAGED = ("demo",)
"""Recordings that come with the package, by name."""

_TERMINATORS = (END, CALL, RETURN)


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """`last` and `ends` are ids; None fits every prompt."""

    tokens: Tokens
    finish: FinishReason
    last: Tokens | None = None
    ends: Tokens | None = None


class ReplayBackend:
    """`model` names a packaged recording or a file. `extra`: `recording` (a file, in place of `model`), `chunk` (tokens
    per chunk, 1), `interval_s` (seconds before each chunk, 0), `context` (tokens, what it claims)."""

    def __init__(self, options: BackendOptions) -> None:
        """Raises ConfigError."""
        extra = options.extra
        self._name = str(extra.get("recording") or options.model)
        self._chunk = _number(extra.get("chunk", 1), "chunk", int, 1)
        self._interval_s = _number(extra.get("interval_s", 0.0), "interval_s", (int, float), 0)
        self._context = _number(extra.get("context", 131072), "context", int, 1)
        self._turns: Sequence[RecordedTurn] | None = None
        self._playing = 0

    async def probe(self) -> Probe:
        """Reads the recording."""
        await self._load()
        able = Capabilities(prompt=OutputForm.IDS, output=OutputForm.IDS, stop_visible=True, context=int(self._context))
        # A recording was made once and for all; there is nothing to examine but that it can be read.
        return Probe(able, (Finding(Check.MODEL, ok=True),))

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        if job.constraint is not None:
            raise refused_kind(job.constraint)
        try:
            async with asyncio.timeout(min(job.timeouts.first_token_s, job.timeouts.total_s)):
                turns = await self._load()
        except TimeoutError as error:
            raise BackendTimeout("reading the recording took too long") from error
        prompt = tuple(job.prompt.tokens)
        tokens, finish = _answer(turns, prompt)
        if len(tokens) > job.max_tokens or (len(tokens) == job.max_tokens and finish is FinishReason.LENGTH):
            tokens, finish = tokens[: job.max_tokens], FinishReason.LENGTH
        step = int(self._chunk)
        deadline = asyncio.get_running_loop().time() + job.timeouts.total_s
        self._playing += 1
        try:
            for start in range(0, max(len(tokens), 1), step):
                await self._pace(job, first=start == 0, deadline=deadline)
                piece = tokens[start : start + step]
                if start + step < len(tokens):
                    yield Chunk(tokens=piece)
                else:
                    yield Chunk(tokens=piece, finish=finish, prompt_tokens=len(prompt))
        finally:
            self._playing -= 1

    async def load(self) -> Load | None:
        """What is being played; nothing ever waits."""
        return Load(self._playing, 0)

    async def aclose(self) -> None:
        """Nothing is held open."""

    async def _pace(self, job: CompletionJob, *, first: bool, deadline: float) -> None:
        """Wait as the recording is to be played, but no longer than a backend may."""
        patience = job.timeouts.first_token_s if first else job.timeouts.silence_s
        left = deadline - asyncio.get_running_loop().time()
        await asyncio.sleep(min(self._interval_s, patience, max(left, 0)))
        if self._interval_s > patience or self._interval_s > left:
            raise BackendTimeout("the recording is played more slowly than this request allows")

    async def _load(self) -> Sequence[RecordedTurn]:
        if self._turns is None:
            try:
                # A thread, since the encoding takes half a second to load.
                self._turns = await asyncio.to_thread(_read, self._name)
            except (OSError, ValueError, KeyError, TypeError, VocabularyError) as error:
                raise BackendUnavailable("the recording cannot be read") from error
        return self._turns


def _answer(turns: Sequence[RecordedTurn], prompt: Tokens) -> tuple[Tokens, FinishReason]:
    """What is to be played after `prompt`."""
    last, begun = _split(prompt)
    refused = False
    for turn in turns:
        if turn.ends is not None:
            if prompt[len(prompt) - len(turn.ends) :] == turn.ends:
                return turn.tokens, turn.finish
        elif turn.last is None or turn.last == last:
            if turn.tokens[: len(begun)] == begun:
                return turn.tokens[len(begun) :], turn.finish
            refused = True
    raise BackendError(
        "the recording went another way than this prompt" if refused else "the recording has no answer to this prompt"
    )


def _split(prompt: Tokens) -> tuple[Tokens, Tokens]:
    """A prompt's last message that is not the assistant's, and what the assistant has begun after it. Both are empty
    for a prompt that is no Harmony conversation."""
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
    """The turns of a packaged recording or a file. Raises OSError, ValueError, KeyError, TypeError."""
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
        raise ValueError("tokens are ids of the vocabulary")
    return RecordedTurn(
        tokens=tuple(tokens),
        finish=FinishReason(turn.get("finish", "stop")),
        last=tuple(encoding.encode_text(turn["last"])) if "last" in turn else None,
        ends=tuple(encoding.encode_marked(turn["ends"])) if "ends" in turn else None,
    )


def _number(value: Any, key: str, kind: Any, least: int) -> float:
    if isinstance(value, bool) or not isinstance(value, kind) or value < least:
        raise ConfigError(f"litellm_params.{key}: must be a number, {least} or more")
    return float(value)
