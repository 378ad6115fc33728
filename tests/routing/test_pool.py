"""The pool: order, rest and recovery, shared probes, and places at a backend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest

from unisono.core.generation import Capabilities, Chunk, FinishReason, Form, Generation, Prompt
from unisono.core.ports import Backend, Pool
from unisono.core.probe import MEANINGS, Check, Finding, Probe
from unisono.errors import (
    BackendOverloaded,
    BackendProtocolError,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    BackendUnfit,
    ContextTooLong,
    UnisonoError,
    UnknownModel,
)
from unisono.routing import pool as pool_module
from unisono.routing.health import Tolerance
from unisono.routing.pool import LiveDeployment, RoundRobinPool
from unisono.routing.slots import SlottedBackend

IDS = Capabilities(prompt=Form.IDS, output=Form.IDS, stop_visible=True, context=8192)
JOB = Generation(Prompt([1]), max_tokens=1)


@dataclass
class Script:
    """A backend that does what its test says; counts what it is asked."""

    outcomes: list[Capabilities | Probe | UnisonoError] = field(default_factory=lambda: [IDS])
    gate: asyncio.Event | None = None
    probes: int = 0
    streaming: int = 0
    closed: bool = False

    async def probe(self) -> Probe:
        outcome = self.outcomes[min(self.probes, len(self.outcomes) - 1)]
        self.probes += 1
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(outcome, UnisonoError):
            raise outcome
        return outcome if isinstance(outcome, Probe) else Probe(outcome)

    async def complete(self, job: Generation) -> AsyncIterator[Chunk]:
        self.streaming += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
            yield Chunk(tokens=[1])
            yield Chunk(finish=FinishReason.STOP)
        finally:
            self.streaming -= 1

    async def aclose(self) -> None:
        self.closed = True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pool_of(*names: str, clock: Callable[[], float], **tolerance: float) -> tuple[RoundRobinPool, list[LiveDeployment]]:
    deployments = [LiveDeployment(name, Script(), clock=clock) for name in names]
    allowed = Tolerance(int(tolerance.get("allowed_fails", 1)), tolerance.get("cooldown_s", 30.0))
    return RoundRobinPool({"m": deployments}, allowed, clock=clock), deployments


def names(pool: Pool, model: str = "m", sticky: str = "") -> list[str]:
    return [deployment.name for deployment in pool.choose(model, sticky)]


def test_deployments_take_turns() -> None:
    pool, _ = pool_of("a", "b", clock=Clock())
    assert [names(pool) for _ in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_models_take_turns_independently() -> None:
    clock = Clock()
    groups = {m: [LiveDeployment(f"{m}{i}", Script(), clock=clock) for i in (1, 2)] for m in ("x", "y")}
    pool = RoundRobinPool(groups, clock=clock)
    assert [names(pool, "x"), names(pool, "y"), names(pool, "x")] == [["x1", "x2"], ["y1", "y2"], ["x2", "x1"]]


def test_a_request_gets_no_more_backends_than_attempts() -> None:
    deployments = [LiveDeployment(name, Script()) for name in "abcd"]
    pool = RoundRobinPool({"m": deployments}, attempts=2)
    assert [len(pool.choose("m")) for _ in range(4)] == [2] * 4
    assert {name for _ in range(4) for name in names(pool)} == set("abcd")


def test_turns_of_one_value_go_to_one_deployment_and_take_nobodys_turn() -> None:
    pool, _ = pool_of("a", "b", "c", clock=Clock())
    orders = {key: names(pool, sticky=key) for key in map(str, range(20))}
    assert {order[0] for order in orders.values()} == {"a", "b", "c"}
    assert all(names(pool, sticky=key) == order for key, order in orders.items())
    assert [names(pool)[0] for _ in range(3)] == ["a", "c", "b"]


def test_a_value_leaves_its_deployment_while_that_rests_and_comes_back() -> None:
    clock = Clock()
    pool, deployments = pool_of("a", "b", "c", clock=clock, allowed_fails=0, cooldown_s=30)
    first, second, third = names(pool, sticky="k")
    [resting] = [d for d in deployments if d.name == first]
    pool.failed(resting, BackendUnavailable("gone"))
    assert names(pool, sticky="k") == [second, third, first]
    clock.now += 31
    assert names(pool, sticky="k") == [first, second, third]


async def test_a_value_does_not_wait_for_its_full_deployment_while_another_is_free() -> None:
    slotted = [SlottedBackend(Script(), places=1, max_queue=1, queue_timeout_s=1) for _ in range(2)]
    deployments = [LiveDeployment(name, backend) for name, backend in zip("ab", slotted, strict=True)]
    pool = RoundRobinPool({"m": deployments})
    first, second = names(pool, sticky="k")
    [full] = [d for d in deployments if d.name == first]
    stream = full.backend.complete(JOB)
    await anext(stream)
    assert names(pool, sticky="k") == [second, first]
    async for _ in stream:
        pass
    assert names(pool, sticky="k") == [first, second]


def test_an_unknown_model_is_unknown() -> None:
    pool, _ = pool_of("a", clock=Clock())
    with pytest.raises(UnknownModel):
        pool.choose("other")


def test_after_the_allowed_failures_the_next_one_sends_it_to_rest_and_time_brings_it_back() -> None:
    clock = Clock()
    pool, (a, _) = pool_of("a", "b", clock=clock, allowed_fails=2, cooldown_s=30)
    for _ in range(2):
        pool.failed(a, BackendUnavailable("gone"))
    assert "a" in {names(pool)[0], names(pool)[0]}
    pool.failed(a, BackendUnavailable("gone"))
    assert [names(pool) for _ in range(2)] == [["b", "a"], ["b", "a"]]
    clock.now += 30
    assert {names(pool)[0], names(pool)[0]} == {"a", "b"}
    pool.failed(a, BackendUnavailable("still gone"))
    assert [names(pool)[0] for _ in range(2)] == ["b", "b"]


def test_a_success_forgives() -> None:
    pool, (a, _) = pool_of("a", "b", clock=Clock(), allowed_fails=1)
    for _ in range(5):
        pool.failed(a, BackendUnavailable("gone"))
        pool.succeeded(a)
    assert {names(pool)[0], names(pool)[0]} == {"a", "b"}


def test_when_all_rest_all_are_tried() -> None:
    pool, deployments = pool_of("a", "b", clock=Clock(), allowed_fails=0)
    for deployment in deployments:
        pool.failed(deployment, BackendTimeout("slow"))
    assert sorted(names(pool)) == ["a", "b"]


COUNTED: dict[str, tuple[UnisonoError, bool]] = {
    "gone": (BackendUnavailable("x"), True),
    "slow": (BackendTimeout("x"), True),
    "garbage": (BackendProtocolError("x"), True),
    "busy": (BackendOverloaded("x"), False),
    "unfit": (BackendUnfit("x"), False),
    "the request was wrong": (BackendRejected("x"), False),
    "the prompt was too long": (ContextTooLong("x"), False),
}


@pytest.mark.parametrize(("error", "counted"), COUNTED.values(), ids=COUNTED)
def test_only_what_speaks_against_the_backend_counts(error: UnisonoError, counted: bool) -> None:
    pool, (a, _) = pool_of("a", "b", clock=Clock(), allowed_fails=0)
    pool.failed(a, error)
    assert ([names(pool)[0] for _ in range(2)] == ["b", "b"]) is counted


async def test_callers_at_the_same_time_share_one_probe() -> None:
    script = Script(gate=asyncio.Event())
    deployment = LiveDeployment("a", script)
    callers = [asyncio.create_task(deployment.capabilities()) for _ in range(5)]
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.sleep(0)
    assert script.gate is not None
    script.gate.set()
    found = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == [IDS] * 4
    assert await deployment.capabilities() == IDS
    assert script.probes == 1


async def test_a_failed_probe_is_remembered_for_a_moment_only() -> None:
    clock = Clock()
    script = Script([BackendUnavailable("not yet"), IDS])
    deployment = LiveDeployment("a", script, clock=clock)
    for _ in range(3):
        with pytest.raises(BackendUnavailable):
            await deployment.capabilities()
    assert script.probes == 1
    clock.now += 3
    assert await deployment.capabilities() == IDS


async def test_what_comes_back_after_a_rest_is_probed_again() -> None:
    pool, (a, _) = pool_of("a", "b", clock=Clock(), allowed_fails=0)
    assert isinstance(a.backend, Script)
    await a.capabilities()
    pool.failed(a, BackendUnavailable("restarting"))
    await a.capabilities()
    assert a.backend.probes == 2


WINDOWS: dict[str, tuple[int | None, int | None, int | None]] = {
    "the backend's": (8192, None, 8192),
    "ours, where it says nothing": (None, 4096, 4096),
    "ours, where it is smaller": (8192, 4096, 4096),
    "the backend's, where ours is larger": (8192, 100_000, 8192),
    "unknown": (None, None, None),
}


@pytest.mark.parametrize(("claimed", "configured", "window"), WINDOWS.values(), ids=WINDOWS)
async def test_the_window_is_the_smaller_of_what_is_known(
    claimed: int | None, configured: int | None, window: int | None
) -> None:
    script = Script([Capabilities(Form.TEXT, Form.TEXT, stop_visible=False, context=claimed)])
    deployment = LiveDeployment("a", script, context=configured)
    assert (await deployment.capabilities()).context == window
    assert RoundRobinPool({"m": [deployment]}).context("m") == window


async def test_backends_are_probed_in_the_background_and_their_state_is_told() -> None:
    ready, broken = LiveDeployment("a", Script()), LiveDeployment("b", Script([BackendUnavailable("http://secret")]))
    pool = RoundRobinPool({"m": [ready, broken]})
    assert [status.state for status in pool.status()] == ["unknown", "unknown"]
    pool.start()
    async with asyncio.timeout(5):
        while any(status.state == "unknown" for status in pool.status()):
            await asyncio.sleep(0.001)
    assert [(s.name, s.state, s.reason) for s in pool.status()] == [
        ("a", "ready", ""),
        ("b", "failing", "backend_unavailable"),
    ]
    pool.failed(ready, BackendTimeout("x"))
    await pool.aclose()
    assert all(isinstance(d.backend, Script) and d.backend.closed for d in (ready, broken))


async def test_a_backend_that_goes_away_without_traffic_is_noticed_and_used_all_the_same() -> None:
    clock = Clock()
    deployment = LiveDeployment("a", Script([IDS, BackendUnavailable("gone"), IDS]), clock=clock)
    pool = RoundRobinPool({"m": [deployment]}, clock=clock)
    states = []
    for _ in range(3):
        await asyncio.gather(deployment.check(), return_exceptions=True)
        states.append(pool.status()[0].state)
        assert await deployment.capabilities() == IDS
    assert states == ["ready", "failing", "ready"]


WRONG = Finding(Check.TOKENIZER, ok=False, detail="Its ids are others.", remedy="Serve a gpt-oss model.")
HIDDEN = Finding(Check.STOP_TOKEN, ok=False, detail="It hides the stop token.")


async def test_a_backend_with_a_fatal_finding_is_not_used_until_it_is_found_well() -> None:
    clock = Clock()
    deployment = LiveDeployment("a", Script([Probe(IDS, (WRONG, HIDDEN)), Probe(IDS, (HIDDEN,))]), clock=clock)
    pool = RoundRobinPool({"m": [deployment]}, clock=clock)
    for _ in range(2):
        with pytest.raises(BackendUnfit, match="a is not fit for use: tokenizer"):
            await deployment.capabilities()
    (status,) = pool.status()
    meaning = MEANINGS[Check.TOKENIZER]
    assert (status.state, status.reason) == ("unfit", f"tokenizer: {meaning.problem} {meaning.remedy}")
    assert WRONG.detail not in status.reason
    clock.now += 3
    assert await deployment.capabilities() == IDS
    assert pool.status()[0].state == "ready"


async def test_a_backend_that_was_good_and_is_found_unfit_is_dropped() -> None:
    deployment = LiveDeployment("a", Script([IDS, Probe(IDS, (WRONG,))]))
    assert await deployment.capabilities() == IDS
    with pytest.raises(BackendUnfit):
        await deployment.check()
    with pytest.raises(BackendUnfit):
        await deployment.capabilities()


STUCK = Finding(Check.GENERATION, ok=False)


async def test_a_backend_that_was_good_and_is_only_stuck_is_kept_and_told() -> None:
    deployment = LiveDeployment("a", Script([IDS, Probe(IDS, (STUCK,))]))
    pool = RoundRobinPool({"m": [deployment]})
    await deployment.check()
    with pytest.raises(BackendUnfit):
        await deployment.check()
    assert pool.status()[0].state == "unfit"
    assert await deployment.capabilities() == IDS


async def test_a_backend_that_was_stuck_from_the_start_is_not_used() -> None:
    deployment = LiveDeployment("a", Script([Probe(IDS, (STUCK,))]))
    with pytest.raises(BackendUnfit):
        await deployment.capabilities()


async def test_what_comes_back_after_a_rest_gets_requests_once_a_probe_found_it_well() -> None:
    clock = Clock()
    pool, (a, b) = pool_of("a", "b", clock=clock, allowed_fails=0, cooldown_s=30)
    await a.capabilities()
    assert {names(pool)[0] for _ in range(2)} == {"a", "b"}
    await b.capabilities()
    pool.failed(b, BackendUnavailable("gone"))
    clock.now += 31
    assert {names(pool)[0] for _ in range(2)} == {"a"}
    await b.check()
    assert {names(pool)[0] for _ in range(2)} == {"a", "b"}


async def test_an_unfit_backend_is_examined_more_and_more_seldom() -> None:
    clock = Clock()
    script = Script([Probe(IDS, (WRONG,))])
    deployment = LiveDeployment("a", script, clock=clock)
    pauses = []
    for _ in range(7):
        with pytest.raises(BackendUnfit):
            await deployment.capabilities()
        began = clock.now
        while not deployment.stale(clock.now):
            clock.now += 1
            if not deployment.stale(clock.now):
                with pytest.raises(BackendUnfit):
                    await deployment.capabilities()
        pauses.append(clock.now - began)
    assert pauses == [2, 4, 8, 16, 30, 30, 30]
    assert script.probes == 7


async def test_a_backend_in_use_is_not_asked_and_an_idle_one_more_and_more_seldom() -> None:
    clock = Clock()
    deployment = LiveDeployment("a", Script(), clock=clock)
    pool = RoundRobinPool({"m": [deployment]}, clock=clock)
    pauses = []
    for _ in range(7):
        await deployment.check()
        began = clock.now
        while not deployment.stale(clock.now):
            clock.now += 10
        pauses.append(clock.now - began)
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    pool.succeeded(deployment)
    assert [deployment.stale(clock.now + later) for later in (0, 29, 30)] == [False, False, True]


async def test_a_probe_that_hangs_keeps_no_other_backend_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WATCH_EVERY_S", 0.001)
    hanging = LiveDeployment("a", Script(gate=asyncio.Event()))
    other = LiveDeployment("b", Script([BackendUnavailable("not yet"), IDS]))
    pool = RoundRobinPool({"m": [hanging, other]})
    pool.start()
    async with asyncio.timeout(5):
        while other.known is None:
            await asyncio.sleep(0.001)
    assert isinstance(hanging.backend, Script)
    assert hanging.backend.probes == 1
    await pool.aclose()


async def test_not_everything_is_probed_at_once() -> None:
    gate = asyncio.Event()
    scripts = [Script(gate=gate) for _ in range(pool_module.PROBES_AT_ONCE + 5)]
    pool = RoundRobinPool({"m": [LiveDeployment(str(i), script) for i, script in enumerate(scripts)]})
    pool.start()
    await asyncio.sleep(0.02)
    assert sum(script.probes for script in scripts) == pool_module.PROBES_AT_ONCE
    gate.set()
    async with asyncio.timeout(5):
        while any(status.state != "ready" for status in pool.status()):
            await asyncio.sleep(0.001)
    await pool.aclose()


UNSIZED = Finding(Check.CONTEXT, ok=False, detail="It does not say how large its context is.")


async def test_a_context_that_is_configured_is_a_context_that_is_known() -> None:
    deployment = LiveDeployment("a", Script([Probe(replace(IDS, context=None), (UNSIZED,))]), context=32768)
    probe = await deployment.check()
    assert probe.findings == (Finding(Check.CONTEXT, ok=True, detail="32768 tokens"),)


async def test_what_a_check_found_is_logged_once_with_its_remedy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "unisono.routing.pool")
    deployment = LiveDeployment("a", Script([Probe(IDS, (WRONG, HIDDEN))]))
    for _ in range(3):
        with pytest.raises(BackendUnfit):
            await deployment.check()
    found = [record for record in caplog.records if record.message == "backend check failed"]
    assert [(r.levelno, vars(r)["check"], vars(r)["reason"], vars(r)["remedy"]) for r in found] == [
        (logging.ERROR, "tokenizer", WRONG.detail, WRONG.remedy),
        (logging.INFO, "stop_token", HIDDEN.detail, MEANINGS[Check.STOP_TOKEN].remedy),
    ]


async def test_what_is_not_ready_is_asked_again_soon_and_what_is_ready_now_and_then() -> None:
    clock = Clock()
    deployment = LiveDeployment("a", Script([BackendUnavailable("gone"), IDS]), clock=clock)
    assert deployment.stale(clock.now)
    with pytest.raises(BackendUnavailable):
        await deployment.check()
    assert deployment.stale(clock.now)
    await deployment.check()
    assert [deployment.stale(clock.now + later) for later in (0, 29, 31)] == [False, False, True]


async def test_watching_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WATCH_EVERY_S", 0.001)
    script = Script([BackendUnavailable("not yet"), BackendUnavailable("not yet"), IDS])
    pool = RoundRobinPool({"m": [LiveDeployment("a", script)]})
    pool.start()
    async with asyncio.timeout(5):
        while pool.status()[0].state != "ready":
            await asyncio.sleep(0.001)
    await pool.aclose()
    assert script.probes == 3


async def test_settling_waits_for_probes_but_not_for_ever() -> None:
    slow = Script(gate=asyncio.Event())
    pool = RoundRobinPool({"m": [LiveDeployment("a", Script()), LiveDeployment("b", slow)]})
    await pool.settled(0.02)
    assert [status.state for status in pool.status()] == ["ready", "unknown"]
    assert slow.gate is not None
    slow.gate.set()
    await pool.settled(5)
    assert [status.state for status in pool.status()] == ["ready", "ready"]
    assert slow.probes == 1


async def test_closing_during_a_probe_ends_it() -> None:
    script = Script(gate=asyncio.Event())
    pool = RoundRobinPool({"m": [LiveDeployment("a", script)]})
    pool.start()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await pool.aclose()
    assert script.closed


async def drain(backend: Backend) -> int:
    return len([chunk async for chunk in backend.complete(JOB)])


async def test_a_backend_gets_only_as_many_as_it_has_places() -> None:
    script = Script(gate=asyncio.Event())
    backend = SlottedBackend(script, places=2, max_queue=10, queue_timeout_s=5)
    running = [asyncio.create_task(drain(backend)) for _ in range(5)]
    await asyncio.sleep(0.01)
    assert script.streaming == 2
    assert backend.full
    assert script.gate is not None
    script.gate.set()
    assert await asyncio.gather(*running) == [2] * 5
    assert not backend.full


async def test_the_line_is_bounded_in_length_and_time() -> None:
    script = Script(gate=asyncio.Event())
    backend = SlottedBackend(script, places=1, max_queue=1, queue_timeout_s=0.02)
    served = asyncio.create_task(drain(backend))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(drain(backend))
    await asyncio.sleep(0)
    with pytest.raises(BackendOverloaded) as too_long_a_line:
        await drain(backend)
    assert too_long_a_line.value.retry_after_s is not None
    with pytest.raises(BackendOverloaded):
        await waiting
    assert script.gate is not None
    script.gate.set()
    assert await served == 2


async def test_leaving_the_line_or_the_stream_frees_the_place() -> None:
    script = Script(gate=asyncio.Event())
    backend = SlottedBackend(script, places=1, max_queue=5, queue_timeout_s=5)
    streaming, waiting = (asyncio.create_task(drain(backend)) for _ in range(2))
    await asyncio.sleep(0.01)
    for task in (waiting, streaming):
        task.cancel()
    await asyncio.gather(streaming, waiting, return_exceptions=True)
    assert (script.streaming, backend.full) == (0, False)
    assert script.gate is not None
    script.gate.set()
    stream = backend.complete(JOB)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert (script.streaming, backend.full) == (0, False)


async def test_a_deployment_with_a_free_place_comes_first() -> None:
    busy = LiveDeployment("busy", SlottedBackend(Script(), places=1, max_queue=5, queue_timeout_s=5))
    free = LiveDeployment("free", Script())
    pool = RoundRobinPool({"m": [busy, free]})
    stream = busy.backend.complete(JOB)
    await anext(stream)
    assert [names(pool)[0] for _ in range(3)] == ["free"] * 3
    await stream.aclose()  # type: ignore[attr-defined]
    assert {names(pool)[0], names(pool)[0]} == {"busy", "free"}
