"""Continuous fidelity: a running gateway whose backend drifts, and the monitor's rules."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.gateway import Gateway, config_of, gateway
from tests.e2e.test_alerts import alerting, receiver
from tests.e2e.test_metrics import read
from tests.fakes import FakeVllm
from tests.fakes.language_model import LanguageModel
from tests.fidelity.test_compare import sharpened
from tests.routing.doubles import IDS, Clock, ScriptedBackend
from unisono.core.deployments import FidelityState
from unisono.core.scoring import ScoreJob, TokenScore
from unisono.errors import BackendUnavailable, ConfigError
from unisono.fidelity.drift import DriftLimits
from unisono.fidelity.monitor import FidelityMonitor, FidelityPlan, LiveSample
from unisono.routing.deployment import LiveDeployment

PLAN: dict[str, Any] = {"reference": "vllm-1", "sample": 1.0, "quarantine_s": 3600.0}


async def status(running: Gateway) -> Sequence[dict[str, Any]]:
    [model] = (await running.get("/v1/status")).body["models"]
    found: Sequence[dict[str, Any]] = model["deployments"]
    return found


async def ask(running: Gateway, count: int) -> None:
    for number in range(count):
        answer = await running.chat(messages=[{"role": "user", "content": f"Question {number}?"}], temperature=0.0)
        assert answer.status == 200, answer.body
        # Answers are scored in idle time.
        await asyncio.sleep(0.02)


async def until(condition: Callable[[dict[str, Any]], bool], running: Gateway) -> dict[str, Any]:
    """Wait for a condition on the second deployment."""
    async with asyncio.timeout(60):
        while not condition(found := (await status(running))[1]):
            await ask(running, 2)
    return found


@pytest.mark.slow
async def test_a_drifting_backend_is_quarantined() -> None:
    async with (
        FakeVllm(script=LanguageModel().script) as good,
        FakeVllm(script=LanguageModel(sharpened).script) as bad,
        receiver() as hook,
        gateway(
            config_of(
                f"vllm@{good.url}",
                f"vllm@{bad.url}",
                unisono={"fidelity": {"gpt-oss": PLAN}, **alerting(hook.url)},
            )
        ) as running,
    ):
        first, second = await status(running)
        assert first["fidelity"] is None
        assert second["fidelity"]["state"] == "healthy"
        found = await until(lambda each: each["state"] == "quarantined", running)
        assert found["reason"] == "differs from vllm-1"
        assert found["fidelity"]["exceeded"] == ["divergence"]
        assert found["fidelity"]["divergence"] > 0.002
        warning, quarantine = await hook.received(2)
        assert (warning["event"], quarantine["event"]) == ("fidelity_warning", "fidelity_quarantined")
        assert quarantine["subject"] == "backend vllm-2 of gpt-oss"
        # Scores aside, it gets no more requests.
        await asyncio.sleep(0.1)
        asked = len(bad.requests)
        await ask(running, 4)
        assert len([each for each in bad.requests[asked:] if not each.json.get("echo")]) == 0
        metrics = await read(running.url)
        labels = {"model": "gpt-oss", "backend": "vllm-2"}
        assert metrics("fidelity_samples_total", **labels, outcome="scored") >= 20
        assert metrics("backend_fidelity_state", **labels) == 2
        assert metrics("backend_fidelity_divergence_nats", **labels) > 0.002


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpt-oss": {"reference": "vllm-9"}}, "unisono.fidelity.gpt-oss.reference: the model has no backend `vllm-9`"),
        ({"other": {"reference": "vllm-1"}}, "unisono.fidelity.other: no gpt-oss backend has this `model_name`"),
        ({"gpt-oss": {"sample": 0.5}}, "unisono.fidelity.gpt-oss.reference"),
    ],
)
async def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with gateway(config_of("vllm@http://127.0.0.1:1", unisono={"fidelity": settings})):
            pass


class ScoringScript(ScriptedBackend):
    """Backend that scores each token as certain, once `allowed` is set."""

    def __init__(self) -> None:
        super().__init__([replace(IDS, scores=True)])
        self.allowed = asyncio.Event()
        self.allowed.set()
        self.jobs: list[ScoreJob] = []
        self.cancelled = 0
        self.error: Exception | None = None

    async def score(self, job: ScoreJob) -> Sequence[TokenScore | None]:
        self.jobs.append(job)
        try:
            await self.allowed.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return [TokenScore(token, -0.1, ((token, -0.1), (7, -3.0))) for token in job.targets]


class Rig:
    """Monitor of two deployments, `a` and its reference `r`."""

    def __init__(self, budget: int = 10_000) -> None:
        self.clock = Clock()
        self.scripts = [ScoringScript(), ScoringScript()]
        self.reference, self.live = (
            LiveDeployment(name, script, clock=self.clock) for name, script in zip("ra", self.scripts, strict=True)
        )
        self.counts: Counter[str] = Counter()
        plan = FidelityPlan("m", self.reference, [self.live], 1.0, budget, DriftLimits())

        def count(model: str, deployment: str, outcome: str) -> None:
            self.counts[outcome] += 1

        self.monitor = FidelityMonitor(plan, lambda _: None, count, self.clock)

    def offer(self, tokens: int = 10) -> None:
        self.monitor.offer(LiveSample("a", range(90), range(tokens), is_free=True))

    async def counted(self, outcome: str, count: int) -> None:
        async with asyncio.timeout(10):
            while self.counts[outcome] < count:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def rig_of(budget: int = 10_000) -> AsyncIterator[Rig]:
    rig = Rig(budget)
    for live in (rig.reference, rig.live):
        await live.check()
    rig.monitor.start()
    try:
        yield rig
    finally:
        await rig.monitor.aclose()


async def test_scoring_stays_within_the_budget() -> None:
    async with rig_of(budget=450) as rig:
        for _ in range(3):
            rig.offer()
        await rig.counted("over_budget", 1)
        assert rig.counts == {"scored": 2, "over_budget": 1}
        # Half an hour later, there is a half of the budget again.
        rig.clock.now += 1800
        rig.offer()
        rig.offer()
        await rig.counted("over_budget", 2)
        assert rig.counts["scored"] == 3


async def test_a_request_cancels_scoring_and_comes_first() -> None:
    async with rig_of() as rig:
        rig.scripts[1].allowed.clear()
        rig.offer()
        async with asyncio.timeout(10):
            while not rig.scripts[1].jobs:
                await asyncio.sleep(0.005)
            rig.live.candidate.running = 1
            while not rig.scripts[1].cancelled:
                await asyncio.sleep(0.005)
        rig.scripts[1].allowed.set()
        jobs = len(rig.scripts[0].jobs)
        await asyncio.sleep(0.05)
        # While it runs, nothing is scored.
        assert len(rig.scripts[0].jobs) == jobs
        assert not rig.counts
        rig.live.candidate.running = 0
        await rig.counted("scored", 1)


async def test_cancelled_scorings_are_repeated_ever_more_rarely() -> None:
    async with rig_of() as rig:
        rig.scripts[1].allowed.clear()
        rig.offer()

        async def requests_after_each_start() -> None:
            while True:
                before = rig.scripts[1].cancelled
                rig.live.candidate.running = int(len(rig.scripts[1].jobs) > before)
                await asyncio.sleep(0.005)

        busy = asyncio.create_task(requests_after_each_start())
        await asyncio.sleep(1.5)
        busy.cancel()
        # Pauses of 0.1, 0.2, 0.4 and 0.8 s.
        assert 1 <= len(rig.scripts[1].jobs) <= 5
        rig.live.candidate.running = 0
        rig.scripts[1].allowed.set()
        await rig.counted("scored", 1)


async def test_a_backend_that_fails_to_score_is_counted() -> None:
    async with rig_of() as rig:
        rig.scripts[0].error = BackendUnavailable("gone")
        rig.offer()
        await rig.counted("failed", 1)
        assert rig.live.fidelity is not None
        assert rig.live.fidelity.state is FidelityState.HEALTHY


async def test_only_the_beginning_of_a_long_answer_is_scored() -> None:
    async with rig_of(budget=1_000_000) as rig:
        rig.offer(tokens=2_000)
        await rig.counted("scored", 1)
        assert [len(job.targets) for script in rig.scripts for job in script.jobs] == [512, 512]


def model_of(urls: Sequence[str], *settings: dict[str, Any]) -> dict[str, Any]:
    config = config_of(*(f"vllm@{url}" for url in urls))
    for entry, own in zip(config["model_list"], settings, strict=True):
        entry["unisono"] = own
    return config


@pytest.mark.slow
async def test_a_shadow_repeats_requests_and_is_never_shown() -> None:
    async with (
        FakeVllm(script=LanguageModel().script) as good,
        FakeVllm(script=LanguageModel(sharpened).script) as changed,
        gateway(model_of([good.url, changed.url], {}, {"shadow": "vllm-1"})) as running,
    ):
        found = await until(lambda each: each["fidelity"]["state"] == "warning", running)
        assert (found["state"], found["reason"]) == ("shadow", "of vllm-1")
        assert found["fidelity"]["reference"] == "vllm-1"
        assert (await running.chat()).body["unisono"]["backend"] == "vllm-1"
        assert any(each.json["max_tokens"] == 512 and not each.json.get("echo") for each in changed.requests)
        metrics = await read(running.url)
        # The repetitions are no requests, so that they cost a client nothing.
        assert metrics("backend_requests_total", model="gpt-oss", backend="vllm-2") == 0
        assert metrics("fidelity_samples_total", model="gpt-oss", backend="vllm-2", outcome="scored") >= 10


@pytest.mark.parametrize("name", ["vllm-9", "vllm-2"])
async def test_a_shadow_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model_list\[1\].unisono.shadow: no other gpt-oss backend of this model is"):
        async with gateway(model_of(["http://127.0.0.1:1"] * 2, {}, {"shadow": name})):
            pass
