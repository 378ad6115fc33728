"""Continuation inside a message for a server that drops the first space of its output.

Inside a message the next token usually begins with a space, and a text stream does not show a dropped one. A
non-streamed answer of mlx_lm.server contains the id and probability of every token. So the first few tokens are
requested in one piece. The rest is streamed from a position where the next token is nearly certain, so that its
leading space is known.

No prompt that crashes the server is sent (`_poison_prompts`): the stream begins before the last of those tokens
and not after it. If the job's own prompt is such a prompt, its last token is generated again until it is the
same. The first piece is short, because the server generates all of it even if the reader has left. Measured on
mlx-lm 0.32.2.
"""

from __future__ import annotations

import asyncio
import re
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from math import exp
from typing import Any, TypeAlias

from unisono.core.frozen import dataclass
from unisono.core.generation import (
    ENDOFTEXT,
    FIRST_SPECIAL,
    START,
    STOP_TOKENS,
    Chunk,
    CompletionJob,
    FinishReason,
    OutputForm,
    Prompt,
    Sampling,
)
from unisono.errors import CannotGoOn
from unisono.harmony.encoding import Encoding, load_encoding
from unisono_adapters._completions import CompletionFold, complete
from unisono_adapters._events import decoded, generate, token_ids
from unisono_adapters._failures import FailureTable
from unisono_adapters._framing import Framing, LineCutter
from unisono_adapters._http import BackendHttp
from unisono_adapters._poison_prompts import PoisonPrompt

# Tokens requested in one piece: enough for a certain one, and a short wait for a client.
PROBE_TOKENS = 16
# Minimum probability of a token that is certain to be generated again.
MIN_CERTAIN_PROBABILITY = 0.999
UNBEARABLE = "This backend cannot continue this prompt now: the same prompt is in its cache, which would crash it."
# Maximum number of attempts to regenerate a prompt's last tokens identically.
TRIES = 4

# Non-streamed answers of the server are JSON on one line.
_DOCUMENT = Framing("application/json", LineCutter)
# A server may report the end of its tokenizer's text instead of a Harmony stop token.
_ENDS = (*STOP_TOKENS, ENDOFTEXT)
_LOOKS_SPECIAL = re.compile(r"<\|[a-z_0-9]+\|>")
_MAX_MARKER_LENGTH = 40
_MAX_CHARACTER_TOKENS = 4
# Part of an answer's text that is independent of how it was assembled. A server may remove text that it takes for a
# marker, and replaces invalid bytes.
_COMPARED = re.compile(r"[^<\ufffd]*")

# Request body for a generation: in one piece with ids, or as a stream.
Body: TypeAlias = Callable[[CompletionJob, bool], bytes]


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    probability: float


@dataclass(frozen=True, slots=True)
class FirstPiece:
    """Result of the first piece: emitted ids and text, then an end or the expected continuation."""

    ids: Sequence[int] = ()
    text: str = ""
    finish: FinishReason | None = None
    stop_token: int | None = None
    expected: str = ""


def is_inside(prompt: Prompt) -> bool:
    """Return whether the prompt ends inside a message's header or body.

    The role alone, after which every answer begins, does not count.
    """
    tokens = prompt.tokens
    return len(tokens) > 1 and tokens[-1] < FIRST_SPECIAL and tokens[-2] != START


async def complete_text(
    wire: BackendHttp, job: CompletionJob, body: Body, written: PoisonPrompt
) -> AsyncGenerator[Chunk]:
    """Yield the answer to `job` as text, with the counts of its own prompt.

    Raises the `BackendError` family.
    """
    now = asyncio.get_running_loop().time
    began = now()
    encoding = load_encoding()
    piece, tokens = await _first(wire, job, body, written, encoding)
    first = read(encoding, job, piece, tokens, written)
    if first.finish is not None:
        yield replace(piece, text=first.text, finish=first.finish, stop_token=first.stop_token)
        return
    if first.text:
        yield Chunk(text=first.text)
    rest = _rest_of(job, first, now() - began)
    awaited = True
    written.record(rest.prompt)
    async with aclosing(complete(wire, body(rest, False), rest, OutputForm.TEXT)) as stream:
        async for chunk in stream:
            if awaited and chunk.text:
                awaited = False
                chunk = replace(chunk, text=with_space(chunk.text, first.expected))
            if chunk.finish is not None:
                chunk = replace(chunk, prompt_tokens=piece.prompt_tokens, cached_tokens=piece.cached_tokens)
            yield chunk


async def _first(
    wire: BackendHttp, job: CompletionJob, body: Body, written: PoisonPrompt, encoding: Encoding
) -> tuple[Chunk, Sequence[Token]]:
    """Generate the first tokens of `job` without streaming; return the chunk and its tokens.

    `written` holds the prompts that would crash the server. If the prompt is one of them, its last tokens are generated
    again. The tokens are empty if the server does not report them. Raises CannotGoOn if the server does not repeat the
    prompt's last tokens.
    """
    prompt, again = split_poison(encoding, job.prompt, written)
    for number in range(TRIES if again else 1):
        few = replace(
            job,
            prompt=prompt,
            max_tokens=len(again) + min(PROBE_TOKENS, job.max_tokens),
            sampling=_with_next_seed(job.sampling, number),
        )
        fold = _DocumentFold(wire.failures)
        written.record(prompt)
        async with aclosing(generate(wire, "v1/completions", body(few, True), few, fold, _DOCUMENT)) as answer:
            [piece] = [chunk async for chunk in answer]
        tokens = fold.tokens or []
        ids = [token.id for token in tokens]
        accounted = _account_for(piece.text, encoding.decode(ids))
        if accounted and piece.finish is FinishReason.LENGTH:
            written.add(f"{prompt.text}{encoding.decode(ids)}")
        if not again:
            return piece, tokens if accounted else []
        if accounted and ids[: len(again)] == again and len(ids) > len(again):
            read_by_it = piece.prompt_tokens
            total = None if read_by_it is None else read_by_it + len(again)
            return replace(piece, prompt_tokens=total), tokens[len(again) :]
    raise CannotGoOn(UNBEARABLE)


def split_poison(encoding: Encoding, prompt: Prompt, written: PoisonPrompt) -> tuple[Prompt, list[int]]:
    """Return the prompt without the last tokens that would crash the server, and these tokens.

    Raises CannotGoOn if it cannot be shortened.
    """
    assert prompt.text is not None, "a text backend was given a prompt without text"
    tokens, text = list(prompt.tokens), prompt.text
    again: list[int] = []
    while text in written:
        spelled = "\ufffd"
        for _ in range(_MAX_CHARACTER_TOKENS):
            again.insert(0, tokens.pop())
            spelled = encoding.decode(again)
            if "\ufffd" not in spelled:
                break
        if not prompt.text.endswith(spelled) or not text or len(again) > PROBE_TOKENS:
            raise CannotGoOn(UNBEARABLE)
        text = prompt.text.removesuffix(spelled)
    return Prompt(tokens, text), again


def read(
    encoding: Encoding, job: CompletionJob, piece: Chunk, tokens: Sequence[Token], written: PoisonPrompt
) -> FirstPiece:
    """Return the result of the first piece.

    Without token data nothing is emitted, and the rest is an ordinary stream.
    """
    ids = [token.id for token in tokens]
    if not tokens:
        return FirstPiece()
    if piece.finish is FinishReason.STOP:
        stop = ids[-1] if ids[-1] in _ENDS else None
        return FirstPiece(ids[:-1], encoding.decode(ids[:-1]), FinishReason.STOP, stop)
    if len(ids) >= job.max_tokens:
        return FirstPiece(ids, encoding.decode(ids), FinishReason.LENGTH)
    assert job.prompt.text is not None, "a text backend was given a prompt without text"
    before = job.prompt.text
    places = [p for p in cut_positions(encoding, before, ids[:-1]) if before + encoding.decode(ids[:p]) not in written]
    if not places:
        raise CannotGoOn(UNBEARABLE)
    # The last certain position, else the most probable one.
    place = max(places, key=lambda place: (min(tokens[place].probability, MIN_CERTAIN_PROBABILITY), place))
    ids_before = ids[:place]
    return FirstPiece(ids_before, encoding.decode(ids_before), expected=encoding.decode([ids[place]]))


def cut_positions(encoding: Encoding, before: str, ids: Sequence[int]) -> list[int]:
    """Return the numbers of `ids` after which a text prompt can end, following `before`.

    A prompt cannot end inside a character, or after a typed marker, which the server would parse as a real one.
    """
    decoder = getincrementaldecoder("utf-8")("replace")
    tail = before[-_MAX_MARKER_LENGTH:].rpartition("|>")[2]
    places = [0]
    for at, token in enumerate(ids):
        if token >= FIRST_SPECIAL:
            decoder.reset()
            tail = ""
        else:
            tail = tail[-_MAX_MARKER_LENGTH:] + decoder.decode(encoding.decode_bytes([token]))
            if any(marker in encoding.special_names for marker in _LOOKS_SPECIAL.findall(tail)):
                break
        if not decoder.getstate()[0]:
            places.append(at + 1)
    return places


def with_space(text: str, expected: str) -> str:
    """Return the first text of a stream with the dropped space restored.

    If `expected` begins with a space, the space is restored in two cases: the text agrees with the rest of `expected`,
    as far as both go, or it begins with a letter or a digit, as another word.
    """
    if not expected.startswith(" "):
        return text
    word = expected[1:].rstrip("\ufffd")
    if text.startswith(word) or word.startswith(text) or text[0].isalnum():
        return " " + text
    return text


def _account_for(text: str, spelled: str) -> bool:
    compared = _COMPARED.match(text.removeprefix(" "))
    assert compared is not None
    return spelled.removeprefix(" ").startswith(compared[0])


def _rest_of(job: CompletionJob, first: FirstPiece, spent_s: float) -> CompletionJob:
    """Return the job that continues after `first`, with `spent_s` seconds less time."""
    assert job.prompt.text is not None, "a text backend was given a prompt without text"
    return replace(
        job,
        prompt=Prompt([*job.prompt.tokens, *first.ids], job.prompt.text + first.text),
        max_tokens=job.max_tokens - len(first.ids),
        sampling=_with_next_seed(job.sampling, len(first.ids)),
        timeouts=replace(job.timeouts, total_s=job.timeouts.total_s - spent_s),
    )


def _with_next_seed(sampling: Sampling, number: int) -> Sampling:
    """Return the options with a new seed, since the same seed would repeat the random numbers."""
    if sampling.seed is None or not number:
        return sampling
    return replace(sampling, seed=(sampling.seed + number) % 2**63)


class _DocumentFold:
    """Converter of a non-streamed answer, which is one JSON document, to one chunk.

    `tokens` are then all generated tokens, including the stop token. They are None if the backend does not report them.
    """

    def __init__(self, failures: FailureTable) -> None:
        self._completion = CompletionFold(OutputForm.TEXT, failures)
        self.tokens: list[Token] | None = None
        self.done = False

    def feed(self, events: list[bytes]) -> Chunk | None:
        if not events:
            return None
        chunk = self._completion.feed([*events, b"[DONE]"])
        self.tokens = _tokens_in(decoded(events[0]))
        self.done = True
        return chunk


def _tokens_in(document: dict[str, Any]) -> list[Token] | None:
    """Return the tokens of a document, or None. Raises BackendProtocolError for invalid ids."""
    logprobs = document["choices"][0].get("logprobs")
    each = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(each, list) or not all(isinstance(one, dict) and "id" in one for one in each):
        return None
    ids = token_ids([one["id"] for one in each])
    return [Token(token, _probability(one.get("logprob"))) for token, one in zip(ids, each, strict=True)]


def _probability(logprob: object) -> float:
    return exp(min(logprob, 0.0)) if isinstance(logprob, float | int) else 0.0
