"""The pool: who watches, what is told, what is kept from an earlier one."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from tests.routing.doubles import ASK, DEMAND, IDS, Clock, Script, known_pool, live_of, script_of
from unisono.core.generation import Load
from unisono.errors import BackendOverloaded, BackendProtocolError, BackendTimeout, BackendUnavailable, UnisonoError
from unisono.routing import pool as pool_module
from unisono.routing.circuit_breaker import BreakerConfig
from unisono.routing.deployment import FOREIGN_PROMPT, LiveDeployment
from unisono.routing.deployment_config import DeploymentConfig
from unisono.routing.group import RoutingRules
from unisono.routing.policy import ANSWER_WORK, SelectionRequest
from unisono.routing.pool import CarriedDeployment, RoutingPool
from unisono.routing.queue import QueueConfig


async def test_backends_are_probed_in_the_background_and_their_state_is_told() -> None:
    ready, broken = LiveDeployment("a", Script()), LiveDeployment("b", Script([BackendUnavailable("http://secret")]))
    pool = RoutingPool({"m": [ready, broken]})
    assert [status.state for status in pool.status()] == ["unknown", "unknown"]
    pool.start()
    async with asyncio.timeout(5):
        while any(status.state == "unknown" for status in pool.status()):
            await asyncio.sleep(0.001)
    assert [(s.name, s.state, s.reason) for s in pool.status()] == [
        ("a", "ready", ""),
        ("b", "failing", "backend_unavailable"),
    ]
    await pool.aclose()
    assert all(isinstance(d.backend, Script) and d.backend.closed for d in (ready, broken))


async def test_a_backend_that_goes_away_without_traffic_is_noticed_and_used_all_the_same() -> None:
    clock = Clock()
    deployment = LiveDeployment("a", Script([IDS, BackendUnavailable("gone"), IDS]), clock=clock)
    pool = RoutingPool({"m": [deployment]}, clock=clock)
    states = []
    for _ in range(3):
        await asyncio.gather(deployment.check(), return_exceptions=True)
        states.append(pool.status()[0].state)
        assert await deployment.capabilities() == IDS
    assert states == ["ready", "failing", "ready"]


async def test_a_probe_that_hangs_keeps_no_other_backend_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WATCH_EVERY_S", 0.001)
    hanging = LiveDeployment("a", Script(gate=asyncio.Event()))
    other = LiveDeployment("b", Script([BackendUnavailable("not yet"), IDS]))
    pool = RoutingPool({"m": [hanging, other]})
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
    pool = RoutingPool({"m": [LiveDeployment(str(i), script) for i, script in enumerate(scripts)]})
    pool.start()
    await asyncio.sleep(0.02)
    assert sum(script.probes for script in scripts) == pool_module.PROBES_AT_ONCE
    gate.set()
    async with asyncio.timeout(5):
        while any(status.state != "ready" for status in pool.status()):
            await asyncio.sleep(0.001)
    await pool.aclose()


@pytest.mark.slow
async def test_watching_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WATCH_EVERY_S", 0.001)
    script = Script([BackendUnavailable("not yet"), BackendUnavailable("not yet"), IDS])
    pool = RoutingPool({"m": [LiveDeployment("a", script)]})
    pool.start()
    async with asyncio.timeout(5):
        while pool.status()[0].state != "ready":
            await asyncio.sleep(0.001)
    await pool.aclose()
    assert script.probes == 3


async def test_settling_waits_for_probes_but_not_for_ever() -> None:
    slow = Script(gate=asyncio.Event())
    pool = RoutingPool({"m": [LiveDeployment("a", Script()), LiveDeployment("b", slow)]})
    await pool.settled(0.02)
    assert [status.state for status in pool.status()] == ["ready", "unknown"]
    assert slow.gate is not None
    slow.gate.set()
    await pool.settled(5)
    assert [status.state for status in pool.status()] == ["ready", "ready"]
    assert slow.probes == 1


async def test_closing_during_a_probe_ends_it() -> None:
    script = Script(gate=asyncio.Event())
    pool = RoutingPool({"m": [LiveDeployment("a", script)]})
    pool.start()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await pool.aclose()
    assert script.closed


async def test_what_is_told_of_a_deployment() -> None:
    clock = Clock()
    pool, (a, b) = await known_pool(live_of("a", clock, max_requests=1), live_of("b", clock, order=1), clock=clock)
    a.tolerance = b.tolerance = BreakerConfig(0, 30.0)
    with await pool.route(ASK).place(DEMAND):
        b.failed(BackendTimeout("slow"))
        waiting = asyncio.create_task(pool.route(ASK).place(DEMAND))
        await asyncio.sleep(0)
        one, other = pool.status()
        assert (one.state, one.running, one.tokens, one.waiting, one.circuits) == ("ready", 1, 1124, 1, {})
        assert (other.state, other.reason, other.circuits) == (
            "resting",
            "timed out too often",
            {"timeout": "open"},
        )
        assert 27 <= other.rests_s <= 33
        clock.now += 40
        assert (pool.status()[1].state, pool.status()[1].circuits) == ("half-open", {"timeout": "half-open"})
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_rest_ends_with_two_probes_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WATCH_EVERY_S", 0.001)
    clock = Clock()
    pool, (a, _) = await known_pool("a", "b", clock=clock, rules=RoutingRules(tolerance=BreakerConfig(0, 30.0)))
    a.failed(BackendUnavailable("gone"))
    pool.start()
    await asyncio.sleep(0.02)
    assert (pool.status()[0].state, script_of(a).probes) == ("resting", 1)
    clock.now += 40
    async with asyncio.timeout(5):
        while pool.status()[0].state != "ready":
            await asyncio.sleep(0.001)
    assert script_of(a).probes == 3
    await pool.aclose()


async def test_a_probe_that_fails_makes_the_rest_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WATCH_EVERY_S", 0.001)
    clock = Clock()
    pool, (a, _) = await known_pool("a", "b", clock=clock, rules=RoutingRules(tolerance=BreakerConfig(0, 30.0)))
    a.failed(BackendUnavailable("gone"))
    script_of(a).outcomes = [BackendUnavailable("still gone")]
    clock.now += 40
    pool.start()
    async with asyncio.timeout(5):
        while not pool.status()[0].rests_s > 50:
            await asyncio.sleep(0.001)
    assert script_of(a).probes == 2
    await pool.aclose()


async def test_a_deployment_that_dies_is_known_to_be_gone_within_a_moment_and_used_when_it_is_back() -> None:
    """By the pool's own clock: nothing here waits for the next look around, which is seconds away."""
    pool, (a, b) = await known_pool(
        "a", "b", clock=time.monotonic, rules=RoutingRules(tolerance=BreakerConfig(1, 60.0))
    )
    pool.start()
    await asyncio.sleep(0.02)
    script_of(a).outcomes = [BackendUnavailable("gone")]
    a._probed_at -= 5
    began = time.monotonic()
    a.failed(BackendProtocolError("broke off"))
    async with asyncio.timeout(1):
        while pool.status()[0].state != "failing":
            await asyncio.sleep(0.005)
    script_of(a).outcomes = [IDS]
    async with asyncio.timeout(3):
        while pool.status()[0].state != "ready":
            await asyncio.sleep(0.005)
    assert time.monotonic() - began < 3
    assert script_of(b).probes == 1
    await pool.aclose()


async def test_doubts_are_looked_into_once_a_second() -> None:
    pool, (a, _) = await known_pool(
        "a", "b", clock=time.monotonic, rules=RoutingRules(tolerance=BreakerConfig(9, 60.0))
    )
    pool.start()
    async with asyncio.timeout(1.5):
        with suppress(TimeoutError):
            async with asyncio.timeout(1.3):
                while True:
                    a.circuits = {}
                    a.failed(BackendUnavailable("gone"))
                    await asyncio.sleep(0.005)
    assert 1 <= script_of(a).probes <= 3
    await pool.aclose()


LOADS: dict[str, tuple[list[Load | UnisonoError | None], int]] = {
    "requests of others": ([Load(running=3, waiting=2)], 5),
    "it does not say": ([None], 0),
    "what it said is no longer true": ([Load(running=9, waiting=0), BackendUnavailable("x")], 0),
}


@pytest.mark.parametrize(("loads", "foreign"), LOADS.values(), ids=LOADS)
async def test_servers_that_share_a_model_are_asked_for_their_load(
    loads: list[Load | UnisonoError | None], foreign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LOAD_EVERY_S", 0.001)
    clock = Clock()
    pool, (a, b) = await known_pool("a", "b", clock=clock)
    script_of(a).loads = loads
    pool.start()
    await asyncio.sleep(0.01)
    assert script_of(a).asked_for_load == 0
    with await pool.route(ASK).place(DEMAND):
        pass
    async with asyncio.timeout(5):
        while script_of(a).asked_for_load < len(loads) or pool.status()[0].foreign != foreign:
            await asyncio.sleep(0.001)
    asked = script_of(b).asked_for_load
    await asyncio.sleep(0.01)
    # A server that does not say is not asked again and again.
    assert script_of(b).asked_for_load == asked == 1
    clock.now += 60
    async with asyncio.timeout(5):
        while pool.status()[0].foreign:
            await asyncio.sleep(0.001)
    await pool.aclose()


async def test_a_single_deployment_is_not_asked_for_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LOAD_EVERY_S", 0.001)
    pool, (a,) = await known_pool("a", clock=Clock())
    pool.start()
    with await pool.route(ASK).place(DEMAND):
        await asyncio.sleep(0.02)
    assert script_of(a).asked_for_load == 0
    await pool.aclose()


def test_what_the_gateway_gave_a_server_is_no_load_of_others() -> None:
    live = live_of("a", Clock())
    live.candidate.reserve(SelectionRequest(900, 1000))
    live.claimed(Load(running=1, waiting=0, tokens=800))
    assert (live.candidate.foreign_requests, live.candidate.foreign) == (0, 0)
    live.claimed(Load(running=3, waiting=0, tokens=9000))
    assert (live.candidate.foreign_requests, live.candidate.foreign) == (2, 2 * ANSWER_WORK)
    live.claimed(Load(running=2, waiting=3))
    assert (live.candidate.foreign_requests, live.candidate.foreign) == (4, 4 * ANSWER_WORK + 3 * FOREIGN_PROMPT)
    live.claimed(Load(running=0, waiting=2))
    assert (live.candidate.foreign_requests, live.candidate.foreign) == (1, ANSWER_WORK + FOREIGN_PROMPT)


async def test_refusals_are_logged_but_not_each_of_them(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    rules = RoutingRules(bounds=QueueConfig(length=0))
    pool, _ = await known_pool(live_of("a", clock, max_requests=1), clock=clock, rules=rules)
    with await pool.route(ASK).place(DEMAND):
        for _ in range(50):
            with pytest.raises(BackendOverloaded):
                await pool.route(ASK).place(DEMAND)
            clock.now += 0.125
    logged = [vars(record)["refused"] for record in caplog.records if record.message == "requests refused"]
    assert logged == [1] + [8] * 6


async def test_a_deployment_that_is_kept_goes_on_with_all_that_is_known_of_it() -> None:
    clock = Clock()
    old, (kept, dropped) = await known_pool("a", "b", clock=clock)
    old.start()
    place = await old.route(ASK).place(DEMAND)
    route = old.route(ASK)
    (held,) = (live for live in (kept, dropped) if live is place.deployment)
    new = RoutingPool(
        {"m": [kept], "other": [added := live_of("c", clock)]},
        carried=[CarriedDeployment(kept, DeploymentConfig("renamed", weight=3), old)],
        prefixes=old.prefixes,
        clock=clock,
    )
    assert kept.name == "a"
    new.start()
    assert (kept.name, kept.candidate.weight) == ("renamed", 3)
    assert new.status()[0].state == "ready"
    await old.aclose()
    assert [script_of(live).closed for live in (kept, dropped, added)] == [False, True, False]
    # What the old pool gave away is held until it is left.
    with place:
        assert held.candidate.running == 1
    assert held.candidate.running == 0
    with await route.place(DEMAND) as late:
        assert late.deployment in (kept, dropped)
    await new.aclose()
    assert script_of(kept).closed
    assert script_of(added).closed


async def test_a_pool_that_was_never_started_takes_nothing_from_another() -> None:
    clock = Clock()
    old, (a,) = await known_pool("a", clock=clock)
    new = RoutingPool(
        {"m": [a]}, carried=[CarriedDeployment(a, DeploymentConfig("b"), old)], prefixes=old.prefixes, clock=clock
    )
    await new.aclose()
    assert (a.name, script_of(a).closed) == ("a", False)
    with await old.route(ASK).place(DEMAND):
        pass
    await old.aclose()
    assert script_of(a).closed


async def test_a_place_that_is_left_in_the_old_pool_is_given_out_in_the_new_one() -> None:
    clock = Clock()
    old, (a,) = await known_pool(live_of("a", clock, max_requests=1), clock=clock)
    new = RoutingPool({"m": [a]}, carried=[CarriedDeployment(a, a.terms, old)], prefixes=old.prefixes, clock=clock)
    new.start()
    with await old.route(ASK).place(DEMAND):
        waiting = asyncio.create_task(new.route(ASK).place(DEMAND))
        await asyncio.sleep(0)
        assert not waiting.done()
    with await waiting:
        assert a.candidate.running == 1
    await old.aclose()
    await new.aclose()
