"""Components of a built gateway, for the code that runs the application."""

from __future__ import annotations

import asyncio
from dataclasses import field
from typing import TYPE_CHECKING

from unisono.access.keys import VirtualKeys
from unisono.bootstrap.background import BackgroundResponses
from unisono.bootstrap.gateway_parts import Parts
from unisono.bootstrap.models import Rules
from unisono.bootstrap.salt import Salt
from unisono.bootstrap.stored_models import NO_MODELS, StoredModels
from unisono.config import Config, ModelRegistry
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.state_store import Store
from unisono.routing.pool import RoutingPool
from unisono.store.health_monitor import Upkeep

if TYPE_CHECKING:
    from unisono.api.sealing import Sealer


@dataclass(frozen=True, slots=True)
class Gateway:
    """Components of a gateway. The application has this object in `app.state.gateway`."""

    config: Config
    catalogue: ModelRegistry
    pool: RoutingPool
    store: Store
    upkeep: Upkeep
    parts: Parts
    virtual_keys: VirtualKeys
    # Secret with which values for clients are sealed and keys are hashed.
    salt: Salt
    rules: Rules
    models: StoredModels = NO_MODELS
    background: BackgroundResponses | None = None
    _sealers: list[Sealer] = field(default_factory=list)

    async def sealer(self) -> Sealer:
        """Return the gateway's sealer, which is created on first use.

        Raises StoreUnavailable if the secret cannot be read from the store.
        """
        if not self._sealers:
            from unisono.api.sealing import Sealer

            self._sealers.append(Sealer(await self.salt()))
        return self._sealers[0]

    async def caller(self, tenant: str, key: str) -> Caller:
        """Return the caller with this tenant and key id; an empty key id means the operator.

        Raises StoreUnavailable if the key cannot be read from the store.
        """
        return await self.virtual_keys.caller(tenant, key) if key else Caller(tenant, raw=True)

    async def stop_takeovers(self) -> None:
        """Stop taking over background responses of other processes. Running responses continue."""
        if self.background is not None:
            await self.background.stop_search()

    def background_tasks(self) -> set[asyncio.Task[None]]:
        """Return the tasks of the running background responses."""
        return set() if self.background is None else self.background.tasks()

    async def hand_over(self, grace_s: float) -> None:
        """Stop all background responses, so that other processes take them over.

        Running tool calls get `grace_s` seconds to finish.
        """
        if self.background is not None:
            await self.background.aclose(grace_s)
