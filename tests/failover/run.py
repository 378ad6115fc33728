"""One run: two gateways, a store that fails over at a seeded moment, and an audit at the end."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.gateway import config_of
from tests.e2e.hosting import hosts
from tests.e2e.replicas import Replica
from tests.failover.load import Audit, Clients, Outcome, called_twice, script
from tests.failover.topologies import QUICK, REALISTIC, Pace, cluster_of_six, sentinels
from tests.fakes import FakeVllm
from tests.mcp.conftest import start_upstream

TOPOLOGIES: dict[str, Any] = {"sentinel": sentinels, "cluster": cluster_of_six}
LOAD_BEFORE_S = (0.8, 2.0)
LOAD_AFTER_S = 10.0
SERVING_WITHIN_S = 90.0
PACES = {pace.name: pace for pace in (QUICK, REALISTIC)}


@dataclass(frozen=True)
class Setting:
    """Topology, configured `replicas` (None omits the setting) and pace of a run."""

    topology: str
    replicas: int | None
    pace: Pace = QUICK

    def __str__(self) -> str:
        return f"{self.topology} replicas {self.replicas}" + (" realistic" if self.pace is REALISTIC else "")


async def failover(setting: Setting, seed: int, folder: Path) -> Outcome:
    chance = random.Random(f"{setting} {seed}")
    async with AsyncExitStack() as stack:
        (folder / "upstream").mkdir(parents=True)
        _, upstream = stack.enter_context(start_upstream(folder / "upstream"))
        fake = await stack.enter_async_context(FakeVllm(script=script))
        topology = await stack.enter_async_context(TOPOLOGIES[setting.topology](folder, setting.pace))
        store: dict[str, Any] = {"url": topology.url, "lease_s": 1.0, "deadline_s": 0.5}
        if setting.replicas is not None:
            store["replicas"] = setting.replicas
        config = config_of(f"vllm@{fake.url}", store=store, mcp_servers=hosts(upstream)["mcp_servers"])
        gateways = [Replica(folder / f"gateway{number}", config) for number in range(2)]
        for gateway in gateways:
            stack.push_async_callback(gateway.end)
        await asyncio.gather(*(gateway.start() for gateway in gateways))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        clients = Clients([gateway.url for gateway in gateways], session, chance)
        running = asyncio.create_task(clients.run())
        await asyncio.sleep(chance.uniform(*LOAD_BEFORE_S))
        names = list(topology.faults)
        fault = names[seed % len(names)]
        # Half of the faults also kill a gateway, so that the other gateway must take over its responses.
        is_killed = seed // len(names) % 2 == 1
        killing = asyncio.create_task(_kill(gateways[0], clients, chance.uniform(0.1, 2.0), is_killed))
        began_s = time.monotonic()
        await topology.faults[fault](chance)
        await killing
        await clients.served(SERVING_WITHIN_S)
        served_after_s = time.monotonic() - began_s
        # The former primary also rejoins under load.
        await asyncio.sleep(LOAD_AFTER_S)
        clients.stop()
        await running
        audit = Audit(gateways[1].url, session)
        await audit.check(clients.ledger)
        repeated_calls, calls_started = called_twice(upstream, clients.ledger.questions)
        ledger = clients.ledger
        return Outcome(
            str(setting),
            seed,
            fault + (" and a gateway" if is_killed else ""),
            ledger.acknowledged,
            audit.lost,
            audit.unfinished,
            repeated_calls,
            calls_started,
            ledger.failures,
            audit.unknown,
            audit.statuses,
            ledger.samples,
            served_after_s,
            await asyncio.to_thread(topology.failovers),
        )


async def _kill(gateway: Replica, clients: Clients, after_s: float, is_killed: bool) -> None:
    await asyncio.sleep(after_s)
    if is_killed:
        clients.urls.remove(gateway.url)
        gateway.kill()
