"""Components of a gateway (`Gateway`), and the components that a reload reuses (`Parts`).

A component is reused unless its own settings have changed.
"""

from __future__ import annotations

import asyncio
from dataclasses import field
from typing import TYPE_CHECKING

from unisono.access.keys import VirtualKeys
from unisono.api.image_descriptions import DescriptionCache
from unisono.bootstrap.background import BackgroundResponses
from unisono.bootstrap.models import Rules
from unisono.bootstrap.observability import Observing, build_observing
from unisono.bootstrap.salt import Salt
from unisono.bootstrap.shared_resources import SharedResource, reuse_or_build
from unisono.bootstrap.store import build_store
from unisono.bootstrap.stored_models import NO_MODELS, ModelFeed, StoredModels
from unisono.bootstrap.tool_servers import ServerToolSetup, build_server_tools
from unisono.config import Config, ModelRegistry
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.state_store import BackgroundRun, Store
from unisono.documents.reader import TextCache
from unisono.engine.conversation_cache import ConversationCache
from unisono.harmony.encoding import load_encoding
from unisono.harmony.render import Renderer
from unisono.routing.pool import RoutingPool
from unisono.store.health_monitor import Upkeep

if TYPE_CHECKING:
    from unisono.api.responses.background.job import BackgroundJob
    from unisono.api.sealing import Sealer


@dataclass(frozen=True, slots=True)
class Parts:
    """Components that the next gateway may reuse after a reload of the configuration."""

    store: SharedResource[tuple[Store, Upkeep]]
    server_tools: SharedResource[ServerToolSetup]
    memory: ConversationCache
    descriptions: DescriptionCache
    file_texts: TextCache
    renderer: Renderer
    observing: Observing
    model_feed: ModelFeed
    # Background responses that run in this process, including those that began before a reload.
    background_jobs: dict[BackgroundRun, BackgroundJob]


def build_parts(config: Config, old: Parts | None, share: int) -> Parts:
    """Build the components, or reuse those in `old`. Raises ConfigError for invalid settings."""
    observing = build_observing(config, None if old is None else old.observing, share)

    def store() -> SharedResource[tuple[Store, Upkeep]]:
        opened = observing.store(build_store(config.store, share))
        upkeep = Upkeep(opened)
        return SharedResource((opened, upkeep), config.store, start=upkeep.start, close=upkeep.aclose)

    settings = (config.mcp_servers, config.unisono.mcp_allowed_hosts, config.unisono.builtin_tools)

    def hosting() -> SharedResource[ServerToolSetup]:
        built = build_server_tools(config)
        return SharedResource(built, settings, start=built.host.start, close=built.host.aclose)

    return Parts(
        store=reuse_or_build(None if old is None else old.store, config.store, store),
        server_tools=reuse_or_build(None if old is None else old.server_tools, settings, hosting),
        memory=ConversationCache() if old is None else old.memory,
        descriptions=DescriptionCache() if old is None else old.descriptions,
        file_texts=TextCache() if old is None else old.file_texts,
        renderer=Renderer(load_encoding()) if old is None else old.renderer,
        observing=observing,
        model_feed=ModelFeed() if old is None else old.model_feed,
        background_jobs={} if old is None else old.background_jobs,
    )


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
