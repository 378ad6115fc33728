"""Components that are kept after a reload unless their own settings change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.api.image_descriptions import DescriptionCache
from unisono.bootstrap.observability import Observing, build_observing
from unisono.bootstrap.shared_resources import SharedResource, reuse_or_build
from unisono.bootstrap.store import build_store
from unisono.bootstrap.stored_models import ModelFeed
from unisono.bootstrap.tool_servers import ServerToolSetup, build_server_tools
from unisono.config import Config
from unisono.core.frozen import dataclass
from unisono.core.state_store import BackgroundRun, Store
from unisono.documents.reader import TextCache
from unisono.engine.conversation_cache import ConversationCache
from unisono.harmony.encoding import load_encoding
from unisono.harmony.render import Renderer
from unisono.store.health_monitor import Upkeep

if TYPE_CHECKING:
    from unisono.api.responses.background.job import BackgroundJob


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
