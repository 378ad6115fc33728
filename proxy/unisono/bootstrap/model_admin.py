"""Operations with which the admin API manages stored deployments.

Part of the composition root.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from unisono.api.admin.models import visible_settings
from unisono.api.admin.routes import ModelAdministration
from unisono.bootstrap.deployments import deployment_names
from unisono.bootstrap.stored_models import (
    Build,
    StoredModels,
    check_settings,
    open_settings,
    read_models,
    seal_settings,
)
from unisono.config import Config, ModelEntry
from unisono.core.deployments import ManagedDeployment
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.core.probe import Finding, unreached
from unisono.core.state_store import Store
from unisono.errors import BackendUnfit, UnisonoError
from unisono.routing.deployment import LiveDeployment
from unisono.routing.pool import RoutingPool

if TYPE_CHECKING:
    from unisono.api.sealing import Sealer

# Maximum time to wait for the first probe of a new deployment, in seconds.
PROBE_TIMEOUT_S: Final = 3.0

Applied = Callable[[str, DirectoryEntry | None], Awaitable[None]]
Seals = Callable[[], Awaitable["Sealer"]]


def build_model_administration(
    config: Config,
    store: Store,
    seals: Seals,
    build: Build[object],
    *,
    applied: Applied,
    current: Callable[[], tuple[Config, RoutingPool | None, StoredModels]],
) -> ModelAdministration:
    """Return the operations with which the admin API manages stored deployments.

    `config` is the configuration in the file. `build` checks a configuration by building a gateway without running it.
    `applied` waits until this process has applied a change. `current` returns what this process serves now.
    """

    async def check(id: str, settings: Mapping[str, Any]) -> None:
        known = read_models(await seals(), await store.directory(EntryKind.MODEL))
        await asyncio.to_thread(check_settings, config, known, id, settings, build)

    async def seal(id: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return seal_settings(await seals(), id, settings)

    async def opened(entry: DirectoryEntry) -> Mapping[str, Any] | None:
        return open_settings(await seals(), entry)

    async def probed(id: str, entry: DirectoryEntry | None) -> None:
        await applied(id, entry)
        pool = current()[1]
        live = None if pool is None or entry is None else _live(pool, id)
        if live is not None and live.known is None:
            with suppress(UnisonoError, TimeoutError):
                await asyncio.wait_for(live.capabilities(), PROBE_TIMEOUT_S)

    return ModelAdministration(
        file_names=lambda: frozenset(deployment_names(config.model_list)),
        check=check,
        seal=seal,
        opened=opened,
        visible=visible_settings,
        applied=probed,
        deployments=lambda: [*_reports(*current())],
    )


def _live(pool: RoutingPool, name: str) -> LiveDeployment | None:
    return next((live for members in pool.members().values() for live in members if live.name == name), None)


def _reports(config: Config, pool: RoutingPool | None, models: StoredModels) -> Iterator[ManagedDeployment]:
    """Yield a report about every deployment, including stored deployments that are not served."""
    states = {} if pool is None else {status.name: status for status in pool.status()}
    for entry, name in zip(config.model_list, deployment_names(config.model_list), strict=True):
        status = states.get(name)
        live = None if pool is None else _live(pool, name)
        failure = "" if live is None or live.failure is None else live.failure.message
        is_stored = models.is_served(name)
        yield ManagedDeployment(
            name,
            entry.model_name,
            is_stored=is_stored,
            state="unknown" if status is None else status.state,
            error="" if status is None else ": ".join(filter(None, (status.reason, failure))),
            is_drained=name in models.drained,
            running=0 if status is None else status.running,
            settings=visible_settings(models.settings[name] if is_stored else _file_settings(entry)),
            checks=() if live is None else _checks(live),
        )
    for id, problem in models.problems.items():
        settings = visible_settings(models.settings.get(id, {}))
        yield ManagedDeployment(
            id,
            models.sources[id].alias,
            is_stored=True,
            state="invalid",
            error=problem,
            is_drained=id in models.drained,
            settings=settings,
        )


def _checks(live: LiveDeployment) -> Sequence[Finding]:
    """Return the findings of the last probe.

    If the probe did not reach the backend, this is the only finding.
    """
    if live.failure is not None and not isinstance(live.failure, BackendUnfit):
        return (unreached(live.failure),)
    return () if live.examined is None else live.examined.findings


def health_of(models: StoredModels) -> Sequence[dict[str, Any]]:
    """Return the stored deployments that are not served, in the form of LiteLLM's `/health`."""
    return [
        {"model_group": models.sources[id].alias, "model_id": id, "state": "invalid", "error": problem}
        for id, problem in models.problems.items()
    ]


def _file_settings(entry: ModelEntry) -> dict[str, Any]:
    settings = entry.model_dump(mode="json", exclude_unset=True)
    params = settings["litellm_params"]
    return {**settings, "litellm_params": {**params, **params.pop("provider", {})}}
