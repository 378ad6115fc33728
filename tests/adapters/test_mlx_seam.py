"""Going on inside a message on mlx_lm.server, which drops a space from the beginning of what it generates."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes import FakeMlxServer, MlxScript, Refusal, close_at, reset_at
from unisono.core.generation import CALL, ENDOFTEXT, RETURN, Chunk, CompletionJob, FinishReason, Prompt, Sampling
from unisono.core.ports import BackendOptions
from unisono.errors import BackendError, BackendProtocolError, BackendTimeout, CannotGoOn
from unisono.harmony.encoding import load_encoding
from unisono_adapters._leading_space import PROBE_TOKENS, cut_positions, is_inside, with_space
from unisono_adapters._poison_prompts import MAX_PROMPTS, PoisonPrompt
from unisono_adapters.mlx.server import MlxServerBackend

ENCODING = load_encoding()
BEGUN = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
ANSWER = (
    "<|channel|>analysis<|message|>Think first, of 🐦‍⬛ and of more than one thing.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Then answer in full: naïve, 日本 and “quoted”, over many words, to the very end."
)
TOKENS = ENCODING.encode_marked(ANSWER)


def script(asked: dict[str, Any], **fields: Any) -> MlxScript:
    """The answer from wherever the prompt stands in it."""
    said = asked["prompt"].removeprefix(BEGUN)
    assert ANSWER.startswith(said)
    return MlxScript(text=ANSWER[len(said) :], per_chunk=3, **fields)


@pytest.fixture
async def fake() -> AsyncIterator[FakeMlxServer]:
    async with FakeMlxServer(script=script) as fake:
        yield fake


@pytest.fixture
async def backend(fake: FakeMlxServer) -> AsyncIterator[MlxServerBackend]:
    backend = MlxServerBackend(BackendOptions("mlx_server", "m", fake.url))
    yield backend
    await backend.aclose()


def job(said: str, max_tokens: int = 400, **sampling: Any) -> CompletionJob:
    text = BEGUN + said
    return CompletionJob(Prompt(ENCODING.encode_marked(text), text), max_tokens, Sampling(**sampling))


async def collect(backend: MlxServerBackend, asked: CompletionJob) -> list[Chunk]:
    return [chunk async for chunk in backend.complete(asked)]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


INSIDE = {
    "role alone": ("", False),
    "a marker": ("<|channel|>", False),
    "a channel": ("<|channel|>final", True),
    "a message's beginning": ("<|channel|>final<|message|>", False),
    "a body": ("<|channel|>final<|message|>Hello", True),
    "the next role": ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", False),
}


@pytest.mark.parametrize(("said", "inside"), INSIDE.values(), ids=INSIDE)
def test_a_message_is_gone_on_with_where_something_of_it_stands(said: str, inside: bool) -> None:
    assert is_inside(job(said).prompt) is inside


async def test_an_answer_goes_on_behind_any_of_its_tokens() -> None:
    for cut in range(len(TOKENS)):
        said = ENCODING.decode_bytes(TOKENS[:cut])
        try:
            begun = said.decode()
        except UnicodeDecodeError:
            continue
        async with FakeMlxServer(script=script) as fake:
            backend = MlxServerBackend(BackendOptions("mlx_server", "m", fake.url))
            chunks = await collect(backend, job(begun))
            await backend.aclose()
        assert text_of(chunks) == ANSWER[len(begun) :]
        assert [chunk.finish for chunk in chunks if chunk.finish] == [FinishReason.STOP]
        assert chunks[-1].prompt_tokens == 11


async def test_a_body_is_begun_in_one_piece_and_ends_as_a_stream(
    fake: FakeMlxServer, backend: MlxServerBackend
) -> None:
    await collect(backend, job("<|channel|>analysis<|message|>Think", seed=7))
    first, rest = (seen.json for seen in fake.requests)
    assert (first["stream"], first["logprobs"], first["max_tokens"]) == (False, True, PROBE_TOKENS)
    assert (rest["stream"], rest["max_tokens"]) == (True, 400 - PROBE_TOKENS + 1)
    assert "logprobs" not in rest
    assert rest["prompt"].startswith(first["prompt"])
    # The same seed would draw the same numbers for other tokens.
    assert first["seed"] != rest["seed"]


@pytest.mark.parametrize("stop", [RETURN, CALL, ENDOFTEXT])
async def test_a_short_rest_needs_no_stream_and_names_what_stopped_it(
    fake: FakeMlxServer, backend: MlxServerBackend, stop: int
) -> None:
    fake.script = lambda asked: MlxScript(text=" the very end.", stop=stop)
    chunks = await collect(backend, job("<|channel|>final<|message|>To"))
    assert [(chunk.text, chunk.finish, chunk.stop_token) for chunk in chunks] == [
        (" the very end.", FinishReason.STOP, stop)
    ]
    assert len(fake.requests) == 1


@pytest.mark.parametrize("most", [1, 2, PROBE_TOKENS - 1, PROBE_TOKENS])
async def test_the_token_limit_is_that_of_all_of_it(backend: MlxServerBackend, most: int) -> None:
    said = "<|channel|>analysis<|message|>Think"
    chunks = await collect(backend, job(said, most))
    ids = ENCODING.encode_marked(ANSWER.removeprefix(said))[:most]
    assert (text_of(chunks), chunks[-1].finish) == (ENCODING.decode(ids), FinishReason.LENGTH)


PIECES: dict[str, bytes] = {
    "no choices": b"{}",
    "not JSON": b'{"choices": [',
    "nothing": b"",
    "an error": b'{"error": "out of memory"}',
    "an id that is none": (
        b'{"choices": [{"text": "a", "finish_reason": "length", "logprobs": {"content": [{"id": -1}]}}]}'
    ),
}


@pytest.mark.parametrize("body", PIECES.values(), ids=PIECES)
async def test_a_first_piece_that_is_none_fails_the_answer(
    fake: FakeMlxServer, backend: MlxServerBackend, body: bytes
) -> None:
    fake.script = lambda asked: Refusal(200, body, version=0)
    with pytest.raises(BackendProtocolError):
        await collect(backend, job("<|channel|>final<|message|>To"))


@pytest.mark.parametrize("fault", [reset_at(0), close_at(0)], ids=["reset", "end"])
async def test_a_first_piece_that_breaks_off_fails_the_answer(
    fake: FakeMlxServer, backend: MlxServerBackend, fault: Any
) -> None:
    fake.script = lambda asked: script(asked, faults=(fault,))
    with pytest.raises(BackendError):
        await collect(backend, job("<|channel|>analysis<|message|>Think"))


UNTOLD = {
    "no ids": {},
    "another vocabulary": {"logprobs": {"content": [{"id": 5, "logprob": 0.0}]}},
}


@pytest.mark.parametrize("told", UNTOLD.values(), ids=UNTOLD)
async def test_without_ids_it_is_a_stream_as_anywhere_else(
    fake: FakeMlxServer, backend: MlxServerBackend, told: dict[str, Any]
) -> None:
    said = "<|channel|>analysis<|message|>Think"
    choice = {"text": "first", "finish_reason": "length", **told}
    piece = Refusal(200, json.dumps({"choices": [choice]}).encode(), version=0)
    fake.script = lambda asked: script(asked) if asked["stream"] else piece
    assert text_of(await collect(backend, job(said))) == ANSWER.removeprefix(said).removeprefix(" ")


async def test_the_silence_of_a_first_piece_is_bounded(fake: FakeMlxServer, backend: MlxServerBackend) -> None:
    fake.script = lambda asked: script(asked, delay_s=5.0)
    asked = job("<|channel|>analysis<|message|>Think")
    with pytest.raises(BackendTimeout):
        await collect(backend, replace(asked, timeouts=replace(asked.timeouts, first_token_s=0.1)))


WORDS = {
    "dropped": ("Hello", " Hello there", " Hello"),
    "part of it": ("Hel", " Hello", " Hel"),
    "more than it": ("Hello there", " Hello", " Hello there"),
    "kept": (", and", ",", ", and"),
    "a space alone": ("x", " ", " x"),
    "half a character": ("é", " \ufffd", " é"),
    "another word against the odds": ("Hullo", " Hello", " Hullo"),
    "an end against the odds": ("<|end|>", " Hello", "<|end|>"),
    "nothing expected": ("Hello", "", "Hello"),
}


@pytest.mark.parametrize(("text", "expected", "shown"), WORDS.values(), ids=WORDS)
def test_a_space_is_put_back_where_one_was_expected(text: str, expected: str, shown: str) -> None:
    assert with_space(text, expected) == shown


TYPED = {
    "plain": ("a", "b c d", "b c d"),
    "typed whole": ("a", "say <|end|> now", "say <|end|"),
    "typed half before": ("a <|en", "d|> now", "d|"),
    "real before": ("<|message|>", "a", "a"),
    "no marker": ("a", "<|thing|> b", "<|thing|> b"),
}


@pytest.mark.parametrize(("before", "text", "longest"), TYPED.values(), ids=TYPED)
def test_a_prompt_ends_before_a_marker_that_is_only_typed(before: str, text: str, longest: str) -> None:
    ids = ENCODING.encode_text(text)
    assert longest == ENCODING.decode(ids[: cut_positions(ENCODING, before, ids)[-1]])


def test_a_prompt_never_ends_inside_a_character() -> None:
    ids = ENCODING.encode_text("a 🐦‍⬛ b")
    for place in cut_positions(ENCODING, "", ids):
        assert "\ufffd" not in ENCODING.decode(ids[:place])


async def test_no_prompt_is_sent_twice_that_the_server_does_not_bear(
    fake: FakeMlxServer, backend: MlxServerBackend
) -> None:
    """It keeps prompts without their last token and what it wrote behind them, and dies of the very same prompt."""
    said = "<|channel|>analysis<|message|>Think"
    for _ in range(2):
        for more in (" first", " first,", ""):
            chunks = await collect(backend, job(said + more))
            assert text_of(chunks) == ANSWER.removeprefix(said + more)
    kept: set[tuple[int, ...]] = set()
    for seen in fake.requests:
        prompt = tuple(ENCODING.encode_marked(seen.json["prompt"]))
        assert prompt not in kept
        kept.add(prompt[:-1])
        if not seen.json["stream"]:
            kept.add((*prompt, *ENCODING.encode_marked(ANSWER[len(seen.json["prompt"]) - len(BEGUN) :])[:PROBE_TOKENS]))


async def test_an_answer_cut_at_its_limit_goes_on(fake: FakeMlxServer, backend: MlxServerBackend) -> None:
    cut = job("<|channel|>", max_tokens=10)
    said = "<|channel|>" + text_of(await collect(backend, cut))
    assert text_of(await collect(backend, job(said))) == ANSWER.removeprefix(said)
    first, again = fake.requests[:2]
    assert again.json["prompt"] != first.json["prompt"] + said.removeprefix("<|channel|>")


async def test_what_does_not_come_again_is_not_gone_on_with(fake: FakeMlxServer, backend: MlxServerBackend) -> None:
    cut = job("<|channel|>", max_tokens=10)
    said = "<|channel|>" + text_of(await collect(backend, cut))
    fake.script = lambda asked: MlxScript(text=" something else")
    with pytest.raises(CannotGoOn):
        await collect(backend, job(said))
    assert all(seen.json["prompt"] != BEGUN + said for seen in fake.requests)


def test_what_was_written_is_forgotten_in_the_end() -> None:
    written = PoisonPrompt()
    for number in range(MAX_PROMPTS + 1):
        written.add(f"text {number}")
    assert ("text 0" in written, "text 1" in written, f"text {MAX_PROMPTS}" in written) == (False, True, True)
