"""Deployment pool: background probes, status, load polling, and carried deployments."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from tests.routing.doubles import IDS, REQUEST, REQUIREMENTS, Clock, ScriptedBackend, known_pool, live_of, script_of
from unisono.core.generation import Load
from unisono.errors import BackendOverloaded, BackendProtocolError, BackendTimeout, BackendUnavailable, UnisonoError
from unisono.routing import pool as pool_module
from unisono.routing.circuit_breaker import BreakerConfig
from unisono.routing.deployment import LiveDeployment
from unisono.routing.deployment_choice import ANSWER_WORK, FOREIGN_PROMPT, SelectionRequest
from unisono.routing.deployment_config import DeploymentConfig
from unisono.routing.group import RoutingRules
from unisono.routing.pool import CarriedDeployment, RoutingPool
from unisono.routing.queue import QueueConfig


async def test_backends_are_probed_in_the_background() -> None:
    ready, broken = (
        LiveDeployment("a", ScriptedBackend()),
        LiveDeployment("b", ScriptedBackend([BackendUnavailable("http://secret")])),
    )
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
    assert all(isinstance(d.backend, ScriptedBackend) and d.backend.closed for d in (ready, broken))


async def test_a_failed_probe_is_reported_and_the_backend_stays_in_use() -> None:
    clock = Clock()
    deployment = LiveDeployment("a", ScriptedBackend([IDS, BackendUnavailable("gone"), IDS]), clock=clock)
    pool = RoutingPool({"m": [deployment]}, clock=clock)
    states = []
    for _ in range(3):
        await asyncio.gather(deployment.check(), return_exceptions=True)
        states.append(pool.status()[0].state)
        assert await deployment.capabilities() == IDS
    assert states == ["ready", "failing", "ready"]


async def test_a_hanging_probe_does_not_delay_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WATCH_EVERY_S", 0.001)
    hanging = LiveDeployment("a", ScriptedBackend(gate=asyncio.Event()))
    other = LiveDeployment("b", ScriptedBackend([BackendUnavailable("not yet"), IDS]))
    pool = RoutingPool({"m": [hanging, other]})
    pool.start()
    async with asyncio.timeout(5):
        while other.known is None:
            await asyncio.sleep(0.001)
    assert isinstance(hanging.backend, ScriptedBackend)
    assert hanging.backend.probes == 1
    await pool.aclose()


async def test_the_number_of_concurrent_probes_is_limited() -> None:
    gate = asyncio.Event()
    scripts = [ScriptedBackend(gate=gate) for _ in range(pool_module.PROBES_AT_ONCE + 5)]
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
async def test_failing_backends_are_probed_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WATCH_EVERY_S", 0.001)
    script = ScriptedBackend([BackendUnavailable("not yet"), BackendUnavailable("not yet"), IDS])
    pool = RoutingPool({"m": [LiveDeployment("a", script)]})
    pool.start()
    async with asyncio.timeout(5):
        while pool.status()[0].state != "ready":
            await asyncio.sleep(0.001)
    await pool.aclose()
    assert script.probes == 3


async def test_settled_waits_for_probes_up_to_a_timeout() -> None:
    slow = ScriptedBackend(gate=asyncio.Event())
    pool = RoutingPool({"m": [LiveDeployment("a", ScriptedBackend()), LiveDeployment("b", slow)]})
    await pool.wait_for_probes(0.02)
    assert [status.state for status in pool.status()] == ["ready", "unknown"]
    assert slow.gate is not None
    slow.gate.set()
    await pool.wait_for_probes(5)
    assert [status.state for status in pool.status()] == ["ready", "ready"]
    assert slow.probes == 1


async def test_closing_the_pool_cancels_a_probe() -> None:
    script = ScriptedBackend(gate=asyncio.Event())
    pool = RoutingPool({"m": [LiveDeployment("a", script)]})
    pool.start()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await pool.aclose()
    assert script.closed


async def test_status_has_load_and_circuits_of_a_deployment() -> None:
    clock = Clock()
    pool, (a, b) = await known_pool(live_of("a", clock, max_requests=1), live_of("b", clock, order=1), clock=clock)
    a.tolerance = b.tolerance = BreakerConfig(0, 30.0)
    with await pool.route(REQUEST).next_slot(REQUIREMENTS):
        b.failed(BackendTimeout("slow"))
        waiting = asyncio.create_task(pool.route(REQUEST).next_slot(REQUIREMENTS))
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


async def test_a_cooldown_ends_after_two_probes_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_failed_probe_extends_the_cooldown(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_crashed_deployment_is_detected_within_a_second() -> None:
    # With the real clock, the next periodic check of the pool is seconds away.
    pool, (a, b) = await known_pool(
        "a", "b", clock=time.monotonic, rules=RoutingRules(tolerance=BreakerConfig(1, 60.0))
    )
    pool.start()
    await asyncio.sleep(0.02)
    script_of(a).outcomes = [BackendUnavailable("gone")]
    a.probes.ended_at -= 5
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


async def test_urgent_probes_run_once_a_second() -> None:
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
    "requests of other clients": ([Load(running=3, waiting=2)], 5),
    "load not reported": ([None], 0),
    "load unknown after an error": ([Load(running=9, waiting=0), BackendUnavailable("x")], 0),
}


@pytest.mark.parametrize(("loads", "foreign"), LOADS.values(), ids=LOADS)
async def test_servers_that_share_a_model_are_polled_for_their_load(
    loads: list[Load | UnisonoError | None], foreign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LOAD_EVERY_S", 0.001)
    clock = Clock()
    pool, (a, b) = await known_pool("a", "b", clock=clock)
    script_of(a).loads = loads
    pool.start()
    await asyncio.sleep(0.01)
    assert script_of(a).load_requests == 0
    with await pool.route(REQUEST).next_slot(REQUIREMENTS):
        pass
    async with asyncio.timeout(5):
        while script_of(a).load_requests < len(loads) or pool.status()[0].foreign != foreign:
            await asyncio.sleep(0.001)
    polled = script_of(b).load_requests
    await asyncio.sleep(0.01)
    # A server that does not report its load is not polled again.
    assert script_of(b).load_requests == polled == 1
    clock.now += 60
    async with asyncio.timeout(5):
        while pool.status()[0].foreign:
            await asyncio.sleep(0.001)
    await pool.aclose()


async def test_a_single_deployment_is_not_polled_for_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LOAD_EVERY_S", 0.001)
    pool, (a,) = await known_pool("a", clock=Clock())
    pool.start()
    with await pool.route(REQUEST).next_slot(REQUIREMENTS):
        await asyncio.sleep(0.02)
    assert script_of(a).load_requests == 0
    await pool.aclose()


def test_requests_of_the_gateway_are_not_foreign_load() -> None:
    live = live_of("a", Clock())
    live.candidate.reserve(SelectionRequest(900, 1000))
    live.set_server_load(Load(running=1, waiting=0, tokens=800))
    assert (live.candidate.foreign_requests, live.candidate.foreign) == (0, 0)
    live.set_server_load(Load(running=3, waiting=0, tokens=9000))
    assert (live.candidate.foreign_requests, live.candidate.foreign) == (2, 2 * ANSWER_WORK)
    live.set_server_load(Load(running=2, waiting=3))
    assert (live.candidate.foreign_requests, live.candidate.foreign) == (4, 4 * ANSWER_WORK + 3 * FOREIGN_PROMPT)
    live.set_server_load(Load(running=0, waiting=2))
    assert (live.candidate.foreign_requests, live.candidate.foreign) == (1, ANSWER_WORK + FOREIGN_PROMPT)


async def test_a_request_that_ends_during_the_poll_is_not_foreign_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LOAD_EVERY_S", 0.001)
    pool, (a, _) = await known_pool("a", "b", clock=Clock())
    polls: asyncio.Queue[asyncio.Future[Load]] = asyncio.Queue()

    async def load() -> Load:
        reported: asyncio.Future[Load] = asyncio.get_running_loop().create_future()
        polls.put_nowait(reported)
        return await reported

    monkeypatch.setattr(script_of(a), "load", load)
    pool.start()
    async with asyncio.timeout(5):
        with await pool.route(REQUEST).next_slot(REQUIREMENTS):
            assert a.candidate.running == 1
            first = await polls.get()
        first.set_result(Load(running=1, waiting=0))
        # The next poll begins after the first one was evaluated.
        second = await polls.get()
        assert pool.status()[0].foreign == 0
        second.set_result(Load(running=1, waiting=0))
        await polls.get()
        assert pool.status()[0].foreign == 1
    await pool.aclose()


async def test_rejected_requests_are_logged_in_groups(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    rules = RoutingRules(bounds=QueueConfig(length=0))
    pool, _ = await known_pool(live_of("a", clock, max_requests=1), clock=clock, rules=rules)
    with await pool.route(REQUEST).next_slot(REQUIREMENTS):
        for _ in range(50):
            with pytest.raises(BackendOverloaded):
                await pool.route(REQUEST).next_slot(REQUIREMENTS)
            clock.now += 0.125
    logged = [vars(record)["refused"] for record in caplog.records if record.message == "requests refused"]
    assert logged == [1] + [8] * 6


async def test_a_carried_deployment_keeps_its_state() -> None:
    clock = Clock()
    old, (kept, dropped) = await known_pool("a", "b", clock=clock)
    old.start()
    slot = await old.route(REQUEST).next_slot(REQUIREMENTS)
    route = old.route(REQUEST)
    (in_use,) = (live for live in (kept, dropped) if live is slot.deployment)
    new = RoutingPool(
        {"m": [kept], "other": [added := live_of("c", clock)]},
        carried=[CarriedDeployment(kept, DeploymentConfig("renamed", weight=3))],
        replaced=old,
        prefixes=old.prefixes,
        clock=clock,
    )
    assert kept.name == "a"
    assert new.names() == [("m", "renamed"), ("other", "c")]
    new.start()
    assert new.names() == [("m", "renamed"), ("other", "c")]
    assert (kept.name, kept.candidate.weight) == ("renamed", 3)
    assert new.status()[0].state == "ready"
    await old.aclose()
    assert [script_of(live).closed for live in (kept, dropped, added)] == [False, True, False]
    # A slot of the old pool is in use until it is released.
    with slot:
        assert in_use.candidate.running == 1
    assert in_use.candidate.running == 0
    with await route.next_slot(REQUIREMENTS) as late:
        assert late.deployment in (kept, dropped)
    await new.aclose()
    assert script_of(kept).closed
    assert script_of(added).closed


async def test_a_waiting_request_does_not_use_a_deployment_that_a_reload_removed() -> None:
    clock = Clock()
    old, (kept, removed) = await known_pool(
        live_of("a", clock, max_requests=1), live_of("b", clock, max_requests=1), clock=clock
    )
    old.start()
    slots = {slot.deployment.name: slot for slot in [await old.route(REQUEST).next_slot(REQUIREMENTS) for _ in "ab"]}
    waiting = asyncio.create_task(old.route(REQUEST).next_slot(REQUIREMENTS))
    await asyncio.sleep(0)
    new = RoutingPool(
        {"m": [kept]},
        carried=[CarriedDeployment(kept, kept.terms)],
        replaced=old,
        prefixes=old.prefixes,
        clock=clock,
    )
    new.start()
    with slots["b"]:
        pass
    await asyncio.sleep(0)
    assert not waiting.done()
    with slots["a"]:
        pass
    with await waiting as slot:
        assert slot.deployment is kept
    await old.aclose()
    await new.aclose()
    assert script_of(removed).closed


@pytest.mark.parametrize("is_renewed", [False, True])
async def test_a_waiting_request_uses_a_replaced_deployment_if_no_other_one_works(is_renewed: bool) -> None:
    """The new deployment with the same name, or none, belongs to new requests only."""
    clock = Clock()
    old, (live,) = await known_pool(live_of("a", clock, max_requests=1), clock=clock)
    old.start()
    slot = await old.route(REQUEST).next_slot(REQUIREMENTS)
    waiting = asyncio.create_task(old.route(REQUEST).next_slot(REQUIREMENTS))
    await asyncio.sleep(0)
    new = RoutingPool(
        {"m": [live_of("a" if is_renewed else "b", clock)]}, replaced=old, prefixes=old.prefixes, clock=clock
    )
    new.start()
    assert live.terms.is_removed is not is_renewed
    with slot:
        pass
    with await waiting as late:
        assert late.deployment is live
    await old.aclose()
    await new.aclose()


async def test_an_answer_continues_on_its_removed_deployment() -> None:
    clock = Clock()
    old, (kept, removed) = await known_pool("a", "b", clock=clock)
    old.start()
    routes = [old.route(REQUEST) for _ in range(2)]
    slots = [await route.next_slot(REQUIREMENTS) for route in routes]
    new = RoutingPool(
        {"m": [kept]},
        carried=[CarriedDeployment(kept, kept.terms)],
        replaced=old,
        prefixes=old.prefixes,
        clock=clock,
    )
    new.start()
    for route, slot in zip(routes, slots, strict=True):
        with slot:
            used = slot.deployment
        with await route.next_slot(REQUIREMENTS) as next_slot:
            assert next_slot.deployment is used
    assert {slot.deployment.name for slot in slots} == {"a", "b"}
    await old.aclose()
    await new.aclose()
    assert script_of(removed).closed


@pytest.mark.parametrize("is_carried_again", [False, True])
async def test_a_deployment_stays_open_for_the_pools_before_the_one_that_drops_it(is_carried_again: bool) -> None:
    clock = Clock()
    first, (kept, dropped) = await known_pool("a", "b", clock=clock)
    first.start()
    pools = [first]
    for lives in ((kept, dropped), (kept, dropped) if is_carried_again else (kept,), (kept,)):
        carried = [CarriedDeployment(live, live.terms) for live in lives]
        pools.append(
            RoutingPool({"m": lives}, carried=carried, replaced=pools[-1], prefixes=first.prefixes, clock=clock)
        )
        pools[-1].start()
    for pool in pools[1:-1]:
        await pool.aclose()
    assert not script_of(dropped).closed
    assert first.prefixes.join() not in (kept.candidate.bit, dropped.candidate.bit)
    await first.aclose()
    assert (script_of(kept).closed, script_of(dropped).closed) == (False, True)
    await pools[-1].aclose()
    assert script_of(kept).closed


async def test_a_pool_that_was_never_started_does_not_take_over_deployments() -> None:
    clock = Clock()
    old, (a,) = await known_pool("a", clock=clock)
    new = RoutingPool(
        {"m": [a]},
        carried=[CarriedDeployment(a, DeploymentConfig("b"))],
        replaced=old,
        prefixes=old.prefixes,
        clock=clock,
    )
    await new.aclose()
    assert (a.name, script_of(a).closed) == ("a", False)
    with await old.route(REQUEST).next_slot(REQUIREMENTS):
        pass
    await old.aclose()
    assert script_of(a).closed


async def test_a_slot_released_in_the_old_pool_is_available_in_the_new_one() -> None:
    clock = Clock()
    old, (a,) = await known_pool(live_of("a", clock, max_requests=1), clock=clock)
    new = RoutingPool(
        {"m": [a]}, carried=[CarriedDeployment(a, a.terms)], replaced=old, prefixes=old.prefixes, clock=clock
    )
    new.start()
    with await old.route(REQUEST).next_slot(REQUIREMENTS):
        waiting = asyncio.create_task(new.route(REQUEST).next_slot(REQUIREMENTS))
        await asyncio.sleep(0)
        assert not waiting.done()
    with await waiting:
        assert a.candidate.running == 1
    await old.aclose()
    await new.aclose()
