"""Tests of the Ollama adapter: its routes, their probe, context size, truncated prompts."""

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
PROMPT = "<|start|>user<|message|>What is the weather in Paris?<|end|><|start|>assistant"
TURN = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Sunny."
JOB = CompletionJob(Prompt(ENCODING.encode_marked(PROMPT), PROMPT), max_tokens=500)


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
    "no markers in raw text": ({"bare": True, "version": "0.33.2"}, OutputForm.TEXT, "template", Severity.WARNING),
}


@pytest.mark.parametrize(("fields", "output", "route", "weight"), ROUTES.values(), ids=ROUTES)
async def test_probe_selects_the_route(
    fields: dict[str, Any], output: OutputForm, route: str, weight: Severity | None
) -> None:
    async with server(**fields) as (backend, fake):
        probe = await backend.probe()
        chunks = await collect(backend)
    capabilities = probe.capabilities
    assert (capabilities.prompt, capabilities.output, capabilities.stop_visible, capabilities.logit_bias) == (
        OutputForm.TEXT,
        output,
        False,
        False,
    )
    assert probe.fatal == ()
    assert finding_of(probe, Check.MARKERS).weight is weight
    assert text_of(chunks) == TURN
    assert chunks[-1].finish is FinishReason.STOP
    request = fake.requests[0].json
    assert (request.get("raw"), request.get("template")) == (
        (True, None) if route == "raw" else (None, "{{ .Prompt }}")
    )
    assert request["prompt"] == PROMPT


@pytest.mark.parametrize("attribute", ["parsed", "tells_context"])
async def test_markers_stripped_on_both_routes_are_a_warning(attribute: str) -> None:
    async with server(bare=True, version="0.33.2") as (backend, fake):
        setattr(fake.patient, attribute, False)
        probe = await backend.probe()
        assert probe.capabilities.output is OutputForm.MARKERLESS
        assert probe.fatal == ()
        assert finding_of(probe, Check.MARKERS).weight is Severity.WARNING
        assert "llama.cpp" in finding_of(probe, Check.MARKERS).remedy
        await collect(backend)
        assert fake.requests[0].json["raw"] is True


async def test_first_generation_probes_first() -> None:
    async with server() as (backend, fake):
        assert text_of(await collect(backend)) == TURN
        assert fake.probes[0].path == "/api/version"
        assert len(fake.requests) == 1


async def test_configured_route_is_not_probed() -> None:
    async with server(extra={"route": "template", "num_ctx": 8192}) as (backend, fake):
        assert text_of(await collect(backend)) == TURN
        assert fake.probes == []
        await backend.probe()
        assert all(seen.json.get("raw") is None for seen in fake.probes if seen.path == "/api/generate")


async def test_probe_is_not_repeated_for_the_same_server_and_model() -> None:
    async with server() as (backend, fake):
        first = await backend.probe()
        probe_count = len(fake.probes)
        assert await backend.probe() is first
        assert [seen.path for seen in fake.probes[probe_count:]] == ["/api/version", "/api/show"]


CHANGES: dict[str, tuple[str, Any]] = {
    "another version": ("version", {"version": "0.33.2"}),
    "another model": ("shown", {"modified_at": "2026-11-19T00:00:00Z", "model_info": None}),
}


@pytest.mark.parametrize(("attribute", "value"), CHANGES.values(), ids=CHANGES)
async def test_probe_is_repeated_for_another_version_or_model(attribute: str, value: Any) -> None:
    async with server() as (backend, fake):
        assert (await backend.probe()).capabilities.output is OutputForm.TEXT
        setattr(fake, attribute, value)
        fake.patient.bare = True
        assert finding_of(await backend.probe(), Check.MARKERS).weight is Severity.WARNING


FAILURES: dict[str, tuple[Refusal, bool]] = {
    "crashed runner": (Refusal(500, b'{"error":"model runner has unexpectedly stopped"}'), True),
    "busy": (Refusal(503, b'{"error":"server busy, please try again"}'), False),
    "rejected request": (Refusal(400, b'{"error":"invalid options"}'), False),
}


@pytest.mark.parametrize(("refusal", "is_reset"), FAILURES.values(), ids=FAILURES)
async def test_server_failure_causes_a_new_probe(refusal: Refusal, is_reset: bool) -> None:
    async with server() as (backend, fake):
        first = await backend.probe()
        fake.script = lambda request: refusal
        with pytest.raises(BackendError):
            await collect(backend)
        assert (await backend.probe() is not first) is is_reset


# The template route

OUTPUTS: dict[str, str] = {
    "two messages": TURN,
    "tool call": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>" + '{"a": "<|end|>"}',
    "recipient before the channel": ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}',
    "channel name directly after the role": "commentary to=functions.f<|message|>{}",
    "repeated role": "<|start|>assistant<|channel|>final<|message|>ok",
    "empty": "",
    "scripts and emoji": "<|channel|>final<|message|>完了 👩‍👩‍👧 𠜎",
}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
async def test_last_line_contains_the_whole_raw_output(output: str) -> None:
    extra = {"route": "template", "num_ctx": 8192}
    async with server(text=output, bare=True, extra=extra) as (backend, _):
        chunks = await collect(backend)
    assert text_of(chunks) == output
    assert [chunk.text for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)


async def test_open_message_is_continued() -> None:
    prompt = PROMPT + "<|channel|>final<|message|>The weather is sun"
    job = CompletionJob(Prompt(ENCODING.encode_marked(prompt), prompt), max_tokens=50)
    async with server(text="ny today.", extra={"route": "template", "num_ctx": 8192}) as (backend, _):
        assert text_of(await collect(backend, job)) == "ny today."


async def test_parser_error_of_the_server_is_a_protocol_error_without_output() -> None:
    error = b'{"error": "error parsing tool call: raw=\'{broken\', err=unexpected end of JSON input"}\n'
    extra = {"route": "template", "num_ctx": 8192}
    async with server(faults=(inject_at(3, error),), extra=extra) as (backend, _):
        with pytest.raises(BackendProtocolError) as caught:
            await collect(backend)
    assert "broken" not in caught.value.message
    assert "broken" in str(caught.value.__cause__)


async def test_output_that_only_the_last_line_contains_is_delivered() -> None:
    async with server(thinks=False, extra={"route": "template", "num_ctx": 8192}) as (backend, _):
        assert text_of(await collect(backend)) == TURN


# Requests


async def test_every_option_is_sent_and_modelfile_stop_strings_are_disabled() -> None:
    async with server(extra={"route": "raw", "num_ctx": 16384, "keep_alive": "30m"}) as (backend, fake):
        await collect(backend, CompletionJob(JOB.prompt, 77, Sampling(0.3, seed=7)))
    request = fake.requests[0].json
    assert request == request | {"model": "gpt-oss:20b", "truncate": False, "shift": False, "keep_alive": "30m"}
    assert request["options"] == request["options"] | {
        "num_ctx": 16384, "num_predict": 77, "temperature": 0.3, "seed": 7, "repeat_penalty": 1.0, "stop": [],
    }  # fmt: skip


NUM_CTX: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "configured": ({"num_ctx": 65536}, {}, 65536),
    "from the Modelfile": ({}, {"parameters": 'stop    "x"\nnum_ctx                        16384\ntop_k 5'}, 16384),
    "from the model, capped": ({}, {"model_info": {"gptoss.context_length": 131072}}, MAX_DEFAULT_NUM_CTX),
    "from a small model": ({}, {"model_info": {"gptoss.context_length": 4096}}, 4096),
    "unknown": ({}, {"model_info": None}, MAX_DEFAULT_NUM_CTX),
    "wrong type": ({}, {"model_info": {"gptoss.context_length": "many"}}, MAX_DEFAULT_NUM_CTX),
}


@pytest.mark.parametrize(("extra", "model_info", "num_ctx"), NUM_CTX.values(), ids=NUM_CTX)
async def test_every_request_of_a_deployment_has_the_same_num_ctx(
    extra: dict[str, Any], model_info: dict[str, Any], num_ctx: int
) -> None:
    async with server(extra=extra) as (backend, fake):
        fake.shown = {"modified_at": "2026-11-01", **model_info}
        assert (await backend.probe()).capabilities.context == num_ctx
        await collect(backend)
        generations = [seen for seen in (*fake.probes, *fake.requests) if seen.path == "/api/generate"]
    assert {seen.json["options"]["num_ctx"] for seen in generations} == {num_ctx}


# Truncated prompts

LONG_PROMPT_TEXT = "<|start|>user<|message|>" + "word " * 3000 + "<|end|><|start|>assistant"
LONG_JOB = CompletionJob(Prompt(ENCODING.encode_marked(LONG_PROMPT_TEXT), LONG_PROMPT_TEXT), max_tokens=500)
TRUNCATION_CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "full count": ({}, False),
    "fewer": ({"prompt_tokens": 2048}, True),
    "fewer, with cached tokens": ({"prompt_tokens": 2048, "cached_tokens": 2000, "version": "0.34.0"}, True),
    "fewer, possibly only uncached tokens": ({"prompt_tokens": 2048, "version": "0.30.0"}, False),
    "zero, as for a cached prompt": ({"prompt_tokens": 0}, False),
    "no count": ({"prompt_tokens": None}, False),
    "impossible count": ({"prompt_tokens": -5}, False),
}


@pytest.mark.parametrize(("script", "is_truncated"), TRUNCATION_CASES.values(), ids=TRUNCATION_CASES)
@pytest.mark.parametrize("bare", [False, True], ids=["raw", "template"])
async def test_truncated_prompt_is_a_protocol_error(script: dict[str, Any], is_truncated: bool, bare: bool) -> None:
    async with server(bare=bare, **script) as (backend, _):
        await backend.probe()
        if not is_truncated:
            assert text_of(await collect(backend, LONG_JOB)) == TURN
            return
        with pytest.raises(BackendProtocolError, match="num_ctx"):
            await collect(backend, LONG_JOB)


async def test_fewer_prompt_tokens_for_the_same_text_are_no_truncation() -> None:
    # The history may contain ids that no tokenizer would choose for their text.
    letter_tokens = [token for letter in "weather" * 50 for token in ENCODING.encode_text(letter)]
    job = CompletionJob(Prompt([*JOB.prompt.tokens, *letter_tokens], PROMPT + "weather" * 50), max_tokens=5)
    async with server(extra={"route": "raw", "num_ctx": 8192}, version="0.24.0") as (backend, _):
        await backend.probe()
        await collect(backend, job)


async def test_truncating_server_is_a_fatal_finding_until_it_is_fixed() -> None:
    async with server() as (backend, fake):
        fake.patient.cuts_at = LONG_PROMPT // 2
        probe = await backend.probe()
        assert [finding.check for finding in probe.fatal] == [Check.PROMPT_WHOLE]
        fake.patient.cuts_at = None
        assert (await backend.probe()).fatal == ()


# Failures

REFUSALS: dict[str, tuple[Refusal, type[Exception], str]] = {
    "unknown model": (Refusal(404, b'{"error":"model \'gpt-oss:20b\' not found"}'), BackendError, "does not have"),
    "context exceeded": (
        Refusal(400, b'{"error":"the input length exceeds the context length"}'), ContextTooLong, "context",
    ),
    "context exceeded, llama-server error": (
        Refusal(400, b'{"error":"{\\"error\\":{\\"code\\":400,\\"message\\":\\"request exceeds the available context '
                b'size\\"}}"}'), ContextTooLong, "context",
    ),
    "context exceeded, in a 200": (
        Refusal(200, b'{"error":"the input length exceeds the context length","status":400}\n',
                "application/x-ndjson"), ContextTooLong, "context",
    ),
    "crashed runner": (
        Refusal(200, b'{"error":"model runner has unexpectedly stopped"}\n', "application/x-ndjson"),
        BackendProtocolError, "error",
    ),
}  # fmt: skip


@pytest.mark.parametrize("route", ["raw", "template"])
@pytest.mark.parametrize(("refusal", "expected", "message"), REFUSALS.values(), ids=REFUSALS)
async def test_error_response_raises_the_matching_error(
    refusal: Refusal, expected: type[Exception], message: str, route: str
) -> None:
    async with server(extra={"route": route, "num_ctx": 8192}) as (backend, fake):
        fake.script = lambda request: refusal
        with pytest.raises(expected, match=message) as caught:
            await collect(backend)
        assert type(caught.value) is expected


async def test_repetitive_stream_without_a_final_event_is_a_protocol_error() -> None:
    # Ollama before 0.30 ends a repetitive stream without a final event.
    async with server(pieces=["<|channel|>", *["la "] * 31], faults=(without_done,)) as (backend, _):
        with pytest.raises(BackendProtocolError):
            await collect(backend)


@pytest.mark.parametrize("version", [{"version": 7}, [1], "0.24"])
async def test_invalid_version_response_fails_the_probe(version: object) -> None:
    async with server() as (backend, fake):
        fake.version = version
        with pytest.raises(BackendProtocolError):
            await backend.probe()


async def test_unreachable_server_is_unavailable() -> None:
    backend = OllamaBackend(BackendOptions("ollama", "gpt-oss:20b", "http://127.0.0.1:9"))
    with pytest.raises(BackendUnavailable):
        await collect(backend)
    await backend.aclose()


# Options

INVALID_OPTIONS: dict[str, dict[str, Any]] = {
    "zero num_ctx": {"num_ctx": 0},
    "string num_ctx": {"num_ctx": "8192"},
    "boolean num_ctx": {"num_ctx": True},
    "unknown route": {"route": "chat"},
    "fallback-only route": {"route": "markerless"},
    "list as keep_alive": {"keep_alive": [1]},
}


@pytest.mark.parametrize("extra", INVALID_OPTIONS.values(), ids=INVALID_OPTIONS)
def test_invalid_option_is_a_config_error_with_its_key(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^litellm_params\.{next(iter(extra))}: "):
        OllamaBackend(BackendOptions("ollama", "gpt-oss:20b", "http://mac:11434", extra=extra))
