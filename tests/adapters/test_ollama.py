"""Ollama's own ways: two routes and the probe between them, a context that must not change, prompts cut in silence."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fakes import Refusal, inject_at, without_done
from tests.fakes.ollama import FakeOllama
from unisono.core.generation import Chunk, CompletionJob, FinishReason, OutputForm, Prompt, Sampling
from unisono.core.ports import BackendOptions
from unisono.core.probe import Check, Finding, Probe, Severity
from unisono.errors import (
    BackendError,
    BackendProtocolError,
    BackendUnavailable,
    ConfigError,
    ContextTooLong,
)
from unisono.harmony.encoding import load_encoding
from unisono_adapters.ollama import LONG_PROMPT, MAX_DEFAULT_NUM_CTX, OllamaBackend

ENCODING = load_encoding()
ASKED = "<|start|>user<|message|>What is the weather in Paris?<|end|><|start|>assistant"
TURN = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Sunny."
JOB = CompletionJob(Prompt(ENCODING.encode_marked(ASKED), ASKED), max_tokens=500)


@asynccontextmanager
async def server(*, extra: dict[str, Any] | None = None, **fields: Any) -> AsyncIterator[tuple[OllamaBackend, Any]]:
    async with FakeOllama(**{"text": TURN, **fields}) as fake:
        backend = OllamaBackend(BackendOptions("ollama", "gpt-oss:20b", fake.url, extra=extra or {}))
        try:
            yield backend, fake
        finally:
            await backend.aclose()


async def collect(backend: OllamaBackend, job: CompletionJob = JOB) -> list[Chunk]:
    return [chunk async for chunk in backend.complete(job)]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def finding_of(probe: Probe, check: Check) -> Finding:
    return next(finding for finding in probe.findings if finding.check is check)


# Routes

ROUTES: dict[str, tuple[dict[str, Any], OutputForm, str, Severity | None]] = {
    "markers in raw text": ({}, OutputForm.TEXT, "raw", None),
    "none in raw text": ({"bare": True, "version": "0.33.2"}, OutputForm.TEXT, "template", Severity.WARNING),
}


@pytest.mark.parametrize(("fake_is", "output", "route", "weight"), ROUTES.values(), ids=ROUTES)
async def test_the_probe_decides_the_route(
    fake_is: dict[str, Any], output: OutputForm, route: str, weight: Severity | None
) -> None:
    async with server(**fake_is) as (backend, fake):
        found = await backend.probe()
        chunks = await collect(backend)
    able = found.capabilities
    assert (able.prompt, able.output, able.stop_visible, able.logit_bias) == (OutputForm.TEXT, output, False, False)
    assert found.fatal == ()
    assert finding_of(found, Check.MARKERS).weight is weight
    assert text_of(chunks) == TURN
    assert chunks[-1].finish is FinishReason.STOP
    asked = fake.requests[0].json
    assert (asked.get("raw"), asked.get("template")) == ((True, None) if route == "raw" else (None, "{{ .Prompt }}"))
    assert asked["prompt"] == ASKED


@pytest.mark.parametrize("because", ["parsed", "tells_context"])
async def test_markers_stripped_on_both_routes_are_told_and_lived_with(because: str) -> None:
    async with server(bare=True, version="0.33.2") as (backend, fake):
        setattr(fake.patient, because, False)
        found = await backend.probe()
        assert found.capabilities.output is OutputForm.MARKERLESS
        assert found.fatal == ()
        assert finding_of(found, Check.MARKERS).weight is Severity.WARNING
        assert "llama.cpp" in finding_of(found, Check.MARKERS).remedy
        await collect(backend)
        assert fake.requests[0].json["raw"] is True


async def test_a_generation_before_any_probe_examines_first() -> None:
    async with server() as (backend, fake):
        assert text_of(await collect(backend)) == TURN
        assert fake.probes[0].path == "/api/version"
        assert len(fake.requests) == 1


async def test_a_route_that_is_configured_is_not_decided_again() -> None:
    async with server(extra={"route": "template", "num_ctx": 8192}) as (backend, fake):
        assert text_of(await collect(backend)) == TURN
        assert fake.probes == []
        await backend.probe()
        assert all(seen.json.get("raw") is None for seen in fake.probes if seen.path == "/api/generate")


async def test_nothing_is_generated_again_while_server_and_model_are_the_same() -> None:
    async with server() as (backend, fake):
        first = await backend.probe()
        asked = len(fake.probes)
        assert await backend.probe() is first
        assert [seen.path for seen in fake.probes[asked:]] == ["/api/version", "/api/show"]


CHANGES: dict[str, tuple[str, Any]] = {
    "another version": ("version", {"version": "0.33.2"}),
    "another model": ("shown", {"modified_at": "2026-11-19T00:00:00Z", "model_info": None}),
}


@pytest.mark.parametrize(("what", "now"), CHANGES.values(), ids=CHANGES)
async def test_another_version_or_model_is_examined_again(what: str, now: Any) -> None:
    async with server() as (backend, fake):
        assert (await backend.probe()).capabilities.output is OutputForm.TEXT
        setattr(fake, what, now)
        fake.patient.bare = True
        assert finding_of(await backend.probe(), Check.MARKERS).weight is Severity.WARNING


FAILURES: dict[str, tuple[Refusal, bool]] = {
    "a dead runner": (Refusal(500, b'{"error":"model runner has unexpectedly stopped"}'), True),
    "too much to do": (Refusal(503, b'{"error":"server busy, please try again"}'), False),
    "a request it rejects": (Refusal(400, b'{"error":"invalid options"}'), False),
}


@pytest.mark.parametrize(("refusal", "again"), FAILURES.values(), ids=FAILURES)
async def test_a_failure_makes_the_next_probe_look_again(refusal: Refusal, again: bool) -> None:
    async with server() as (backend, fake):
        first = await backend.probe()
        fake.script = lambda asked: refusal
        with pytest.raises(BackendError):
            await collect(backend)
        assert (await backend.probe() is not first) is again


# The template route

OUTPUTS: dict[str, str] = {
    "a turn": TURN,
    "a call": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>" + '{"a": "<|end|>"}',
    "a recipient first": ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}',
    "a word glued to the prompt's last": "commentary to=functions.f<|message|>{}",
    "the role again": "<|start|>assistant<|channel|>final<|message|>ok",
    "nothing": "",
    "scripts and emoji": "<|channel|>final<|message|>完了 👩‍👩‍👧 𠜎",
}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
async def test_the_last_line_holds_the_whole_raw_turn(output: str) -> None:
    extra = {"route": "template", "num_ctx": 8192}
    async with server(text=output, bare=True, extra=extra) as (backend, _):
        chunks = await collect(backend)
    assert text_of(chunks) == output
    assert [chunk.text for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)


async def test_an_open_message_is_continued_where_it_was_left() -> None:
    asked = ASKED + "<|channel|>final<|message|>The weather is sun"
    job = CompletionJob(Prompt(ENCODING.encode_marked(asked), asked), max_tokens=50)
    async with server(text="ny today.", extra={"route": "template", "num_ctx": 8192}) as (backend, _):
        assert text_of(await collect(backend, job)) == "ny today."


async def test_its_parser_may_fail_over_the_models_json() -> None:
    error = b'{"error": "error parsing tool call: raw=\'{broken\', err=unexpected end of JSON input"}\n'
    extra = {"route": "template", "num_ctx": 8192}
    async with server(faults=(inject_at(3, error),), extra=extra) as (backend, _):
        with pytest.raises(BackendProtocolError) as caught:
            await collect(backend)
    assert "broken" not in caught.value.message
    assert "broken" in str(caught.value.__cause__)


async def test_a_turn_of_which_nothing_is_told_before_its_end_arrives() -> None:
    async with server(thinks=False, extra={"route": "template", "num_ctx": 8192}) as (backend, _):
        assert text_of(await collect(backend)) == TURN


# What is asked


async def test_every_option_is_sent_and_stop_strings_of_the_modelfile_are_off() -> None:
    async with server(extra={"route": "raw", "num_ctx": 16384, "keep_alive": "30m"}) as (backend, fake):
        await collect(backend, CompletionJob(JOB.prompt, 77, Sampling(0.3, seed=7)))
    asked = fake.requests[0].json
    assert asked == asked | {"model": "gpt-oss:20b", "truncate": False, "shift": False, "keep_alive": "30m"}
    assert asked["options"] == asked["options"] | {
        "num_ctx": 16384, "num_predict": 77, "temperature": 0.3, "seed": 7, "repeat_penalty": 1.0, "stop": [],
    }  # fmt: skip


NUM_CTX: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "configured": ({"num_ctx": 65536}, {}, 65536),
    "of the Modelfile": ({}, {"parameters": 'stop    "x"\nnum_ctx                        16384\ntop_k 5'}, 16384),
    "of the model, capped": ({}, {"model_info": {"gptoss.context_length": 131072}}, MAX_DEFAULT_NUM_CTX),
    "of a small model": ({}, {"model_info": {"gptoss.context_length": 4096}}, 4096),
    "not told": ({}, {"model_info": None}, MAX_DEFAULT_NUM_CTX),
    "told in another type": ({}, {"model_info": {"gptoss.context_length": "many"}}, MAX_DEFAULT_NUM_CTX),
}


@pytest.mark.parametrize(("extra", "shown", "num_ctx"), NUM_CTX.values(), ids=NUM_CTX)
async def test_one_context_per_deployment(extra: dict[str, Any], shown: dict[str, Any], num_ctx: int) -> None:
    async with server(extra=extra) as (backend, fake):
        fake.shown = {"modified_at": "2026-11-01", **shown}
        assert (await backend.probe()).capabilities.context == num_ctx
        await collect(backend)
        generations = [seen for seen in (*fake.probes, *fake.requests) if seen.path == "/api/generate"]
    assert {seen.json["options"]["num_ctx"] for seen in generations} == {num_ctx}


# Prompts cut in silence

LONG = "<|start|>user<|message|>" + "word " * 3000 + "<|end|><|start|>assistant"
LONG_JOB = CompletionJob(Prompt(ENCODING.encode_marked(LONG), LONG), max_tokens=500)
CUT: dict[str, tuple[dict[str, Any], bool]] = {
    "a whole count": ({}, False),
    "fewer": ({"prompt_tokens": 2048}, True),
    "fewer, some of them cached": ({"prompt_tokens": 2048, "cached_tokens": 2000, "version": "0.34.0"}, True),
    "fewer, and it may mean what was not cached": ({"prompt_tokens": 2048, "version": "0.30.0"}, False),
    "none, as for a prompt that was all cached": ({"prompt_tokens": 0}, False),
    "no count": ({"prompt_tokens": None}, False),
    "a count that cannot be": ({"prompt_tokens": -5}, False),
}


@pytest.mark.parametrize(("script", "cut"), CUT.values(), ids=CUT)
@pytest.mark.parametrize("bare", [False, True], ids=["raw", "template"])
async def test_a_prompt_that_is_cut_without_a_word_fails_its_answer(
    script: dict[str, Any], cut: bool, bare: bool
) -> None:
    async with server(bare=bare, **script) as (backend, _):
        await backend.probe()
        if not cut:
            assert text_of(await collect(backend, LONG_JOB)) == TURN
            return
        with pytest.raises(BackendProtocolError, match="num_ctx"):
            await collect(backend, LONG_JOB)


async def test_text_that_is_fewer_tokens_than_were_rendered_is_no_cut() -> None:
    # History may hold ids no tokenizer would choose for their text.
    spelled = [token for letter in "weather" * 50 for token in ENCODING.encode_text(letter)]
    job = CompletionJob(Prompt([*JOB.prompt.tokens, *spelled], ASKED + "weather" * 50), max_tokens=5)
    async with server(extra={"route": "raw", "num_ctx": 8192}, version="0.24.0") as (backend, _):
        await backend.probe()
        await collect(backend, job)


async def test_a_server_that_cuts_prompts_is_not_used() -> None:
    async with server() as (backend, fake):
        fake.patient.cuts_at = LONG_PROMPT // 2
        found = await backend.probe()
        assert [finding.check for finding in found.fatal] == [Check.PROMPT_WHOLE]
        fake.patient.cuts_at = None
        assert (await backend.probe()).fatal == ()


# Failures

REFUSALS: dict[str, tuple[Refusal, type[Exception], str]] = {
    "an unknown model": (Refusal(404, b'{"error":"model \'gpt-oss:20b\' not found"}'), BackendError, "does not have"),
    "too long": (
        Refusal(400, b'{"error":"the input length exceeds the context length"}'), ContextTooLong, "context",
    ),
    "too long, as llama-server says it": (
        Refusal(400, b'{"error":"{\\"error\\":{\\"code\\":400,\\"message\\":\\"request exceeds the available context '
                b'size\\"}}"}'), ContextTooLong, "context",
    ),
    "too long, under 200": (
        Refusal(200, b'{"error":"the input length exceeds the context length","status":400}\n',
                "application/x-ndjson"), ContextTooLong, "context",
    ),
    "a dead runner": (
        Refusal(200, b'{"error":"model runner has unexpectedly stopped"}\n', "application/x-ndjson"),
        BackendProtocolError, "error",
    ),
}  # fmt: skip


@pytest.mark.parametrize("route", ["raw", "template"])
@pytest.mark.parametrize(("refusal", "expected", "said"), REFUSALS.values(), ids=REFUSALS)
async def test_what_it_refuses_is_an_error_of_its_kind(
    refusal: Refusal, expected: type[Exception], said: str, route: str
) -> None:
    async with server(extra={"route": route, "num_ctx": 8192}) as (backend, fake):
        fake.script = lambda asked: refusal
        with pytest.raises(expected, match=said) as caught:
            await collect(backend)
        assert type(caught.value) is expected


async def test_thirty_equal_chunks_and_then_silence_are_no_end() -> None:
    # What Ollama below 0.30 does about repetition: the stream ends, and says nothing.
    async with server(pieces=["<|channel|>", *["la "] * 31], faults=(without_done,)) as (backend, _):
        with pytest.raises(BackendProtocolError):
            await collect(backend)


@pytest.mark.parametrize("said", [{"version": 7}, [1], "0.24"])
async def test_what_is_not_ollama_fails_the_probe(said: object) -> None:
    async with server() as (backend, fake):
        fake.version = said
        with pytest.raises(BackendProtocolError):
            await backend.probe()


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    backend = OllamaBackend(BackendOptions("ollama", "gpt-oss:20b", "http://127.0.0.1:9"))
    with pytest.raises(BackendUnavailable):
        await collect(backend)
    await backend.aclose()


# Options

WRONG: dict[str, dict[str, Any]] = {
    "a context of nothing": {"num_ctx": 0},
    "a context of text": {"num_ctx": "8192"},
    "a context that is a truth": {"num_ctx": True},
    "an unknown route": {"route": "chat"},
    "a route we only fall back to": {"route": "markerless"},
    "an endless list to keep": {"keep_alive": [1]},
}


@pytest.mark.parametrize("extra", WRONG.values(), ids=WRONG)
def test_options_that_cannot_work_fail_at_start_and_name_the_key(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^litellm_params\.{next(iter(extra))}: "):
        OllamaBackend(BackendOptions("ollama", "gpt-oss:20b", "http://mac:11434", extra=extra))
