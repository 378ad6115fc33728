"""Tests of continuing a message on mlx_lm.server, which drops a leading space of its output."""

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
from unisono_adapters.mlx.crashing_prompts import MAX_PROMPTS, PoisonPrompt
from unisono_adapters.mlx.leading_space import PROBE_TOKENS, cut_positions, is_inside, with_space
from unisono_adapters.mlx.mlx_server_backend import MlxServerBackend

ENCODING = load_encoding()
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
ANSWER = (
    "<|channel|>analysis<|message|>Think first, of 🐦‍⬛ and of more than one thing.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Then answer in full: naïve, 日本 and “quoted”, over many words, to the very end."
)
TOKENS = ENCODING.encode_marked(ANSWER)


def script(request: dict[str, Any], **fields: Any) -> MlxScript:
    """Script with the rest of the answer after the prompt."""
    prefix = request["prompt"].removeprefix(PROMPT)
    assert ANSWER.startswith(prefix)
    return MlxScript(text=ANSWER[len(prefix) :], per_chunk=3, **fields)


@pytest.fixture
async def fake() -> AsyncIterator[FakeMlxServer]:
    async with FakeMlxServer(script=script) as fake:
        yield fake


@pytest.fixture
async def backend(fake: FakeMlxServer) -> AsyncIterator[MlxServerBackend]:
    backend = MlxServerBackend(BackendOptions("mlx_server", "m", fake.url))
    yield backend
    await backend.aclose()


def job(prefix: str, max_tokens: int = 400, **sampling: Any) -> CompletionJob:
    text = PROMPT + prefix
    return CompletionJob(Prompt(ENCODING.encode_marked(text), text), max_tokens, Sampling(**sampling))


async def collect(backend: MlxServerBackend, request: CompletionJob) -> list[Chunk]:
    return [chunk async for chunk in backend.complete(request)]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


INSIDE_CASES = {
    "role only": ("", False),
    "marker": ("<|channel|>", False),
    "channel": ("<|channel|>final", True),
    "start of a message": ("<|channel|>final<|message|>", False),
    "message body": ("<|channel|>final<|message|>Hello", True),
    "next role": ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", False),
}


@pytest.mark.parametrize(("prefix", "inside"), INSIDE_CASES.values(), ids=INSIDE_CASES)
def test_prompt_is_inside_a_message_if_part_of_it_is_present(prefix: str, inside: bool) -> None:
    assert is_inside(job(prefix).prompt) is inside


async def test_answer_continues_after_any_of_its_tokens() -> None:
    for cut in range(len(TOKENS)):
        data = ENCODING.decode_bytes(TOKENS[:cut])
        try:
            prefix = data.decode()
        except UnicodeDecodeError:
            continue
        async with FakeMlxServer(script=script) as fake:
            backend = MlxServerBackend(BackendOptions("mlx_server", "m", fake.url))
            chunks = await collect(backend, job(prefix))
            await backend.aclose()
        assert text_of(chunks) == ANSWER[len(prefix) :]
        assert [chunk.finish for chunk in chunks if chunk.finish] == [FinishReason.STOP]
        assert chunks[-1].prompt_tokens == 11


async def test_continuation_starts_with_a_short_request_and_then_streams(
    fake: FakeMlxServer, backend: MlxServerBackend
) -> None:
    await collect(backend, job("<|channel|>analysis<|message|>Think", seed=7))
    first, rest = (seen.json for seen in fake.requests)
    assert (first["stream"], first["logprobs"], first["max_tokens"]) == (False, True, PROBE_TOKENS)
    assert (rest["stream"], rest["max_tokens"]) == (True, 400 - PROBE_TOKENS + 1)
    assert "logprobs" not in rest
    assert rest["prompt"].startswith(first["prompt"])
    # The same seed would draw the same random numbers for other tokens.
    assert first["seed"] != rest["seed"]


@pytest.mark.parametrize("stop", [RETURN, CALL, ENDOFTEXT])
async def test_short_rest_needs_one_request_and_has_the_stop_token(
    fake: FakeMlxServer, backend: MlxServerBackend, stop: int
) -> None:
    fake.script = lambda request: MlxScript(text=" the very end.", stop=stop)
    chunks = await collect(backend, job("<|channel|>final<|message|>To"))
    assert [(chunk.text, chunk.finish, chunk.stop_token) for chunk in chunks] == [
        (" the very end.", FinishReason.STOP, stop)
    ]
    assert len(fake.requests) == 1


@pytest.mark.parametrize("max_tokens", [1, 2, PROBE_TOKENS - 1, PROBE_TOKENS])
async def test_token_limit_covers_both_requests(backend: MlxServerBackend, max_tokens: int) -> None:
    prefix = "<|channel|>analysis<|message|>Think"
    chunks = await collect(backend, job(prefix, max_tokens))
    ids = ENCODING.encode_marked(ANSWER.removeprefix(prefix))[:max_tokens]
    assert (text_of(chunks), chunks[-1].finish) == (ENCODING.decode(ids), FinishReason.LENGTH)


INVALID_PIECES: dict[str, bytes] = {
    "no choices": b"{}",
    "not JSON": b'{"choices": [',
    "empty": b"",
    "error": b'{"error": "out of memory"}',
    "invalid id": (b'{"choices": [{"text": "a", "finish_reason": "length", "logprobs": {"content": [{"id": -1}]}}]}'),
}


@pytest.mark.parametrize("body", INVALID_PIECES.values(), ids=INVALID_PIECES)
async def test_invalid_first_piece_is_a_protocol_error(
    fake: FakeMlxServer, backend: MlxServerBackend, body: bytes
) -> None:
    fake.script = lambda request: Refusal(200, body, version=0)
    with pytest.raises(BackendProtocolError):
        await collect(backend, job("<|channel|>final<|message|>To"))


@pytest.mark.parametrize("fault", [reset_at(0), close_at(0)], ids=["reset", "end"])
async def test_disconnect_during_the_first_piece_is_a_backend_error(
    fake: FakeMlxServer, backend: MlxServerBackend, fault: Any
) -> None:
    fake.script = lambda request: script(request, faults=(fault,))
    with pytest.raises(BackendError):
        await collect(backend, job("<|channel|>analysis<|message|>Think"))


WITHOUT_IDS = {
    "no ids": {},
    "another vocabulary": {"logprobs": {"content": [{"id": 5, "logprob": 0.0}]}},
}


@pytest.mark.parametrize("fields", WITHOUT_IDS.values(), ids=WITHOUT_IDS)
async def test_first_piece_without_ids_falls_back_to_a_stream(
    fake: FakeMlxServer, backend: MlxServerBackend, fields: dict[str, Any]
) -> None:
    prefix = "<|channel|>analysis<|message|>Think"
    choice = {"text": "first", "finish_reason": "length", **fields}
    piece = Refusal(200, json.dumps({"choices": [choice]}).encode(), version=0)
    fake.script = lambda request: script(request) if request["stream"] else piece
    assert text_of(await collect(backend, job(prefix))) == ANSWER.removeprefix(prefix).removeprefix(" ")


async def test_first_piece_is_subject_to_the_first_token_timeout(
    fake: FakeMlxServer, backend: MlxServerBackend
) -> None:
    fake.script = lambda request: script(request, delay_s=5.0)
    request = job("<|channel|>analysis<|message|>Think")
    with pytest.raises(BackendTimeout):
        await collect(backend, replace(request, timeouts=replace(request.timeouts, first_token_s=0.1)))


SPACE_CASES = {
    "dropped": ("Hello", " Hello there", " Hello"),
    "shorter than expected": ("Hel", " Hello", " Hel"),
    "longer than expected": ("Hello there", " Hello", " Hello there"),
    "not dropped": (", and", ",", ", and"),
    "space only": ("x", " ", " x"),
    "incomplete character": ("é", " \ufffd", " é"),
    "different word": ("Hullo", " Hello", " Hullo"),
    "unexpected end": ("<|end|>", " Hello", "<|end|>"),
    "nothing expected": ("Hello", "", "Hello"),
}


@pytest.mark.parametrize(("text", "expected", "restored"), SPACE_CASES.values(), ids=SPACE_CASES)
def test_dropped_leading_space_is_restored(text: str, expected: str, restored: str) -> None:
    assert with_space(text, expected) == restored


TYPED_MARKERS = {
    "plain": ("a", "b c d", "b c d"),
    "typed marker": ("a", "say <|end|> now", "say <|end|"),
    "typed marker across the boundary": ("a <|en", "d|> now", "d|"),
    "after a real marker": ("<|message|>", "a", "a"),
    "unknown marker": ("a", "<|thing|> b", "<|thing|> b"),
}


@pytest.mark.parametrize(("before", "text", "longest"), TYPED_MARKERS.values(), ids=TYPED_MARKERS)
def test_prompt_is_cut_before_a_typed_marker(before: str, text: str, longest: str) -> None:
    ids = ENCODING.encode_text(text)
    assert longest == ENCODING.decode(ids[: cut_positions(ENCODING, before, ids)[-1]])


def test_prompt_is_never_cut_inside_a_character() -> None:
    ids = ENCODING.encode_text("a 🐦‍⬛ b")
    for position in cut_positions(ENCODING, "", ids):
        assert "\ufffd" not in ENCODING.decode(ids[:position])


async def test_prompts_that_crash_the_server_are_not_sent(fake: FakeMlxServer, backend: MlxServerBackend) -> None:
    """The server caches prompts without their last token, and its output.

    It crashes if such a prompt is sent again.
    """
    prefix = "<|channel|>analysis<|message|>Think"
    for _ in range(2):
        for suffix in (" first", " first,", ""):
            chunks = await collect(backend, job(prefix + suffix))
            assert text_of(chunks) == ANSWER.removeprefix(prefix + suffix)
    cached: set[tuple[int, ...]] = set()
    for seen in fake.requests:
        prompt = tuple(ENCODING.encode_marked(seen.json["prompt"]))
        assert prompt not in cached
        cached.add(prompt[:-1])
        if not seen.json["stream"]:
            cached.add(
                (*prompt, *ENCODING.encode_marked(ANSWER[len(seen.json["prompt"]) - len(PROMPT) :])[:PROBE_TOKENS])
            )


async def test_answer_cut_at_the_token_limit_continues(fake: FakeMlxServer, backend: MlxServerBackend) -> None:
    cut = job("<|channel|>", max_tokens=10)
    prefix = "<|channel|>" + text_of(await collect(backend, cut))
    assert text_of(await collect(backend, job(prefix))) == ANSWER.removeprefix(prefix)
    first, again = fake.requests[:2]
    assert again.json["prompt"] != first.json["prompt"] + prefix.removeprefix("<|channel|>")


async def test_prefix_that_is_not_generated_again_cannot_be_continued(
    fake: FakeMlxServer, backend: MlxServerBackend
) -> None:
    cut = job("<|channel|>", max_tokens=10)
    prefix = "<|channel|>" + text_of(await collect(backend, cut))
    fake.script = lambda request: MlxScript(text=" something else")
    with pytest.raises(CannotGoOn):
        await collect(backend, job(prefix))
    assert all(seen.json["prompt"] != PROMPT + prefix for seen in fake.requests)


def test_oldest_recorded_prompt_is_dropped() -> None:
    prompts = PoisonPrompt()
    for number in range(MAX_PROMPTS + 1):
        prompts.add(f"text {number}")
    assert ("text 0" in prompts, "text 1" in prompts, f"text {MAX_PROMPTS}" in prompts) == (False, True, True)
