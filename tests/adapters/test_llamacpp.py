"""llama.cpp's own ways: one id per event, characters of several tokens, no `[DONE]`, connections that close."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import Close, Refusal, WireServer, Write, inject_at
from tests.fakes.dialects import sse_event
from tests.fakes.llamacpp import LOADING, TOO_LONG, FakeLlamaCpp, LlamaCppScript
from unisono.core.generation import Chunk, CompletionJob, FinishReason, OutputForm, Prompt, Sampling
from unisono.core.ports import BackendOptions
from unisono.core.probe import Check
from unisono.errors import BackendOverloaded, BackendProtocolError, ContextTooLong
from unisono.harmony.encoding import load_encoding
from unisono_adapters._failures import FailureTable, IdsMissing
from unisono_adapters._restore_ids import LostIds
from unisono_adapters.llamacpp import LlamaCppBackend, LlamaCppFold

ENCODING = load_encoding()
JOB = CompletionJob(Prompt([200006, 1428, 200008]), max_tokens=50)
RETURN, CALL, END = 200002, 200012, 200007


@pytest.fixture
async def fake() -> AsyncIterator[FakeLlamaCpp]:
    async with FakeLlamaCpp(tokens=[200005, 17196, 200008, 13225, RETURN]) as fake:
        yield fake


@pytest.fixture
async def backend(fake: FakeLlamaCpp) -> AsyncIterator[LlamaCppBackend]:
    backend = LlamaCppBackend(BackendOptions("llamacpp", "tiny", fake.url))
    yield backend
    await backend.aclose()


async def collect(backend: LlamaCppBackend, job: CompletionJob = JOB) -> list[Chunk]:
    return [chunk async for chunk in backend.complete(job)]


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


async def test_it_asks_for_ids_and_switches_every_other_sampler_off(
    fake: FakeLlamaCpp, backend: LlamaCppBackend
) -> None:
    await collect(backend, CompletionJob(JOB.prompt, 50, Sampling(logit_bias={CALL: -100.0, 5: 2.5}), request_id="r"))
    (request,) = fake.requests
    assert request.path == "/completion"
    assert request.json == request.json | {
        "prompt": [200006, 1428, 200008],
        "n_predict": 50,
        "return_tokens": True,
        "cache_prompt": True,
        "logit_bias": [[CALL, -100.0], [5, 2.5]],
        "typical_p": 1.0,
        "xtc_probability": 0.0,
        "dry_multiplier": 0.0,
        "mirostat": 0,
        "ignore_eos": False,
    }
    assert "stop" not in request.json
    assert "prompt" not in request.json["response_fields"]
    assert "x-conversation-id" not in request.headers


# Characters of several tokens

TEXTS: dict[str, list[int]] = {
    "one of four tokens": ENCODING.encode_text("𠜎"),
    "several of two tokens, joined": ENCODING.encode_text("👩‍👩‍👧"),
    "between letters": ENCODING.encode_text("a𠜎b"),
    "spelled by bytes although there is one token for it": [*ENCODING.encode_text(" "), 172, 253, 246, 224],
    "first in an answer, and the stop token next": [*ENCODING.encode_text("𠜎"), RETURN],
    "before a marker": [*ENCODING.encode_text("𠜎"), END, 200006, *ENCODING.encode_text("assistant")],
    "bytes that are no character": [246, 246, 13225],
    "markers, and text that spells one": [200005, *ENCODING.encode_text("<|end|>"), END],
}


@pytest.mark.parametrize("tokens", TEXTS.values(), ids=TEXTS)
async def test_ids_that_were_not_sent_are_put_back(
    fake: FakeLlamaCpp, backend: LlamaCppBackend, tokens: list[int]
) -> None:
    fake.script = lambda asked: LlamaCppScript(tokens=tokens)
    chunks = await collect(backend)
    assert ENCODING.decode(tokens_of(chunks)) == ENCODING.decode(tokens)
    assert ENCODING.special_ids(tokens_of(chunks)) == ENCODING.special_ids(tokens)


@pytest.mark.parametrize("text", ["𠜎 ok 👩‍👩‍👧!", "完了。𠮷野家", "x😀"])
async def test_what_is_put_back_are_the_very_ids_where_the_model_wrote_them_as_everyone_does(
    fake: FakeLlamaCpp, backend: LlamaCppBackend, text: str
) -> None:
    ids = [token for character in text for token in ENCODING.encode_text(character)]
    fake.script = lambda asked: LlamaCppScript(tokens=ids)
    assert tokens_of(await collect(backend)) == ids


HELD: dict[str, tuple[list[tuple[list[int], str]], list[int]]] = {
    "text held for a stop string, then shown": ([([64], ""), ([65], "ab")], [64, 65]),
    "held, and shown in part": ([([64], ""), ([65], "a"), ([66], "bc")], [64, 65, 66]),
    "the stop token shown": ([([RETURN], "<|return|>")], [RETURN]),
    "the stop token hidden": ([([RETURN], "")], [RETURN]),
    "a lost character, then the hidden stop token": ([([RETURN], "é")], [*ENCODING.encode_text("é"), RETURN]),
    "a lost character, then a shown marker": ([([END], "é<|end|>")], [*ENCODING.encode_text("é"), END]),
    "text that spells a marker was lost": ([([62], "é<|end|>")], ENCODING.encode_text("é<|end|>")),
    "text without ids": ([([], "abc")], ENCODING.encode_text("abc")),
    "an id and nothing else": ([([13225], "Hello")], [13225]),
}


@pytest.mark.parametrize(("events", "expected"), HELD.values(), ids=HELD)
def test_every_event_is_accounted_for_by_its_text(events: list[tuple[list[int], str]], expected: list[int]) -> None:
    lost = LostIds(ENCODING)
    assert [token for tokens, content in events for token in lost.restored(tokens, content)] == expected


BYTES = [next(token for token in range(256) if ENCODING.decode_bytes([token]) == bytes([byte])) for byte in range(256)]
IDS = st.one_of(
    st.sampled_from(BYTES),
    st.sampled_from([200005, 200006, END, 200003, 13225, 64, 220]),
    st.sampled_from(ENCODING.encode_text("👩‍👩‍👧 𠜎完é<|end|>")),
)


@given(st.lists(IDS, max_size=40), st.sampled_from([None, RETURN, CALL]))
def test_whatever_ids_come_their_text_and_their_markers_arrive(ids: list[int], stop: int | None) -> None:
    # Letters at the end: what is held within a character when generation ends is never sent.
    tokens = [*ids, 64, 64, 64, *([stop] if stop else [])]
    events = LlamaCppScript(tokens=tokens).events({"prompt": [1], "n_predict": 100, "return_tokens": True})
    (chunk,) = [LlamaCppFold(FailureTable()).feed([event.removeprefix(b"data: ").strip() for event in events])]
    assert chunk is not None
    assert ENCODING.decode(chunk.tokens) == ENCODING.decode(tokens)
    assert ENCODING.special_ids(chunk.tokens) == ENCODING.special_ids(tokens)


async def test_a_server_that_sends_no_ids_is_too_old(fake: FakeLlamaCpp, backend: LlamaCppBackend) -> None:
    event = sse_event({"content": "Hello", "stop": False})
    fake.script = lambda asked: LlamaCppScript(tokens=[1, RETURN], faults=(inject_at(0, event),))
    with pytest.raises(IdsMissing):
        await collect(backend)


# Ends

ENDS = {"eos": FinishReason.STOP, "word": FinishReason.STOP, "limit": FinishReason.LENGTH}


@pytest.mark.parametrize(("kind", "finish"), ENDS.items(), ids=ENDS)
async def test_the_last_event_says_why_it_ended(
    fake: FakeLlamaCpp, backend: LlamaCppBackend, kind: str, finish: FinishReason
) -> None:
    fake.script = lambda asked: LlamaCppScript(tokens=[1], finish=kind, prompt_tokens=9, cached_tokens=4)
    last = (await collect(backend))[-1]
    assert (last.finish, last.prompt_tokens, last.cached_tokens, last.stop_token) == (finish, 9, 4, None)


async def test_an_error_as_older_servers_send_it_is_no_end(backend: LlamaCppBackend) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    error = b'error: {"code":500,"message":"Compute error.","type":"server_error"}\n\n'
    async with WireServer(lambda seen: [Write(head + error), Close()]) as server:
        backend = LlamaCppBackend(BackendOptions("llamacpp", "tiny", server.url))
        with pytest.raises(BackendProtocolError):
            await collect(backend)
        await backend.aclose()


REFUSALS: dict[str, tuple[Refusal, type[Exception], str]] = {
    "too long": (TOO_LONG, ContextTooLong, "8192"),
    "loading": (LOADING, BackendOverloaded, "loading"),
}


@pytest.mark.parametrize(("refusal", "expected", "said"), REFUSALS.values(), ids=REFUSALS)
async def test_what_it_refuses_is_an_error_of_its_kind(
    fake: FakeLlamaCpp, backend: LlamaCppBackend, refusal: Refusal, expected: type[Exception], said: str
) -> None:
    fake.script = lambda asked: refusal
    with pytest.raises(expected, match=said):
        await collect(backend)


# Connections


async def test_a_kept_connection_that_it_closed_is_replaced_once() -> None:
    def respond(seen: Any) -> Any:
        if seen.connection == 1 and len(server.requests) == 2:
            return [Close()]
        return LlamaCppScript(tokens=[1, RETURN]).steps(seen.json)

    async with WireServer(respond) as server:
        backend = LlamaCppBackend(BackendOptions("llamacpp", "tiny", server.url))
        for _ in range(2):
            assert tokens_of(await collect(backend)) == [1, RETURN]
        await backend.aclose()
    assert [seen.connection for seen in server.requests] == [1, 1, 2]


# Probing


async def test_probing_finds_the_context_of_one_slot_and_a_sound_model(backend: LlamaCppBackend) -> None:
    found = await backend.probe()
    able = found.capabilities
    assert (able.prompt, able.output, able.stop_visible, able.context) == (OutputForm.IDS, OutputForm.IDS, True, 8192)
    assert found.fatal == ()


@pytest.mark.parametrize("context", [None, "4096", -1, 0, 1.5, True])
async def test_a_context_that_cannot_be_is_unknown(context: object) -> None:
    async with FakeLlamaCpp(context=context) as fake:
        backend = LlamaCppBackend(BackendOptions("llamacpp", "tiny", fake.url))
        assert (await backend.probe()).capabilities.context is None
        await backend.aclose()


async def test_a_server_that_loads_its_model_cannot_be_examined_yet(
    fake: FakeLlamaCpp, backend: LlamaCppBackend
) -> None:
    fake.loading = True
    with pytest.raises(BackendOverloaded):
        await backend.probe()


@pytest.mark.parametrize("properties", [{}, {"default_generation_settings": 7}, [1], "x"])
async def test_another_servers_properties_fail_the_probe(
    fake: FakeLlamaCpp, backend: LlamaCppBackend, properties: object
) -> None:
    fake.properties = properties
    with pytest.raises(BackendProtocolError):
        await backend.probe()


async def test_a_foreign_tokenizer_is_found(fake: FakeLlamaCpp, backend: LlamaCppBackend) -> None:
    fake.patient.encode = lambda text: [ord(character) for character in text]
    assert [finding.check for finding in (await backend.probe()).fatal] == [Check.TOKENIZER]
