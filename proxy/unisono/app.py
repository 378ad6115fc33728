"""Composition root: from a Config to a wired FastAPI application. The only module that knows everyone.

Importing it and building touch neither the network nor a model: backends are probed, and the store is opened, once the
server runs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import EntryPoint, entry_points
from secrets import token_bytes, token_hex
from typing import TYPE_CHECKING
from urllib.parse import quote

from fastapi import FastAPI

from unisono import __version__
from unisono.access.keys import Keys, MasterKey, NoKeys
from unisono.api.chat.routes import ChatModel, chat_router
from unisono.api.door import doors
from unisono.api.failures import register
from unisono.api.health import Readiness, health_routes
from unisono.api.models import models_router
from unisono.api.reasoning import ReasoningField
from unisono.api.responses.background.runner import Runner
from unisono.api.responses.conversations.routes import conversations_router
from unisono.api.responses.means import Means, ResponsesModel
from unisono.api.responses.routes import responses_router
from unisono.config import (
    KIND_ALIASES,
    KINDS,
    Catalogue,
    Config,
    GatewaySettings,
    ModelEntry,
    StoreSettings,
    data_folder,
)
from unisono.core.ports import Backend, BackendOptions
from unisono.core.state import Retention, Store
from unisono.engine.engine import Engine
from unisono.engine.memory import TurnMemory
from unisono.errors import ConfigError
from unisono.harmony.encoding import load_encoding
from unisono.harmony.render import Renderer
from unisono.routing.health import Tolerance
from unisono.routing.pool import LiveDeployment, RoundRobinPool
from unisono.routing.slots import SlottedBackend
from unisono.store import open_store
from unisono.store.upkeep import Upkeep

if TYPE_CHECKING:
    from unisono.api.responses.sealing import Sealer

BACKENDS = "unisono.backends"
"""The entry-point group adapters register themselves in, by kind."""

SETTINGS = "unisono.backend"
"""Where an entry holds what is its adapter's alone."""

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
    engine = build_engine(pool)
    means = responses_means(gateway, engine)
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
            resolve=lambda name: chat_model(catalogue, name),
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


def responses_means(gateway: Gateway, engine: Engine) -> Means:
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
    )


def responses_model(catalogue: Catalogue, name: str) -> ResponsesModel:
    """The group a client's name stands for, as the Responses API shows it. Raises UnknownModel."""
    model = catalogue.resolve(name)
    return ResponsesModel(
        group=model.name,
        show_reasoning=model.settings.reasoning_field != "none",
        stream_tool_arguments=model.settings.stream_tool_arguments,
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


def build_engine(pool: RoundRobinPool) -> Engine:
    """The engine over a pool; reads the vocabulary that comes with the package."""
    encoding = load_encoding()
    return Engine(
        encoding=encoding,
        renderer=Renderer(encoding),
        pool=pool,
        memory=TurnMemory(),
        new_call_id=lambda: f"call_{token_hex(12)}",
    )


def chat_model(catalogue: Catalogue, name: str) -> ChatModel:
    """The group a client's name stands for, as Chat Completions shows it. Raises UnknownModel."""
    model = catalogue.resolve(name)
    return ChatModel(
        group=model.name,
        reasoning=ReasoningField(model.settings.reasoning_field),
        stream_tool_arguments=model.settings.stream_tool_arguments,
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


def build_pool(config: Config, catalogue: Catalogue) -> RoundRobinPool:
    """Every deployment of every group, none of them asked anything yet. Raises ConfigError."""
    factories = _Factories()
    names = deployment_names(config.model_list)
    live = {
        id(entry): LiveDeployment(
            name=name,
            backend=_backend(entry, f"model_list[{index}]", factories, config.unisono),
            timeouts=config.timeouts(entry),
            weight=entry.litellm_params.weight,
            context=entry.model_info.max_input_tokens,
        )
        for index, (entry, name) in enumerate(zip(config.model_list, names, strict=True))
    }
    router = config.router_settings
    return RoundRobinPool(
        {model.name: [live[id(entry)] for entry in model.entries] for model in catalogue.groups()},
        Tolerance(router.allowed_fails, router.cooldown_time),
        attempts=1 + config.num_retries,
    )


def deployment_names(entries: Iterable[ModelEntry]) -> list[str]:
    """Public names: the configured id, else the kind and a number. No address, no path."""
    counts: dict[str, int] = {}
    names: list[str] = []
    for index, entry in enumerate(entries):
        counts[entry.kind] = counts.get(entry.kind, 0) + 1
        name = entry.model_info.id or f"{entry.kind}-{counts[entry.kind]}"
        if name in names:
            raise ConfigError(f"model_list[{index}].model_info.id: {name!r} is the name of another entry too")
        names.append(name)
    return names


def _backend(entry: ModelEntry, path: str, factories: _Factories, settings: GatewaySettings) -> Backend:
    params = entry.litellm_params
    factory = factories.of(entry, path)
    extra = AdapterSettings(entry.unisono.backend)
    options = BackendOptions(
        kind=entry.kind,
        model=entry.backend_model,
        api_base=params.api_base,
        api_key=params.api_key.get_secret_value() if params.api_key else None,
        extra=extra,
    )
    try:
        backend = factory(options)
    except ConfigError as error:
        raise ConfigError(f"{path}.{extra.placed(str(error))}") from error
    if extra.unread:
        raise ConfigError(f"{path}.{SETTINGS}.{extra.unread[0]}: the {entry.kind} adapter does not know this key")
    if params.max_parallel_requests is None:
        return backend
    return SlottedBackend(
        backend,
        places=params.max_parallel_requests,
        max_queue=settings.max_queue,
        queue_timeout_s=settings.queue_timeout_s,
    )


class AdapterSettings(Mapping[str, object]):
    """What `unisono: {backend: ...}` of a model says. Only its adapter knows which keys there are, so what it did not
    look at while it was built is a key nobody knows."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self._settings = settings
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self._read.add(key)
        return self._settings[key]

    def __iter__(self) -> Iterator[str]:
        self._read.update(self._settings)
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    @property
    def unread(self) -> list[str]:
        return [key for key in self._settings if key not in self._read]

    def placed(self, message: str) -> str:
        """An adapter's complaint with the key's path as it is in the file: the adapter cannot know it."""
        key, colon, rest = message.removeprefix("litellm_params.").partition(":")
        return f"{SETTINGS}.{key}{colon}{rest}" if key in self._settings else message


class _Factories:
    """Adapters by kind, imported when a model first needs them."""

    def __init__(self) -> None:
        self._found: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=BACKENDS)}

    def of(self, entry: ModelEntry, path: str) -> Callable[[BackendOptions], Backend]:
        """The factory for an entry that can be served. Raises ConfigError naming what can be instead."""
        path = f"{path}.litellm_params.model"
        kinds = ", ".join(sorted(self._found))
        model = entry.litellm_params.model
        if not entry.kind or not entry.backend_model:
            raise ConfigError(f"{path}: {model!r} must be <backend kind>/<model>; kinds: {kinds}")
        if entry.kind not in self._found:
            why = (
                "is a backend kind this version has no adapter for"
                if entry.kind in KINDS
                else "is no backend kind of Unisono, and passing requests on to other providers is not in this version"
            )
            hint = f"; {entry.harmony_hint}" if entry.harmony_hint else ""
            raise ConfigError(f"{path}: {entry.kind!r} {why}; kinds: {kinds} (and {', '.join(KIND_ALIASES)}){hint}")
        if not entry.harmony:
            raise ConfigError(
                f"{path}: neither {entry.model_name!r} nor {model!r} says gpt-oss, and this version serves Harmony "
                "models only; if it is one, set `model_info: {harmony: true}`"
            )
        try:
            factory: Callable[[BackendOptions], Backend] = self._found[entry.kind].load()
        except ImportError as error:
            raise ConfigError(
                f"{path}: the adapter for {entry.kind!r} cannot be imported: {error}; perhaps an extra is missing "
                f"(`pip install 'unisono[mlx]'` for mlx)"
            ) from error
        return factory


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
