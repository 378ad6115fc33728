"""The examination of a backend: what is wrong with it is found, named, and comes with what to do about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.fakes import FakeMlxServer, FakeVllm, Patient, Refusal
from unisono.core.generation import Capabilities, Chunk, CompletionJob, FinishReason, OutputForm
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
from unisono_adapters.mlx.server import MlxServerBackend
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


async def probed(server: str, patient: Patient) -> Probe:
    async with SERVERS[server](patient) as (backend, _):
        probe: Probe = await backend.probe()
        return probe


def weights(probe: Probe) -> dict[Check, Severity | None]:
    return {finding.check: finding.weight for finding in probe.findings}


# A sound backend


async def test_a_sound_vllm_passes_every_check() -> None:
    probe = await probed("vllm", Patient())
    assert weights(probe) == {
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
    }
    assert probe.capabilities.constrain == {"json_schema", "json_object", "choice"}
    assert probe.first_token_s is not None
    assert 0 < probe.first_token_s < 5
    assert probe.capabilities.stop_visible


async def test_a_sound_mlx_server_passes_with_the_warnings_of_its_kind() -> None:
    probe = await probed("mlx_server", Patient())
    assert weights(probe) == {
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
async def test_an_examination_is_a_handful_of_tokens_at_temperature_0_and_marked(server: str) -> None:
    async with SERVERS[server](Patient()) as (backend, fake):
        await backend.probe()
        generations = [seen.json for seen in fake.probes if seen.path == "/v1/completions"]
        marks = [seen.headers["x-request-id"] for seen in fake.probes if seen.path == "/v1/completions"]
        assert fake.requests == []
    assert len(generations) <= 8
    assert sum(asked["max_tokens"] for asked in generations) <= 40
    assert {asked["temperature"] for asked in generations} == {0.0}
    assert "seed" not in generations[0]
    assert len(set(marks)) == len(marks)
    assert all(mark.startswith("unisono-probe") for mark in marks)


async def test_a_tokenizer_that_cannot_be_asked_is_judged_by_what_the_model_writes() -> None:
    assert weights(await probed("vllm", Patient(tokenizes=False)))[Check.TOKENIZER] is None
    chatty = await probed("vllm", Patient(tokenizes=False, answer="Sure! Here is the OK."))
    assert weights(chatty)[Check.TOKENIZER] is Severity.FATAL


# What is wrong


def off_by_a_merge(text: str) -> list[int]:
    """A vocabulary that cuts text in other places."""
    return [token for piece in text for token in load_encoding().encode_text(piece)]


def markers_are_text(text: str) -> list[int]:
    return load_encoding().encode_text(text)


def with_a_beginning(text: str) -> list[int]:
    return [199998, *load_encoding().encode_as_server(text)]


@dataclass(frozen=True)
class Case:
    server: str
    patient: Callable[[], Patient]
    check: Check
    severity: Severity = Severity.FATAL
    says: str = ""


WRONG: dict[str, Case] = {
    "another vocabulary": Case(
        "vllm", lambda: Patient(encode=off_by_a_merge), Check.TOKENIZER, says="instead of [200006"
    ),
    "no marker is a token": Case("vllm", lambda: Patient(encode=markers_are_text), Check.TOKENIZER),
    "a token before every text": Case("vllm", lambda: Patient(encode=with_a_beginning), Check.TOKENIZER),
    "another vocabulary, by counts": Case(
        "mlx_server", lambda: Patient(encode=off_by_a_merge), Check.TOKENIZER, says="instead of 7"
    ),
    "no marker is a token, by counts": Case(
        "mlx_server", lambda: Patient(encode=markers_are_text), Check.TOKENIZER, says="the seven markers"
    ),
    "a token before every text, by counts": Case(
        "mlx_server", lambda: Patient(encode=with_a_beginning), Check.TOKENIZER, says="counts 8 tokens"
    ),
    "markers stripped": Case("mlx_server", lambda: Patient(strips_markers=True), Check.MARKERS, says="'analysis"),
    "no Harmony": Case("mlx_server", lambda: Patient(answer="Sure! Here it is."), Check.MARKERS, says="'Sure!"),
    "a prompt cut": Case("vllm", lambda: Patient(reads_at_most=7), Check.PROMPT_WHOLE, says="reports 7 prompt tokens"),
    "ids read as text": Case("vllm", lambda: Patient(rewrites_ids=True), Check.IDS_IN, says="prompt tokens"),
    "no ids returned": Case("vllm", lambda: Patient(returns_ids=False), Check.IDS_OUT, says="text only"),
    "hangs": Case("vllm", lambda: Patient(hangs=True), Check.GENERATION, says="sent no token within 0.2 s"),
    "hangs, text": Case("mlx_server", lambda: Patient(hangs=True), Check.GENERATION, says="sent no token"),
    "says nothing": Case("mlx_server", lambda: Patient(answer="", stops_at=[200002]), Check.GENERATION),
    "does not know the model after all": Case(
        "vllm",
        lambda: Patient(refusal=Refusal(404, b'{"error": {"message": "no such model"}}')),
        Check.GENERATION,
        says="does not have the configured model",
    ),
    "fails inside": Case(
        "mlx_server",
        lambda: Patient(refusal=Refusal(404, b'{"error": "No safetensors in ' + CANARY.encode() + b'"}', version=0)),
        Check.GENERATION,
        says="failed during generation",
    ),
    "goes on behind a call": Case(
        "vllm", lambda: Patient(stops_at=[200002, 199999]), Check.STOPS, says="continues after <|call|>"
    ),
    "goes on behind a call, text": Case(
        "mlx_server", lambda: Patient(stops_at=[200002, 199999]), Check.STOPS, says="continues after <|call|>"
    ),
    "ignores constraints": Case(
        "vllm", lambda: Patient(constrains=False), Check.CONSTRAIN, Severity.WARNING, says="does not enforce: choice"
    ),
    "hides stops": Case("vllm", lambda: Patient(hides_stops=True), Check.STOP_TOKEN, Severity.WARNING),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
async def test_what_is_wrong_is_named_with_its_remedy(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_probe, "FIRST_TOKEN_S", 0.2)
    probe = await probed(case.server, case.patient())
    found = {finding.check: finding for finding in probe.findings}
    assert found[case.check].weight is case.severity
    assert case.says in found[case.check].text
    assert found[case.check].advises
    assert bool(probe.fatal) is (case.severity is Severity.FATAL)
    assert [finding.check for finding in probe.fatal] == ([case.check] if probe.fatal else [])
    told = " ".join(finding.text + finding.advises for finding in probe.findings)
    assert "/srv" not in told
    assert "10.1.2.3" not in told


async def test_a_constraint_that_is_ignored_is_not_relied_upon() -> None:
    assert (await probed("vllm", Patient(constrains=False))).capabilities.constrain == frozenset()


async def test_a_hidden_stop_is_what_the_backend_is_used_with() -> None:
    assert (await probed("vllm", Patient(hides_stops=True))).capabilities.stop_visible is False


async def test_a_backend_s_own_words_are_kept_for_the_operator() -> None:
    refusal = Refusal(404, b'{"error": "No safetensors in /srv/models"}', version=0)
    (finding,) = (await probed("mlx_server", Patient(refusal=refusal))).fatal
    assert "/srv/models" in finding.backend_message


@pytest.mark.parametrize("server", SERVERS)
async def test_a_bias_that_is_ignored_or_refused_is_no_finding_about_stops(server: str) -> None:
    probe = await probed(server, Patient(takes_bias=False))
    assert Check.STOPS not in weights(probe)
    assert probe.fatal == ()


COUNTS: dict[str, object] = {"0": 0, "-1": -1, "a billion": 10**9, "a string": "12", "none": "null"}


@pytest.mark.parametrize("claimed", COUNTS.values(), ids=COUNTS)
async def test_a_count_that_cannot_be_one_is_no_finding_about_prompts(claimed: object) -> None:
    probe = await probed("vllm", Patient(claims=claimed))
    assert {Check.IDS_IN, Check.PROMPT_WHOLE}.isdisjoint(weights(probe))
    assert probe.fatal == ()


# What says nothing about its fitness

PASSING: dict[str, tuple[Refusal, type[BackendError]]] = {
    "busy": (Refusal(503, b'{"error": "overloaded"}'), BackendOverloaded),
    "many requests": (Refusal(429, b'{"error": "slow down"}'), BackendOverloaded),
    "a wrong key": (Refusal(401, b'{"error": "Unauthorized"}'), BackendUnavailable),
}


@pytest.mark.parametrize(("refusal", "raised"), PASSING.values(), ids=PASSING)
async def test_a_busy_or_closed_backend_is_not_judged(refusal: Refusal, raised: type[BackendError]) -> None:
    with pytest.raises(raised):
        await probed("vllm", Patient(refusal=refusal))


@pytest.mark.parametrize("server", SERVERS)
async def test_leaving_amid_an_examination_leaves_nothing_behind(server: str) -> None:
    async with SERVERS[server](Patient(hangs=True)) as (backend, fake):
        probing = asyncio.create_task(backend.probe())
        async with asyncio.timeout(5):
            while not fake.patient.generations:
                await asyncio.sleep(0.001)
        probing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probing
        async with asyncio.timeout(1):
            while fake.open:
                await asyncio.sleep(0.001)


# Backends that a wire cannot show

CLAIMS = Capabilities(OutputForm.TEXT, OutputForm.TEXT, stop_visible=False, context=4096)


class Scripted:
    """A text backend in this process: how many tokens it says it read, and what it writes."""

    def __init__(self, *texts: str, reads: Callable[[int], int | None] = lambda sent: sent) -> None:
        self._texts = texts
        self._reads = reads
        self.jobs: list[CompletionJob] = []

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs.append(job)
        yield Chunk(text=self._texts[min(len(self.jobs), len(self._texts)) - 1])
        yield Chunk(finish=FinishReason.LENGTH, prompt_tokens=self._reads(len(job.prompt.tokens)))


LONG: dict[str, tuple[Callable[[int], int | None], Severity | None]] = {
    "whole": (lambda sent: sent, None),
    "cut in the middle": (lambda sent: min(sent, 2048), Severity.FATAL),
}


@pytest.mark.parametrize(("reads", "weight"), LONG.values(), ids=LONG)
async def test_a_kind_that_may_cut_reads_one_prompt_near_its_size(
    reads: Callable[[int], int | None], weight: Severity | None
) -> None:
    backend = Scripted("<|channel|>", reads=reads)
    probe = await examine(Subject(backend.complete, CLAIMS, long_prompt=4000))
    assert max(len(job.prompt.tokens) for job in backend.jobs) == 4000
    assert weights(probe)[Check.PROMPT_WHOLE] is weight


async def test_a_small_context_is_a_warning_with_the_kinds_own_remedy() -> None:
    backend = Scripted("<|channel|>")
    probe = await examine(Subject(backend.complete, CLAIMS, remedies={Check.CONTEXT: "Turn the knob."}))
    (finding,) = [finding for finding in probe.findings if finding.check is Check.CONTEXT]
    assert (finding.weight, finding.text, finding.advises) == (Severity.WARNING, "4096 tokens", "Turn the knob.")


async def test_who_does_not_count_is_not_judged_by_counts() -> None:
    probe = await examine(Subject(Scripted("<|channel|>", reads=lambda sent: None).complete, CLAIMS))
    assert weights(probe)[Check.TOKENIZER] is Severity.WARNING
    assert probe.fatal == ()


async def test_a_kind_that_lives_without_markers_is_only_warned_about() -> None:
    claims = replace(CLAIMS, output=OutputForm.MARKERLESS)
    probe = await examine(Subject(Scripted("analysisThe user").complete, claims))
    assert weights(probe)[Check.MARKERS] is Severity.WARNING
    assert probe.fatal == ()


# The table of meanings


@pytest.mark.parametrize("check", Check)
def test_every_check_has_a_meaning_that_names_nobody(check: Check) -> None:
    meaning = MEANINGS[check]
    assert meaning.problem.endswith(".")
    assert meaning.remedy.endswith(".")
    assert not any(kind in (meaning.problem + meaning.remedy).lower() for kind in ("vllm", "mlx", "ollama", "llama"))


UNREACHED = {
    "gone": (BackendUnavailable("the backend cannot be reached"), "api_base"),
    "busy": (BackendOverloaded("the backend is overloaded"), "Wait"),
    "slow": (BackendTimeout("too slow"), "hangs"),
    "something else": (BackendProtocolError("the backend's answer is not valid HTTP"), "of this kind"),
}


@pytest.mark.parametrize(("error", "advice"), UNREACHED.values(), ids=UNREACHED)
def test_an_error_that_keeps_a_backend_from_being_examined_is_a_finding_too(error: BackendError, advice: str) -> None:
    finding = unreached(error)
    assert (finding.check, finding.weight, finding.text) == (Check.REACHABLE, Severity.FATAL, error.message)
    assert advice in finding.advises


def test_a_check_that_passed_has_nothing_to_say_but_its_detail() -> None:
    passed = Finding(Check.TOKENIZER, ok=True)
    assert (passed.weight, passed.text, passed.advises) == (None, "", "")
