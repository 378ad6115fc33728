"""Checks of server settings that endanger stored state, reported as warnings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unisono.store.redis.connection import Link

Concern = Callable[[Mapping[str, str]], str]

READ = ("appendonly", "appendfsync", "maxmemory-policy")


def _eviction(settings: Mapping[str, str]) -> str:
    policy = settings["maxmemory-policy"]
    if policy == "noeviction":
        return ""
    return f"maxmemory-policy is {policy}: a full server drops conversations; set it to noeviction"


def _log(settings: Mapping[str, str]) -> str:
    if settings["appendonly"] == "yes":
        return ""
    return "appendonly is off: a crash of the server loses what it has acknowledged; set it to yes"


def _sync(settings: Mapping[str, str]) -> str:
    if settings["appendonly"] != "yes" or settings["appendfsync"] != "no":
        return ""
    return "appendfsync is no: a power cut loses what was acknowledged; set it to everysec or always"


CONCERNS: tuple[Concern, ...] = (_eviction, _log, _sync)


async def examine(link: Link, replicas: int | None) -> tuple[str, ...]:
    """Return each warning once, however many servers it concerns. Raises `StoreUnavailable`."""
    found: dict[str, None] = {}
    for settings in await link.settings(*READ):
        if not all(name in settings for name in READ):
            found["its settings cannot be read: see that appendonly is yes and maxmemory-policy is noeviction"] = None
            continue
        found |= dict.fromkeys(filter(None, (concern(settings) for concern in CONCERNS)))
    there = min((await link.connected_replicas()).values(), default=0)
    if there and replicas == 0:
        found["it has replicas, and writes do not wait for them: a failover may lose what was acknowledged"] = None
    if there < (replicas or 0):
        found[f"writes wait for {replicas} replicas, and it has {there}: nothing can be stored until it has more"] = (
            None
        )
    return tuple(found)
