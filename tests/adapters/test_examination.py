"""Tests of the probe of a backend: each fault is found, named and reported with a remedy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.fakes import FakeMlxServer, FakeVllm, Patient, Refusal
from unisono.core.generation import (
    CONSTRAINT_KINDS,
    TEXT_KINDS,
    Capabilities,
    Chunk,
    CompletionJob,
    FinishReason,
    OutputForm,
)
from unisono.core.ports import Backend, BackendOptions
from unisono.core.probe import MEANINGS, Check, Finding, Probe, Severity, unreached
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendProtocolError,
    BackendTimeout,
    BackendUnavailable,
)
from unisono.harmony.encoding import load_encoding
from unisono_adapters import _probe
from unisono_adapters._probe import Subject, examine
from unisono_adapters.mlx.mlx_server_backend import MlxServerBackend
from unisono_adapters.vllm import VllmBackend

CANARY = "/srv/models/secret at http://10.1.2.3:8000"


@asynccontextmanager
async def vllm(patient: Patient) -> AsyncIterator[tuple[Backend, FakeVllm]]:
    async with FakeVllm() as fake:
        fake.patient = patient
        backend = VllmBackend(BackendOptions("vllm", "tiny", fake.url))
        try:
            yield backend, fake
        finally:
            await backend.aclose()


@asynccontextmanager
async def mlx_server(patient: Patient) -> AsyncIterator[tuple[Backend, FakeMlxServer]]:
    async with FakeMlxServer() as fake:
        fake.patient = patient
        backend = MlxServerBackend(BackendOptions("mlx_server", "tiny", fake.url))
        try:
            yield backend, fake
        finally:
            await backend.aclose()


SERVERS: dict[str, Callable[[Patient], Any]] = {"vllm": vllm, "mlx_server": mlx_server}


async def probe_of(server: str, patient: Patient) -> Probe:
    async with SERVERS[server](patient) as (backend, _):
        probe: Probe = await backend.probe()
        return probe


def severities(probe: Probe) -> dict[Check, Severity | None]:
    return {finding.check: finding.weight for finding in probe.findings}


# Sound backends


async def test_sound_vllm_passes_every_check() -> None:
    probe = await probe_of("vllm", Patient())
    assert severities(probe) == {
        Check.MODEL: None,
        Check.GENERATION: None,
        Check.TOKENIZER: None,
        Check.IDS_IN: None,
        Check.IDS_OUT: None,
        Check.MARKERS: None,
        Check.STOPS: None,
        Check.STOP_TOKEN: None,
        Check.PROMPT_WHOLE: None,
        Check.CONTEXT: None,
        Check.CONSTRAIN: None,
        Check.SCORES: None,
    }
    assert probe.capabilities.constrain == {*CONSTRAINT_KINDS, *TEXT_KINDS}
    assert probe.first_token_s is not None
    assert 0 < probe.first_token_s < 5
    assert probe.capabilities.stop_visible


async def test_sound_mlx_server_passes_with_warnings_of_its_kind() -> None:
    probe = await probe_of("mlx_server", Patient())
    assert severities(probe) == {
        Check.GENERATION: None,
        Check.TOKENIZER: None,
        Check.MARKERS: None,
        Check.STOPS: None,
        Check.STOP_TOKEN: Severity.NOTE,
        Check.TYPED_MARKERS: Severity.WARNING,
        Check.CONTEXT: Severity.WARNING,
        Check.CONSTRAIN: Severity.NOTE,
    }
    assert not probe.capabilities.stop_visible


@pytest.mark.parametrize("server", SERVERS)
async def test_probe_generates_few_tokens_greedily_with_marked_request_ids(server: str) -> None:
    async with SERVERS[server](Patient()) as (backend, fake):
        await backend.probe()
        generations = [seen.json for seen in fake.probes if seen.path == "/v1/completions"]
        request_ids = [seen.headers["x-request-id"] for seen in fake.probes if seen.path == "/v1/completions"]
        assert fake.requests == []
    assert len(generations) <= 10
    assert sum(request["max_tokens"] for request in generations) <= 41
    assert {request["temperature"] for request in generations} == {0.0}
    assert "seed" not in generations[0]
    assert len(set(request_ids)) == len(request_ids)
    assert all(request_id.startswith("unisono-probe") for request_id in request_ids)


async def test_tokenizer_is_judged_by_output_without_a_tokenize_endpoint() -> None:
    assert severities(await probe_of("vllm", Patient(tokenizes=False)))[Check.TOKENIZER] is None
    probe = await probe_of("vllm", Patient(tokenizes=False, answer="Sure! Here is the OK."))
    assert severities(probe)[Check.TOKENIZER] is Severity.FATAL


# Faults


def encode_characters(text: str) -> list[int]:
    """Encode each character separately, like a vocabulary with other merges."""
    return [token for piece in text for token in load_encoding().encode_text(piece)]


def encode_markers_as_text(text: str) -> list[int]:
    return load_encoding().encode_text(text)


def encode_with_start_token(text: str) -> list[int]:
    return [199998, *load_encoding().encode_as_server(text)]


@dataclass(frozen=True)
class Case:
    server: str
    patient: Callable[[], Patient]
    check: Check
    severity: Severity = Severity.FATAL
    expected_text: str = ""


FAULTS: dict[str, Case] = {
    "another vocabulary": Case(
        "vllm", lambda: Patient(encode=encode_characters), Check.TOKENIZER, expected_text="instead of [200006"
    ),
    "markers are not tokens": Case("vllm", lambda: Patient(encode=encode_markers_as_text), Check.TOKENIZER),
    "extra start token": Case("vllm", lambda: Patient(encode=encode_with_start_token), Check.TOKENIZER),
    "another vocabulary, by counts": Case(
        "mlx_server", lambda: Patient(encode=encode_characters), Check.TOKENIZER, expected_text="instead of 7"
    ),
    "markers are not tokens, by counts": Case(
        "mlx_server", lambda: Patient(encode=encode_markers_as_text), Check.TOKENIZER, expected_text="the seven markers"
    ),
    "extra start token, by counts": Case(
        "mlx_server", lambda: Patient(encode=encode_with_start_token), Check.TOKENIZER, expected_text="counts 8 tokens"
    ),
    "markers stripped": Case(
        "mlx_server", lambda: Patient(strips_markers=True), Check.MARKERS, expected_text="'analysis"
    ),
    "no Harmony output": Case(
        "mlx_server", lambda: Patient(answer="Sure! Here it is."), Check.MARKERS, expected_text="'Sure!"
    ),
    "truncated prompt": Case(
        "vllm", lambda: Patient(reads_at_most=7), Check.PROMPT_WHOLE, expected_text="reports 7 prompt tokens"
    ),
    "ids converted to text": Case(
        "vllm", lambda: Patient(rewrites_ids=True), Check.IDS_IN, expected_text="prompt tokens"
    ),
    "no output ids": Case("vllm", lambda: Patient(returns_ids=False), Check.IDS_OUT, expected_text="text only"),
    "no token": Case("vllm", lambda: Patient(hangs=True), Check.GENERATION, expected_text="sent no token within 0.2 s"),
    "no token, text backend": Case(
        "mlx_server", lambda: Patient(hangs=True), Check.GENERATION, expected_text="sent no token"
    ),
    "empty output": Case("mlx_server", lambda: Patient(answer="", stops_at=[200002]), Check.GENERATION),
    "unknown model during generation": Case(
        "vllm",
        lambda: Patient(refusal=Refusal(404, b'{"error": {"message": "no such model"}}')),
        Check.GENERATION,
        expected_text="does not have the configured model",
    ),
    "internal failure": Case(
        "mlx_server",
        lambda: Patient(refusal=Refusal(404, b'{"error": "No safetensors in ' + CANARY.encode() + b'"}', version=0)),
        Check.GENERATION,
        expected_text="failed during generation",
    ),
    "continues after a call": Case(
        "vllm", lambda: Patient(stops_at=[200002, 199999]), Check.STOPS, expected_text="continues after <|call|>"
    ),
    "continues after a call, text backend": Case(
        "mlx_server", lambda: Patient(stops_at=[200002, 199999]), Check.STOPS, expected_text="continues after <|call|>"
    ),
    "ignored constraints": Case(
        "vllm",
        lambda: Patient(constrains=False),
        Check.CONSTRAIN,
        Severity.WARNING,
        expected_text="does not enforce: choice",
    ),
    "hidden stop token": Case("vllm", lambda: Patient(hides_stops=True), Check.STOP_TOKEN, Severity.WARNING),
}


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS)
async def test_fault_is_reported_with_its_remedy(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_probe, "FIRST_TOKEN_S", 0.2)
    probe = await probe_of(case.server, case.patient())
    found = {finding.check: finding for finding in probe.findings}
    assert found[case.check].weight is case.severity
    assert case.expected_text in found[case.check].text
    assert found[case.check].advises
    assert bool(probe.fatal) is (case.severity is Severity.FATAL)
    assert [finding.check for finding in probe.fatal] == ([case.check] if probe.fatal else [])
    text = " ".join(finding.text + finding.advises for finding in probe.findings)
    assert "/srv" not in text
    assert "10.1.2.3" not in text


async def test_ignored_constraints_are_not_claimed() -> None:
    assert (await probe_of("vllm", Patient(constrains=False))).capabilities.constrain == frozenset()


async def test_hidden_stop_token_is_reported_in_the_capabilities() -> None:
    assert (await probe_of("vllm", Patient(hides_stops=True))).capabilities.stop_visible is False


async def test_finding_contains_the_error_message_of_the_backend() -> None:
    refusal = Refusal(404, b'{"error": "No safetensors in /srv/models"}', version=0)
    (finding,) = (await probe_of("mlx_server", Patient(refusal=refusal))).fatal
    assert "/srv/models" in finding.backend_message


@pytest.mark.parametrize("server", SERVERS)
async def test_ignored_or_refused_bias_is_no_finding_about_stops(server: str) -> None:
    probe = await probe_of(server, Patient(takes_bias=False))
    assert Check.STOPS not in severities(probe)
    assert probe.fatal == ()


COUNTS: dict[str, object] = {"0": 0, "-1": -1, "10**9": 10**9, "string": "12", "null string": "null"}


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
async def test_impossible_prompt_count_is_no_finding(count: object) -> None:
    probe = await probe_of("vllm", Patient(claims=count))
    assert {Check.IDS_IN, Check.PROMPT_WHOLE}.isdisjoint(severities(probe))
    assert probe.fatal == ()


# Errors that are not faults

TEMPORARY_ERRORS: dict[str, tuple[Refusal, type[BackendError]]] = {
    "overloaded": (Refusal(503, b'{"error": "overloaded"}'), BackendOverloaded),
    "rate limit": (Refusal(429, b'{"error": "slow down"}'), BackendOverloaded),
    "wrong key": (Refusal(401, b'{"error": "Unauthorized"}'), BackendUnavailable),
}


@pytest.mark.parametrize(("refusal", "raised"), TEMPORARY_ERRORS.values(), ids=TEMPORARY_ERRORS)
async def test_busy_or_unauthorized_backend_raises_instead_of_a_finding(
    refusal: Refusal, raised: type[BackendError]
) -> None:
    with pytest.raises(raised):
        await probe_of("vllm", Patient(refusal=refusal))


@pytest.mark.parametrize("server", SERVERS)
async def test_cancelled_probe_closes_its_connection(server: str) -> None:
    async with SERVERS[server](Patient(hangs=True)) as (backend, fake):
        probe = asyncio.create_task(backend.probe())
        async with asyncio.timeout(5):
            while not fake.patient.generations:
                await asyncio.sleep(0.001)
        probe.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probe
        async with asyncio.timeout(1):
            while fake.open:
                await asyncio.sleep(0.001)


# Scripted backends

CLAIMS = Capabilities(OutputForm.TEXT, OutputForm.TEXT, stop_visible=False, context=4096)


class Scripted:
    """Text backend in this process: scripted output and a scripted count of prompt tokens."""

    def __init__(self, *texts: str, reads: Callable[[int], int | None] = lambda tokens: tokens) -> None:
        self._texts = texts
        self._reads = reads
        self.jobs: list[CompletionJob] = []

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs.append(job)
        yield Chunk(text=self._texts[min(len(self.jobs), len(self._texts)) - 1])
        yield Chunk(finish=FinishReason.LENGTH, prompt_tokens=self._reads(len(job.prompt.tokens)))


LONG_PROMPTS: dict[str, tuple[Callable[[int], int | None], Severity | None]] = {
    "whole": (lambda tokens: tokens, None),
    "truncated": (lambda tokens: min(tokens, 2048), Severity.FATAL),
}


@pytest.mark.parametrize(("reads", "weight"), LONG_PROMPTS.values(), ids=LONG_PROMPTS)
async def test_kind_that_may_truncate_is_probed_with_a_long_prompt(
    reads: Callable[[int], int | None], weight: Severity | None
) -> None:
    backend = Scripted("<|channel|>", reads=reads)
    probe = await examine(Subject(backend.complete, CLAIMS, long_prompt=4000))
    assert max(len(job.prompt.tokens) for job in backend.jobs) == 4000
    assert severities(probe)[Check.PROMPT_WHOLE] is weight


async def test_small_context_is_a_warning_with_the_remedy_of_its_kind() -> None:
    backend = Scripted("<|channel|>")
    probe = await examine(Subject(backend.complete, CLAIMS, remedies={Check.CONTEXT: "Turn the knob."}))
    (finding,) = [finding for finding in probe.findings if finding.check is Check.CONTEXT]
    assert (finding.weight, finding.text, finding.advises) == (Severity.WARNING, "4096 tokens", "Turn the knob.")


async def test_missing_prompt_counts_are_a_tokenizer_warning() -> None:
    probe = await examine(Subject(Scripted("<|channel|>", reads=lambda tokens: None).complete, CLAIMS))
    assert severities(probe)[Check.TOKENIZER] is Severity.WARNING
    assert probe.fatal == ()


async def test_missing_markers_of_a_markerless_kind_are_a_warning() -> None:
    claims = replace(CLAIMS, output=OutputForm.MARKERLESS)
    probe = await examine(Subject(Scripted("analysisThe user").complete, claims))
    assert severities(probe)[Check.MARKERS] is Severity.WARNING
    assert probe.fatal == ()


# Table of findings


@pytest.mark.parametrize("check", Check)
def test_every_check_has_a_problem_and_a_remedy_without_product_names(check: Check) -> None:
    meaning = MEANINGS[check]
    assert meaning.problem.endswith(".")
    assert meaning.remedy.endswith(".")
    assert not any(kind in (meaning.problem + meaning.remedy).lower() for kind in ("vllm", "mlx", "ollama", "llama"))


UNREACHED = {
    "unavailable": (BackendUnavailable("the backend cannot be reached"), "api_base"),
    "overloaded": (BackendOverloaded("the backend is overloaded"), "Wait"),
    "timeout": (BackendTimeout("too slow"), "hangs"),
    "protocol error": (BackendProtocolError("the backend's answer is not valid HTTP"), "of this kind"),
}


@pytest.mark.parametrize(("error", "advice"), UNREACHED.values(), ids=UNREACHED)
def test_unreachable_backend_is_a_fatal_finding_with_advice(error: BackendError, advice: str) -> None:
    finding = unreached(error)
    assert (finding.check, finding.weight, finding.text) == (Check.REACHABLE, Severity.FATAL, error.message)
    assert advice in finding.advises


def test_passed_check_has_no_text_and_no_advice() -> None:
    passed = Finding(Check.TOKENIZER, ok=True)
    assert (passed.weight, passed.text, passed.advises) == (None, "", "")
