"""Going on inside a message, on a server that drops a space from the beginning of whatever it generates.

Inside a message the next token mostly begins with a space, and a stream of text does not show that one was dropped. An
answer of mlx_lm.server that is no stream holds the id and the probability of every token. So the first few tokens are
asked for in one piece, and the rest as a stream behind them: from a place where the next token is all but certain, and
so it is known whether it begins with a space.

No prompt that ends the server is sent (`_written`): so the stream begins before the last of those tokens and not
behind it, and where the job's own prompt is one, its last token is generated again, until it is the same. The first
piece is short: the server generates all of it, whoever is left to read it. Measured on mlx-lm 0.32.2.
"""

from __future__ import annotations

import asyncio
import re
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from math import exp
from typing import Any, TypeAlias

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
from unisono_adapters._framing import Framing
from unisono_adapters._http import BackendHttp
from unisono_adapters._ndjson import LineCutter
from unisono_adapters._poison_prompts import PoisonPrompt

FEW = 16
"""Tokens asked for in one piece: among so many one is certain, and a client waits for no more than these."""
SURE = 0.999
"""From this probability on a token is certain to come again."""
UNBEARABLE = "The backend has just been there, and cannot go on behind the very same prompt."
TRIES = 4
"""How often a prompt's last tokens are generated again, at most, for them to be the same."""

_DOCUMENT = Framing("application/json", LineCutter)
"""The server's answers of one piece are JSON on one line."""
_ENDS = (*STOP_TOKENS, ENDOFTEXT)
_LOOKS_SPECIAL = re.compile(r"<\|[a-z_0-9]+\|>")
_LONGEST_MARKER = 40
_LONGEST_CHARACTER = 4
_COMPARED = re.compile(r"[^<\ufffd]*")
"""What of an answer's text is the same however it was put together: a server may take out what it knows as a marker,
and makes its own of bytes that are no character."""

Body: TypeAlias = Callable[[CompletionJob, bool], bytes]
"""The body of a request for a generation: in one piece with its ids, or as a stream."""


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    probability: float


@dataclass(frozen=True, slots=True)
class FirstPiece:
    """What the first piece comes to: the ids handed on and their text; then an end, or what the rest begins with."""

    ids: Sequence[int] = ()
    text: str = ""
    finish: FinishReason | None = None
    stop_token: int | None = None
    expected: str = ""


def is_inside(prompt: Prompt) -> bool:
    """Whether a message's header or body has been begun where the prompt ends. The role alone, behind which every
    answer begins, does not count."""
    tokens = prompt.tokens
    return len(tokens) > 1 and tokens[-1] < FIRST_SPECIAL and tokens[-2] != START


async def go_on(wire: BackendHttp, job: CompletionJob, body: Body, written: PoisonPrompt) -> AsyncGenerator[Chunk]:
    """What `job` asks for, as text, with the counts of its own prompt. Raises the `BackendError` family."""
    now = asyncio.get_running_loop().time
    began = now()
    encoding = load_encoding()
    piece, tokens = await _first(wire, job, body, written, encoding)
    begun = read(encoding, job, piece, tokens, written)
    if begun.finish is not None:
        yield replace(piece, text=begun.text, finish=begun.finish, stop_token=begun.stop_token)
        return
    if begun.text:
        yield Chunk(text=begun.text)
    rest = _behind(job, begun, now() - began)
    awaited = True
    written.asked(rest.prompt)
    async with aclosing(complete(wire, body(rest, False), rest, OutputForm.TEXT)) as stream:
        async for chunk in stream:
            if awaited and chunk.text:
                awaited = False
                chunk = replace(chunk, text=with_space(chunk.text, begun.expected))
            if chunk.finish is not None:
                chunk = replace(chunk, prompt_tokens=piece.prompt_tokens, cached_tokens=piece.cached_tokens)
            yield chunk


async def _first(
    wire: BackendHttp, job: CompletionJob, body: Body, written: PoisonPrompt, encoding: Encoding
) -> tuple[Chunk, Sequence[Token]]:
    """The first piece behind the prompt of `job`, and its tokens: none where the server does not tell them."""
    prompt, again = before_written(encoding, job.prompt, written)
    for number in range(TRIES if again else 1):
        few = replace(
            job,
            prompt=prompt,
            max_tokens=len(again) + min(FEW, job.max_tokens),
            sampling=_reseeded(job.sampling, number),
        )
        fold = _PieceFold(wire.failures)
        written.asked(prompt)
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


def before_written(encoding: Encoding, prompt: Prompt, written: PoisonPrompt) -> tuple[Prompt, list[int]]:
    """The prompt, and which of its last tokens are left out because the server would not bear all of them. Raises
    CannotGoOn for one that cannot be shortened."""
    assert prompt.text is not None, "a text backend was given a prompt without text"
    tokens, text = list(prompt.tokens), prompt.text
    again: list[int] = []
    while text in written:
        spelled = "\ufffd"
        for _ in range(_LONGEST_CHARACTER):
            again.insert(0, tokens.pop())
            spelled = encoding.decode(again)
            if "\ufffd" not in spelled:
                break
        if not prompt.text.endswith(spelled) or not text or len(again) > FEW:
            raise CannotGoOn(UNBEARABLE)
        text = prompt.text.removesuffix(spelled)
    return Prompt(tokens, text), again


def read(
    encoding: Encoding, job: CompletionJob, piece: Chunk, tokens: Sequence[Token], written: PoisonPrompt
) -> FirstPiece:
    """What the first piece of `job` brought. Without tokens nothing is handed on: the rest is then a stream as it would
    be anywhere else."""
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
    places = [p for p in places_in(encoding, before, ids[:-1]) if before + encoding.decode(ids[:p]) not in written]
    if not places:
        raise CannotGoOn(UNBEARABLE)
    # The last one of the certain ones, else the one that is nearest to it.
    place = max(places, key=lambda place: (min(tokens[place].probability, SURE), place))
    kept = ids[:place]
    return FirstPiece(kept, encoding.decode(kept), expected=encoding.decode([ids[place]]))


def places_in(encoding: Encoding, before: str, ids: Sequence[int]) -> list[int]:
    """How many of `ids` a prompt can end in as text, behind the text `before`: not inside a character, and not behind a
    marker that is only typed, where the server would read a real one."""
    decoder = getincrementaldecoder("utf-8")("replace")
    run = before[-_LONGEST_MARKER:].rpartition("|>")[2]
    places = [0]
    for at, token in enumerate(ids):
        if token >= FIRST_SPECIAL:
            decoder.reset()
            run = ""
        else:
            run = run[-_LONGEST_MARKER:] + decoder.decode(encoding.decode_bytes([token]))
            if any(marker in encoding.special_names for marker in _LOOKS_SPECIAL.findall(run)):
                break
        if not decoder.getstate()[0]:
            places.append(at + 1)
    return places


def with_space(text: str, expected: str) -> str:
    """The first text of a stream, with the space that was dropped: when it is what was expected but for that, or, where
    something else came against all odds, when it is a word where a word with a space was expected."""
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


def _behind(job: CompletionJob, begun: FirstPiece, spent_s: float) -> CompletionJob:
    """What is left to ask for, `spent_s` seconds later."""
    assert job.prompt.text is not None, "a text backend was given a prompt without text"
    return replace(
        job,
        prompt=Prompt([*job.prompt.tokens, *begun.ids], job.prompt.text + begun.text),
        max_tokens=job.max_tokens - len(begun.ids),
        sampling=_reseeded(job.sampling, len(begun.ids)),
        timeouts=replace(job.timeouts, total_s=job.timeouts.total_s - spent_s),
    )


def _reseeded(sampling: Sampling, number: int) -> Sampling:
    """Another seed for another request: the same would draw the same numbers again."""
    if sampling.seed is None or not number:
        return sampling
    return replace(sampling, seed=(sampling.seed + number) % 2**63)


class _PieceFold:
    """The one document of an answer in one piece. `tokens` are all it generated, the stop token too; None where it does
    not tell them."""

    def __init__(self, failures: FailureTable) -> None:
        self._whole = CompletionFold(OutputForm.TEXT, failures)
        self.tokens: list[Token] | None = None
        self.done = False

    def feed(self, events: list[bytes]) -> Chunk | None:
        if not events:
            return None
        chunk = self._whole.feed([*events, b"[DONE]"])
        self.tokens = _tokens_in(decoded(events[0]))
        self.done = True
        return chunk


def _tokens_in(document: dict[str, Any]) -> list[Token] | None:
    """Raises BackendProtocolError for ids that are none."""
    told = document["choices"][0].get("logprobs")
    each = told.get("content") if isinstance(told, dict) else None
    if not isinstance(each, list) or not all(isinstance(one, dict) and "id" in one for one in each):
        return None
    ids = token_ids([one["id"] for one in each])
    return [Token(token, _probability(one.get("logprob"))) for token, one in zip(ids, each, strict=True)]


def _probability(logprob: object) -> float:
    return exp(min(logprob, 0.0)) if isinstance(logprob, float | int) else 0.0
