"""Checks of server settings that endanger stored state, reported as warnings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unisono.store.redis.connection import Link

Concern = Callable[[Mapping[str, str]], str]

HIDDEN = "the server hides its settings: make sure that appendonly is yes and maxmemory-policy is noeviction"
UNCOPIED = (
    "writes do not wait for the connected replicas: a failover may lose acknowledged writes; unset store.replicas"
)

READ = ("appendonly", "appendfsync", "maxmemory-policy")


def _eviction(settings: Mapping[str, str]) -> str:
    policy = settings["maxmemory-policy"]
    if policy == "noeviction":
        return ""
    return f"maxmemory-policy is {policy}: a full server deletes conversations; set it to noeviction"


def _log(settings: Mapping[str, str]) -> str:
    if settings["appendonly"] == "yes":
        return ""
    return "appendonly is off: acknowledged writes are lost if the server crashes; set it to yes"


def _sync(settings: Mapping[str, str]) -> str:
    if settings["appendonly"] != "yes" or settings["appendfsync"] != "no":
        return ""
    return "appendfsync is no: acknowledged writes are lost if the power fails; set it to everysec or always"


CONCERNS: tuple[Concern, ...] = (_eviction, _log, _sync)


async def check_servers(link: Link, replicas: int | None) -> tuple[str, ...]:
    """Return each warning once, however many servers it concerns. Raises `StoreUnavailable`."""
    found: dict[str, None] = {}
    for settings in await link.settings(*READ):
        if not all(name in settings for name in READ):
            found[HIDDEN] = None
            continue
        found |= dict.fromkeys(filter(None, (concern(settings) for concern in CONCERNS)))
    there = min((await link.connected_replicas()).values(), default=0)
    if there and replicas == 0:
        found[UNCOPIED] = None
    if there < (replicas or 0):
        warning = (
            f"store.replicas is {replicas}, but only {there} are connected: all writes fail until more are connected"
        )
        found[warning] = None
    return tuple(found)
