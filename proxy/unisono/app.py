"""Composition root: from a Config to a wired FastAPI application. The only module that knows everyone.

Importing it and building touch neither the network nor a model: backends are probed, and the store is opened, once the
server runs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from secrets import token_bytes, token_hex
from typing import TYPE_CHECKING
from urllib.parse import quote

from fastapi import FastAPI

from unisono import __version__, schemas
from unisono.access.keys import Keys, MasterKey, NoKeys
from unisono.api.chat.inbound import RunnableTools
from unisono.api.chat.routes import ChatModel, chat_router
from unisono.api.door import doors
from unisono.api.failures import register
from unisono.api.health import Readiness, health_routes
from unisono.api.models import models_router
from unisono.api.reasoning import ReasoningField
from unisono.api.responses.background.runner import Runner
from unisono.api.responses.conversations.routes import conversations_router
from unisono.api.responses.hosting.servers import ServerRules
from unisono.api.responses.means import Means, ResponsesModel
from unisono.api.responses.routes import responses_router
from unisono.api.rules import ModelRules
from unisono.config import (
    Catalogue,
    Config,
    GatewaySettings,
    ServedModel,
    StoreSettings,
    data_folder,
)
from unisono.core.conversation import Json
from unisono.core.state import Retention, Store
from unisono.core.tools import ToolHost
from unisono.deployments import build_pool
from unisono.engine.engine import Engine
from unisono.engine.memory import TurnMemory
from unisono.errors import ConfigError, InvalidRequest
from unisono.harmony.encoding import load_encoding
from unisono.harmony.render import Renderer
from unisono.hosting import Hosting, build_hosting
from unisono.routing.pool import RoundRobinPool
from unisono.store import open_store
from unisono.store.upkeep import Upkeep

if TYPE_CHECKING:
    from unisono.api.responses.sealing import Sealer

SALT, SALT_BYTES = "salt", 32
"""Under which name the store keeps the salt nobody configured, and how long it is."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """What was built, for whoever runs the application: at `app.state.gateway`."""

    config: Config
    catalogue: Catalogue
    pool: RoundRobinPool
    store: Store
    upkeep: Upkeep
    _sealers: list[Sealer] = field(default_factory=list)

    async def salt(self) -> bytes:
        """What seals are made with: the configured key, else the store's. Raises `StoreUnavailable`."""
        configured = self.config.unisono.salt_key
        if configured is not None:
            return configured.get_secret_value().encode()
        return await self.store.secret(SALT, token_bytes(SALT_BYTES))

    async def sealer(self) -> Sealer:
        """The one sealer of this gateway, made when it is first needed. Raises `StoreUnavailable`."""
        if not self._sealers:
            from unisono.api.responses.sealing import Sealer

            self._sealers.append(Sealer(await self.salt()))
        return self._sealers[0]


def build(config: Config) -> FastAPI:
    """The whole gateway. Raises ConfigError; needs no running loop."""
    if not config.model_list:
        raise ConfigError("model_list: there is no model in it")
    catalogue = Catalogue(config)
    pool = build_pool(config, catalogue)
    store = build_store(config.store)
    gateway = Gateway(config, catalogue, pool, store, Upkeep(store))
    hosting = build_hosting(config)
    engine = build_engine(pool, hosting.host)
    means = responses_means(gateway, engine, hosting.rules)
    runner = Runner(means, process=token_hex(8))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        pool.start()
        try:
            await gateway.upkeep.start()
            runner.start()
            yield
        finally:
            await runner.aclose()
            await hosting.host.aclose()
            await pool.aclose()
            await gateway.upkeep.aclose()

    master_key = config.general_settings.master_key
    keys: Keys = NoKeys() if master_key is None else MasterKey(master_key.get_secret_value())
    app = FastAPI(
        title="Unisono",
        version=__version__,
        # The door asks for a key on every path but health, and a page that lists all paths helps nobody without one.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=doors(
            authenticate=keys.identify,
            keyless=master_key is None,
            new_id=lambda: token_hex(16),
            origins=config.unisono.cors_origins,
            max_body_bytes=config.unisono.max_body_bytes,
            body_deadline_s=config.unisono.body_timeout_s,
        ),
    )
    register(app)
    app.include_router(health_routes(lambda: readiness(gateway)))
    app.include_router(models_router(cards=lambda: cards(gateway), created=int(time.time())))
    app.include_router(
        chat_router(
            turns=engine,
            resolve=lambda name: chat_model(catalogue, name, hosting),
            today=lambda: current_date(config.unisono),
            new_id=lambda: token_hex(16),
            clock=time.time,
            fingerprint=f"unisono-{__version__}",
        )
    )
    app.include_router(
        conversations_router(store=store, today=means.today, new_id=means.new_id, clock=time.time),
    )
    app.include_router(responses_router(means, runner))
    app.state.gateway = gateway
    return app


def responses_means(gateway: Gateway, engine: Engine, servers: ServerRules | None = None) -> Means:
    """What the Responses API works with."""
    return Means(
        turns=engine,
        store=gateway.store,
        resolve=lambda name: responses_model(gateway.catalogue, name),
        seals=gateway.sealer,
        today=lambda: current_date(gateway.config.unisono),
        new_id=lambda prefix: prefix + token_hex(16),
        clock=time.time,
        lease_s=gateway.config.store.lease_s,
        servers=servers or ServerRules(),
    )


def responses_model(catalogue: Catalogue, name: str) -> ResponsesModel:
    """The group a client's name stands for, as the Responses API shows it. Raises UnknownModel."""
    model = catalogue.resolve(name)
    return ResponsesModel(
        group=model.name,
        show_reasoning=model.settings.reasoning_field != "none",
        stream_tool_arguments=model.settings.stream_tool_arguments,
        tool_servers=None if model.settings.mcp_servers is None else frozenset(model.settings.mcp_servers),
        rules=model_rules(model),
    )


def build_store(settings: StoreSettings) -> Store:
    """The configured store, or a file in the user's data folder, which memory replaces where nothing can be written.
    Not started yet. Raises ConfigError."""
    return open_store(
        store_address(settings),
        Retention(response_s=settings.ttl_s, conversation_s=settings.ttl_s, log_s=settings.log_ttl_s),
        deadline_s=settings.deadline_s,
        replicas=settings.replicas,
        or_memory=settings.url is None,
    )


def store_address(settings: StoreSettings) -> str:
    """The configured one, which may hold a password, or a file in the user's data folder."""
    if settings.url is not None:
        return settings.url.get_secret_value()
    return f"sqlite:///{quote(data_folder().removeprefix('/'))}/state.db"


def current_date(settings: GatewaySettings) -> str:
    """The day prompts begin with, as YYYY-MM-DD; empty for none."""
    match settings.current_date:
        case "today":
            return datetime.now(UTC).date().isoformat()
        case "none":
            return ""
        case day:
            return day.isoformat()


def build_engine(pool: RoundRobinPool, tools: ToolHost | None = None) -> Engine:
    """The engine over a pool and whoever runs tools; reads the vocabulary that comes with the package."""
    encoding = load_encoding()
    return Engine(
        encoding=encoding,
        renderer=Renderer(encoding),
        pool=pool,
        memory=TurnMemory(),
        new_call_id=lambda: f"call_{token_hex(12)}",
        tools=tools,
        violation=violation,
    )


def violation(schema: Mapping[str, Json], text: str) -> str | None:
    """What is wrong with JSON that has to match a schema. One that cannot be honoured allows everything: the schemas
    of strict tools and answers were checked, all others are the word of whoever wrote them."""
    try:
        schemas.check(schema, "schema")
    except InvalidRequest:
        return None
    return schemas.violation(schema, text)


def model_rules(model: ServedModel) -> ModelRules:
    return ModelRules(model.settings.reasoning_budget, model.settings.unmended)


def chat_model(catalogue: Catalogue, name: str, hosting: Hosting) -> ChatModel:
    """The group a client's name stands for, as Chat Completions shows it. Raises UnknownModel."""
    model = catalogue.resolve(name)
    return ChatModel(
        group=model.name,
        reasoning=ReasoningField(model.settings.reasoning_field),
        stream_tool_arguments=model.settings.stream_tool_arguments,
        runnable=RunnableTools(hosting.unasked(model.settings.mcp_servers), model.settings.run_tools),
        rules=model_rules(model),
    )


@dataclass(frozen=True, slots=True)
class Card:
    """What is public about a model."""

    id: str
    context: int | None
    owned_by: str = "unisono"


def cards(gateway: Gateway) -> list[Card]:
    """Every name clients may see, with the window as far as it is known by now."""
    return [Card(name, gateway.pool.context(model.name)) for name, model in gateway.catalogue.listed()]


def readiness(gateway: Gateway) -> Readiness:
    """Which models have a deployment that works. A store that does not is a reason and no more: what needs no state is
    answered all the same."""
    models: dict[str, bool] = {}
    reasons = [gateway.upkeep.reason] if gateway.upkeep.reason else []
    for status in gateway.pool.status():
        models[status.model] = models.get(status.model, False) or status.state == "ready"
        if status.reason:
            reasons.append(status.reason)
    return Readiness(models, reasons)
