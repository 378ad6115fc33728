"""Gateway process with virtual keys, a store, an MCP server and scripted backends."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.backend import KINDS, answering
from tests.contract.servers import Server
from tests.e2e.gateway import Gateway
from tests.e2e.hosting import hosts
from tests.e2e.keyed import ring, with_keys
from tests.e2e.replicas import Replica, replica
from tests.fakes import FakeVllm, Refusal, VllmScript, flood_from, half_event_at, inject_at, reset_at
from tests.mcp.conftest import start_upstream
from tests.soak.traffic import BROKEN, FLOOD, GROUPS, Traffic, new_session
from unisono.core.quotas import KeyLimits
from unisono.harmony.encoding import load_encoding

INSIDE = Path(__file__).with_name("inside")
BACKENDS: Sequence[tuple[str, str]] = (
    (GROUPS[0], "vllm"),
    (GROUPS[0], "sglang"),
    (GROUPS[1], "llamacpp"),
    (GROUPS[2], "ollama"),
)
FLOOD_BYTES = 8 * 1024 * 1024
ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>" + "la la " * 200 + "<|return|>")


@dataclass
class Site:
    """A gateway with its backends and traffic.

    `report` is the path of the report of the gateway process. `lost` is a list of prompts that no script continues.
    """

    replica: Replica
    report: Path
    lost: Path
    traffic: Traffic
    fakes: Sequence[Any]

    def forget(self) -> None:
        """Clear the recorded requests of the fakes, which would fill the memory of this process."""
        for fake in self.fakes:
            fake.requests.clear()
            fake.probes.clear()
            fake.closed_at.clear()


def failing_script(dice: Random) -> Any:
    """A script that fails in one of many ways."""
    faults = (reset_at(3), half_event_at(4), inject_at(2, b"data: {garbage\n\n"))
    choice = dice.randrange(len(faults) + 2)
    if choice < len(faults):
        return VllmScript(tokens=ANSWER[:40], faults=(faults[choice],))
    return Refusal(500 if choice == len(faults) else 429, b'{"error":{"message":"no"}}')


def config(fakes: Sequence[tuple[str, str, Any]]) -> dict[str, Any]:
    entries = [
        {"model_name": group, "litellm_params": {"model": f"{kind}/tiny", "api_base": fake.url}}
        for group, kind, fake in fakes
    ]
    return {"model_list": entries, "router_settings": {"num_retries": 2, "cooldown_time": 1.0}}


@asynccontextmanager
async def site(
    folder: Path, store: str, *, trace: int = 0, seed: int = 1, cache_share: float = 1.0
) -> AsyncIterator[Site]:
    """Start the site. `store` is `sqlite` or `redis`; `cache_share` scales the caches.

    `trace` is the number of frames for tracemalloc, or 0 to disable it.
    """
    dice = Random(seed)
    async with AsyncExitStack() as stack:
        _, upstream = stack.enter_context(start_upstream(folder))
        fakes: list[tuple[str, str, Any]] = []
        for group, name in BACKENDS:
            fake = await stack.enter_async_context(KINDS[name].fake())
            fake.script = answering(KINDS[name], folder / "lost.txt")
            fakes.append((group, name, fake))
        flood = VllmScript(tokens=ANSWER, per_chunk=16, faults=(flood_from(8, FLOOD_BYTES),))
        for group, script in ((BROKEN, lambda _: failing_script(dice)), (FLOOD, lambda _: flood)):
            fakes.append((group, "vllm", await stack.enter_async_context(FakeVllm(script=script))))
        address = f"sqlite://{folder}/state.db"
        if store == "redis":
            server = Server(folder / "redis", ("maxmemory-policy noeviction", "appendonly yes")).start()
            stack.callback(server.end)
            address = server.url
        report = folder / "report.json"
        inside = {"PYTHONPATH": os.pathsep.join([str(INSIDE), *filter(None, sys.path)]), "SOAK_REPORT": str(report)} | {
            "SOAK_CACHE_SHARE": str(cache_share)
        }
        os.environ.update(inside | ({"PYTHONTRACEMALLOC": str(trace)} if trace else {}))
        sections = with_keys(config(fakes) | hosts(upstream), address)
        running = await stack.enter_async_context(replica(folder / "gateway", sections))
        keys = await stack.enter_async_context(ring(address))
        _, key = await keys.issue("soak", KeyLimits())
        session = await stack.enter_async_context(new_session(key))
        traffic = Traffic(Gateway(running.url, session), key, dice)
        yield Site(running, report, folder / "lost.txt", traffic, [fake for *_, fake in fakes])
