"""Tests of the llama.cpp adapter: missing ids, finish reasons, connections and probe."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import Close, Refusal, WireServer, Write, inject_at
from tests.fakes.dialects import sse_event
from tests.fakes.llamacpp import LOADING, TOO_LONG, FakeLlamaCpp, LlamaCppScript, llamacpp_error
from unisono.core.generation import Chunk, CompletionJob, FinishReason, OutputForm, Prompt, Sampling
from unisono.core.ports import BackendOptions
from unisono.core.probe import Check
from unisono.errors import BackendOverloaded, BackendProtocolError, ContextTooLong
from unisono.harmony.encoding import load_encoding
from unisono_adapters._failures import FailureTable, IdsMissing
from unisono_adapters.llamacpp import LlamaCppBackend, LlamaCppFold, LostIds

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


async def test_request_asks_for_ids_and_disables_other_samplers(fake: FakeLlamaCpp, backend: LlamaCppBackend) -> None:
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
    "character of four tokens": ENCODING.encode_text("𠜎"),
    "joined characters of two tokens": ENCODING.encode_text("👩‍👩‍👧"),
    "between letters": ENCODING.encode_text("a𠜎b"),
    "byte tokens instead of one token": [*ENCODING.encode_text(" "), 172, 253, 246, 224],
    "before the stop token": [*ENCODING.encode_text("𠜎"), RETURN],
    "before a marker": [*ENCODING.encode_text("𠜎"), END, 200006, *ENCODING.encode_text("assistant")],
    "invalid bytes": [246, 246, 13225],
    "markers and text that looks like one": [200005, *ENCODING.encode_text("<|end|>"), END],
}


@pytest.mark.parametrize("tokens", TEXTS.values(), ids=TEXTS)
async def test_missing_ids_are_restored(fake: FakeLlamaCpp, backend: LlamaCppBackend, tokens: list[int]) -> None:
    fake.script = lambda request: LlamaCppScript(tokens=tokens)
    chunks = await collect(backend)
    assert ENCODING.decode(tokens_of(chunks)) == ENCODING.decode(tokens)
    assert ENCODING.special_ids(tokens_of(chunks)) == ENCODING.special_ids(tokens)


@pytest.mark.parametrize("text", ["𠜎 ok 👩‍👩‍👧!", "完了。𠮷野家", "x😀"])
async def test_restored_ids_equal_the_generated_ids_for_common_tokenization(
    fake: FakeLlamaCpp, backend: LlamaCppBackend, text: str
) -> None:
    ids = [token for character in text for token in ENCODING.encode_text(character)]
    fake.script = lambda request: LlamaCppScript(tokens=ids)
    assert tokens_of(await collect(backend)) == ids


EVENT_CASES: dict[str, tuple[list[tuple[list[int], str]], list[int]]] = {
    "text delayed for a stop string": ([([64], ""), ([65], "ab")], [64, 65]),
    "delayed and partly emitted text": ([([64], ""), ([65], "a"), ([66], "bc")], [64, 65, 66]),
    "visible stop token": ([([RETURN], "<|return|>")], [RETURN]),
    "hidden stop token": ([([RETURN], "")], [RETURN]),
    "missing character before a hidden stop token": ([([RETURN], "é")], [*ENCODING.encode_text("é"), RETURN]),
    "missing character before a visible marker": ([([END], "é<|end|>")], [*ENCODING.encode_text("é"), END]),
    "missing text that looks like a marker": ([([62], "é<|end|>")], ENCODING.encode_text("é<|end|>")),
    "text without ids": ([([], "abc")], ENCODING.encode_text("abc")),
    "single id": ([([13225], "Hello")], [13225]),
}


@pytest.mark.parametrize(("events", "expected"), EVENT_CASES.values(), ids=EVENT_CASES)
def test_ids_of_events_match_their_text(events: list[tuple[list[int], str]], expected: list[int]) -> None:
    lost = LostIds(ENCODING)
    assert [token for tokens, content in events for token in lost.restored(tokens, content)] == expected


BYTES = [next(token for token in range(256) if ENCODING.decode_bytes([token]) == bytes([byte])) for byte in range(256)]
IDS = st.one_of(
    st.sampled_from(BYTES),
    st.sampled_from([200005, 200006, END, 200003, 13225, 64, 220]),
    st.sampled_from(ENCODING.encode_text("👩‍👩‍👧 𠜎完é<|end|>")),
)


@given(st.lists(IDS, max_size=40), st.sampled_from([None, RETURN, CALL]))
def test_restored_ids_have_the_text_and_markers_of_the_generated_ids(ids: list[int], stop: int | None) -> None:
    # Letters at the end: an incomplete character at the end of generation is never sent.
    tokens = [*ids, 64, 64, 64, *([stop] if stop else [])]
    events = LlamaCppScript(tokens=tokens).events({"prompt": [1], "n_predict": 100, "return_tokens": True})
    (chunk,) = [LlamaCppFold(FailureTable()).feed([event.removeprefix(b"data: ").strip() for event in events])]
    assert chunk is not None
    assert ENCODING.decode(chunk.tokens) == ENCODING.decode(tokens)
    assert ENCODING.special_ids(chunk.tokens) == ENCODING.special_ids(tokens)


async def test_server_without_output_ids_raises_ids_missing(fake: FakeLlamaCpp, backend: LlamaCppBackend) -> None:
    event = sse_event({"content": "Hello", "stop": False})
    fake.script = lambda request: LlamaCppScript(tokens=[1, RETURN], faults=(inject_at(0, event),))
    with pytest.raises(IdsMissing):
        await collect(backend)


# Finish reasons

FINISH_REASONS = {"eos": FinishReason.STOP, "word": FinishReason.STOP, "limit": FinishReason.LENGTH}


@pytest.mark.parametrize(("kind", "finish"), FINISH_REASONS.items(), ids=FINISH_REASONS)
async def test_last_event_has_the_finish_reason_and_usage(
    fake: FakeLlamaCpp, backend: LlamaCppBackend, kind: str, finish: FinishReason
) -> None:
    fake.script = lambda request: LlamaCppScript(tokens=[1], finish=kind, prompt_tokens=9, cached_tokens=4)
    last = (await collect(backend))[-1]
    assert (last.finish, last.prompt_tokens, last.cached_tokens, last.stop_token) == (finish, 9, 4, None)


async def test_error_line_of_older_servers_is_a_protocol_error(backend: LlamaCppBackend) -> None:
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


@pytest.mark.parametrize(("refusal", "expected", "message"), REFUSALS.values(), ids=REFUSALS)
async def test_error_response_raises_the_matching_error(
    fake: FakeLlamaCpp, backend: LlamaCppBackend, refusal: Refusal, expected: type[Exception], message: str
) -> None:
    fake.script = lambda request: refusal
    with pytest.raises(expected, match=message):
        await collect(backend)


def too_long(message: str, **fields: object) -> Refusal:
    return llamacpp_error(400, "exceed_context_size_error", message, **fields)


# The message of versions from September and October 2025, which has no numbers.
EXCEEDS = "the request exceeds the available context size, try increasing it"
COUNTS: dict[str, tuple[Refusal, tuple[int, int]]] = {
    "fields and text": (TOO_LONG, (9000, 8192)),
    "fields": (too_long(EXCEEDS, n_prompt_tokens=5000, n_ctx=4096), (5000, 4096)),
    "fields at the limit": (too_long(EXCEEDS, n_prompt_tokens=4096, n_ctx=4096), (4096, 4096)),
    "fields without counts": (too_long(EXCEEDS, n_prompt_tokens=0, n_ctx=0), (0, 0)),
    "fields with other types": (too_long(EXCEEDS, n_prompt_tokens="5000", n_ctx=True), (0, 0)),
    "neither": (too_long(EXCEEDS), (0, 0)),
}


@pytest.mark.parametrize(("refusal", "counts"), COUNTS.values(), ids=COUNTS)
async def test_a_context_error_has_the_token_counts_of_its_fields(
    fake: FakeLlamaCpp, backend: LlamaCppBackend, refusal: Refusal, counts: tuple[int, int]
) -> None:
    fake.script = lambda request: refusal
    with pytest.raises(ContextTooLong) as caught:
        await collect(backend)
    assert (caught.value.tokens, caught.value.limit) == counts


# Connections


async def test_closed_idle_connection_is_replaced_once() -> None:
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


async def test_probe_reports_the_slot_context_without_faults(backend: LlamaCppBackend) -> None:
    probe = await backend.probe()
    capabilities = probe.capabilities
    assert (capabilities.prompt, capabilities.output, capabilities.stop_visible, capabilities.context) == (
        OutputForm.IDS,
        OutputForm.IDS,
        True,
        8192,
    )
    assert probe.fatal == ()


@pytest.mark.parametrize("context", [None, "4096", -1, 0, 1.5, True])
async def test_invalid_context_size_is_none(context: object) -> None:
    async with FakeLlamaCpp(context=context) as fake:
        backend = LlamaCppBackend(BackendOptions("llamacpp", "tiny", fake.url))
        assert (await backend.probe()).capabilities.context is None
        await backend.aclose()


async def test_probe_of_a_loading_server_is_overloaded(fake: FakeLlamaCpp, backend: LlamaCppBackend) -> None:
    fake.loading = True
    with pytest.raises(BackendOverloaded):
        await backend.probe()


@pytest.mark.parametrize("properties", [{}, {"default_generation_settings": 7}, [1], "x"])
async def test_invalid_server_properties_fail_the_probe(
    fake: FakeLlamaCpp, backend: LlamaCppBackend, properties: object
) -> None:
    fake.properties = properties
    with pytest.raises(BackendProtocolError):
        await backend.probe()


async def test_foreign_tokenizer_is_a_fatal_finding(fake: FakeLlamaCpp, backend: LlamaCppBackend) -> None:
    fake.patient.encode = lambda text: [ord(character) for character in text]
    assert [finding.check for finding in (await backend.probe()).fatal] == [Check.TOKENIZER]
