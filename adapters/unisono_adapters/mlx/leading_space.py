"""Continuation inside a message on mlx_lm.server, which drops the first space of its output.

Inside a message the next token usually begins with a space, and a text stream does not show whether a space was
dropped. A non-streamed answer of the server contains the id and the probability of every token. So the first few
tokens (the first piece) are requested without streaming. The rest is streamed from a position at which the next token
is nearly certain, so that it is known whether the text after this position begins with a space.

A prompt that would crash the server (`crashing_prompts`) is never sent. Therefore the stream begins before the last
token of the first piece, not after it. If the job's own prompt would crash the server, the prompt is sent without its
last token, and the server must generate that token again. If the server generates a different token, the request is
repeated. The first piece is short, because the server generates all of it even if the client disconnects. Measured on
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
)
from unisono.errors import CannotGoOn
from unisono.harmony.encoding import Encoding, load_encoding
from unisono_adapters._completions import CompletionFold, complete
from unisono_adapters._events import decoded, generate, token_ids
from unisono_adapters._failures import FailureTable
from unisono_adapters._framing import Framing, LineCutter
from unisono_adapters._http import BackendHttp
from unisono_adapters.mlx.crashing_prompts import PoisonPrompt

# Number of tokens in the first piece: probably one of them is nearly certain, and the client need not wait long.
PROBE_TOKENS = 16
# From this probability on, a token is regarded as certain to be generated again.
MIN_CERTAIN_PROBABILITY = 0.999
UNBEARABLE = (
    "this backend cannot continue this prompt now, because the same prompt is in the backend's cache and would crash it"
)
# Maximum number of attempts to make the server generate the last tokens of a prompt again.
TRIES = 4

# Non-streamed answers of the server are JSON on one line.
_DOCUMENT = Framing("application/json", LineCutter)
# A server may report its tokenizer's end-of-text token instead of a Harmony stop token.
_ENDS = (*STOP_TOKENS, ENDOFTEXT)
_LOOKS_SPECIAL = re.compile(r"<\|[a-z_0-9]+\|>")
_MAX_MARKER_LENGTH = 40
_MAX_CHARACTER_TOKENS = 4
# Beginning of an answer's text that must equal the text of its tokens. From the first `<` or invalid byte on they may
# differ, because a server may remove text that it takes for a marker, and replaces invalid bytes.
_COMPARED = re.compile(r"[^<\ufffd]*")

# Function that makes the request body for a job; True requests one JSON document with ids, False a stream.
Body: TypeAlias = Callable[[CompletionJob, bool], bytes]


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    probability: float


@dataclass(frozen=True, slots=True)
class FirstPiece:
    """Result of the first piece: the ids and text to emit.

    If the answer ends in the first piece, `finish` is the finish reason of the answer. Otherwise `expected` is the text
    of the token with which the stream will probably begin.
    """

    ids: Sequence[int] = ()
    text: str = ""
    finish: FinishReason | None = None
    stop_token: int | None = None
    expected: str = ""


def is_inside(prompt: Prompt) -> bool:
    """Return whether the prompt ends inside the header or the body of a message.

    Returns False if the prompt ends with `<|start|>assistant`, like every prompt for a new answer.
    """
    tokens = prompt.tokens
    return len(tokens) > 1 and tokens[-1] < FIRST_SPECIAL and tokens[-2] != START


async def complete_text(
    wire: BackendHttp, job: CompletionJob, body: Body, written: PoisonPrompt
) -> AsyncGenerator[Chunk]:
    """Yield the answer to `job` as text.

    The token counts in the last chunk are those of the job's prompt. Raises CannotGoOn if the prompt would crash the
    server and cannot be shortened, and other subclasses of BackendError.
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
    """Generate the first piece of the answer to `job`; return the chunk and its tokens.

    `written` holds the prompts that would crash the server. If the job's prompt is one of them, it is sent without its
    last tokens, and the server must generate these tokens again. Raises CannotGoOn if the server has generated
    different tokens in all of `TRIES` attempts. The returned tokens are empty if the server does not report tokens, or
    if they do not agree with the text.
    """
    prompt, again = split_poison(encoding, job.prompt, written)
    for number in range(TRIES if again else 1):
        few = replace(
            job,
            prompt=prompt,
            max_tokens=len(again) + min(PROBE_TOKENS, job.max_tokens),
            sampling=job.sampling.with_next_seed(number),
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
    """Shorten a prompt that would crash the server.

    Returns the shorter prompt and the tokens that were removed. Returns the prompt unchanged, and no tokens, if it
    would not crash the server. Raises CannotGoOn if the prompt cannot be shortened.
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
    """Decide which tokens of the first piece to emit, and where the stream begins.

    If the server does not report tokens, nothing of the first piece is emitted, and the whole answer is streamed.
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
    # Use the last position whose next token is certain. If no token is certain, use the most probable one.
    place = max(places, key=lambda place: (min(tokens[place].probability, MIN_CERTAIN_PROBABILITY), place))
    ids_before = ids[:place]
    return FirstPiece(ids_before, encoding.decode(ids_before), expected=encoding.decode([ids[place]]))


def cut_positions(encoding: Encoding, before: str, ids: Sequence[int]) -> list[int]:
    """Return the positions in `ids` at which the stream's prompt may end.

    The prompt consists of the text `before` and the ids up to the position. A position is a number of ids. A prompt
    cannot end inside a character. It also cannot contain a marker that the model spelled as ordinary text, because the
    server would read it as a control token.
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
    """Return the first text of a stream, with the space restored that the server has dropped.

    Nothing is restored unless `expected` begins with a space. Then there are two cases in which the space is restored:
    `text` and the rest of `expected` begin with the same characters, or `text` begins with a letter or a digit, since
    the model then began a different word.
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
    """Return the job that continues after `first`.

    Its total time limit is shorter by `spent_s` seconds.
    """
    assert job.prompt.text is not None, "a text backend was given a prompt without text"
    return replace(
        job,
        prompt=Prompt([*job.prompt.tokens, *first.ids], job.prompt.text + first.text),
        max_tokens=job.max_tokens - len(first.ids),
        sampling=job.sampling.with_next_seed(len(first.ids)),
        timeouts=replace(job.timeouts, total_s=job.timeouts.total_s - spent_s),
    )


class _DocumentFold:
    """Converter of a non-streamed answer, which is one JSON document, to one chunk.

    After `feed`, `tokens` are all generated tokens, including the stop token, or None if the server does not report
    tokens.
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
    """Return the tokens in a parsed answer of the backend; None if it reports no tokens.

    Raises BackendProtocolError if a token id is invalid.
    """
    logprobs = document["choices"][0].get("logprobs")
    each = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(each, list) or not all(isinstance(one, dict) and "id" in one for one in each):
        return None
    ids = token_ids([one["id"] for one in each])
    return [Token(token, _probability(one.get("logprob"))) for token, one in zip(ids, each, strict=True)]


def _probability(logprob: object) -> float:
    return exp(min(logprob, 0.0)) if isinstance(logprob, float | int) else 0.0
