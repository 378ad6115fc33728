"""Composition root: builds a FastAPI application from a Config. It alone knows all packages.

Importing and building access neither the network nor a model. Backends are probed, and the store is opened, once the
server runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import field, replace
from datetime import UTC, datetime
from functools import partial
from os import urandom
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from unisono import __version__
from unisono.access.end_users import EndUsers
from unisono.access.keys import Keys, MasterKey, NoKeys, VirtualKeys
from unisono.access.model_access import permitted_name
from unisono.access.usage_ledger import UsageLedger
from unisono.api.admin.routes import ADMIN, Administration, BackendHealth, ModelAdministration
from unisono.api.asgi_layers import HEALTH_PATHS, asgi_layers
from unisono.api.chat.routes import CHAT, ChatRoute
from unisono.api.completions.routes import COMPLETIONS, CompletionRoute
from unisono.api.error_responses import register
from unisono.api.health import HEALTH, ReadinessCheck
from unisono.api.layered_app import LayeredApp
from unisono.api.messages.routes import FORMATS, MESSAGES, MessagesDeps
from unisono.api.metrics import METRICS, MetricsSource
from unisono.api.models import MODELS, ModelCards
from unisono.api.modes.routes import OTHER_MODES, RERANK_V2, ModeRoute
from unisono.api.openapi import DOCUMENT
from unisono.api.request_records import REQUESTS, RequestSource
from unisono.api.responses.background.runner import BackgroundRunner
from unisono.api.responses.conversations.routes import CONVERSATIONS, ConversationDeps
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.routes import OPEN_RESPONSES_ROUTES, RESPONSES
from unisono.api.responses.routes.responses_api import ResponsesApi
from unisono.api.route_table import DirectRoutes, mount, prepare_routes
from unisono.api.server_rules import ServerRules
from unisono.api.tokenizer import TOKENIZER
from unisono.api.usage import USAGE, UsageSource
from unisono.bootstrap.alerts import Alerting
from unisono.bootstrap.budgets import build_budgets, build_prices
from unisono.bootstrap.components import build_components
from unisono.bootstrap.engine import build_engine
from unisono.bootstrap.fidelity import FidelityWatch
from unisono.bootstrap.files import build_file_reader
from unisono.bootstrap.hooks import Hookset
from unisono.bootstrap.model_admin import build_model_administration, health_of
from unisono.bootstrap.models import (
    Rules,
    answer_modes,
    cards,
    chat_model,
    image_describer,
    messages_model,
    mode_model,
    raw_model,
    readiness,
    responses_model,
)
from unisono.bootstrap.observability import kinds_of
from unisono.bootstrap.parts import Parts
from unisono.bootstrap.request_rules import build_failures, request_rules
from unisono.bootstrap.salt import Salt, cache_salts
from unisono.bootstrap.status import Overview, deployment_health
from unisono.bootstrap.store import build_ledger
from unisono.bootstrap.stored_models import NO_MODELS, StoredModels, file_config
from unisono.bootstrap.tokenizer import build_tokenizer
from unisono.bootstrap.tool_servers import ServerToolSetup
from unisono.config import Config, GatewaySettings, ModelRegistry
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.live_outputs import LiveOutputs
from unisono.core.request_record import RecordSink
from unisono.core.state_store import Store
from unisono.engine.request import GenerationService
from unisono.errors import ConfigError
from unisono.harmony.encoding import load_encoding
from unisono.middleware.live import LiveObservation
from unisono.middleware.pipeline import GuardedService
from unisono.middleware.quota import Metering
from unisono.net.client_networks import ClientNetworks
from unisono.observe.recorder import Recorder
from unisono.observe.request_file import RequestFile
from unisono.observe.request_writer import RequestWriter
from unisono.passthrough.dispatch import PassthroughService
from unisono.routing.pool import RoutingPool
from unisono.store.health_monitor import Upkeep
from unisono.web.files import PAGE, PATHS
from unisono.web.routes import WEB, WebDeps
from unisono.web.token_comments import TokenComments

if TYPE_CHECKING:
    from unisono.api.sealing import Sealer

# Routes of every gateway. The router tries them in order, so those that generate are first.
_GENERATING = (CHAT, RESPONSES, MESSAGES, COMPLETIONS, OTHER_MODES, RERANK_V2, OPEN_RESPONSES_ROUTES)
_OTHERS = (CONVERSATIONS, MODELS, USAGE, REQUESTS, TOKENIZER, ADMIN, WEB, METRICS, DOCUMENT, HEALTH, PAGE)
ROUTES: tuple[BaseRoute, ...] = tuple(route for table in (*_GENERATING, *_OTHERS) for route in table.routes)


@dataclass(frozen=True, slots=True)
class Gateway:
    """Built components for the code that runs the application, at `app.state.gateway`."""

    config: Config
    catalogue: ModelRegistry
    pool: RoutingPool
    store: Store
    upkeep: Upkeep
    parts: Parts
    virtual_keys: VirtualKeys
    # Secret for seals and keys.
    salt: Salt
    rules: Rules
    models: StoredModels = NO_MODELS
    runner: BackgroundRunner | None = None
    _sealers: list[Sealer] = field(default_factory=list)

    async def sealer(self) -> Sealer:
        """Return the gateway's sealer, created on first use. Raises `StoreUnavailable`."""
        if not self._sealers:
            from unisono.api.sealing import Sealer

            self._sealers.append(Sealer(await self.salt()))
        return self._sealers[0]

    async def caller(self, tenant: str, key: str) -> Caller:
        """Return the caller by tenant and key id. Raises `StoreUnavailable`."""
        return await self.virtual_keys.caller(tenant, key) if key else Caller(tenant, raw=True)

    def model_administration(self, share: int) -> ModelAdministration:
        """Return the operations of the admin API on deployments."""
        feed, own = self.parts.model_feed, (self.config, self.pool, self.models)
        return build_model_administration(
            file_config(self.config, self.models),
            self.store,
            self.sealer,
            lambda config, _: build(config, share=share),
            applied=feed.applied,
            current=lambda: own if feed.current is None else feed.current(),
        )

    async def hand_over(self, grace_s: float) -> None:
        """Hand background responses to the next process; running tool calls get `grace_s` seconds."""
        if self.runner is not None:
            await self.runner.aclose(grace_s)


def build(config: Config, *, keep: Gateway | None = None, share: int = 1, models: StoredModels = NO_MODELS) -> FastAPI:
    """Build the whole gateway; reuse open components of `keep` that fit the configuration.

    `share` is the number of processes like this one, among which limits are divided. The configuration includes the
    deployments of the store, which `models` describes. Raises ConfigError; needs no running loop.
    """
    gateway, hooks = _make_gateway(config, keep, share, models)
    catalogue, pool, store, parts = gateway.catalogue, gateway.pool, gateway.store, gateway.parts
    hosting = parts.server_tools.value
    lenient = config.unisono.when_store_is_down == "known_keys"
    observing = parts.observing
    alerting = observing.alerts(config.unisono.alerts, pool, store, gateway.upkeep)
    fidelity = observing.fidelity(config, pool, alerting)
    ledger = build_ledger(config.store, store, gateway.upkeep, observing.quota_observers(alerting))
    salts = cache_salts(shared=config.unisono.share_prompt_caches)
    harmony = build_engine(pool, hosting.host, parts, salts, library_parser=config.unisono.library_parser)
    engine = PassthroughService(harmony, pool)
    prices, zone = build_prices(config, catalogue), config.litellm_settings.zone
    metering = Metering(engine, ledger, prices, lenient=lenient, zone=zone)
    recorder = observing.recorder(config, store)
    # A request that exceeds its quota reaches no hook.
    budgets = build_budgets(config, catalogue, metering)
    gates = (metering, *(() if budgets is None else (budgets,)), hooks.gates)
    # Background responses belong to no request: at shutdown, other processes take them over.
    writers = observing.writers(config.unisono, store)
    sinks = observing.sinks(writers)
    in_background = GuardedService(engine, (observing.gates(pool, fidelity, recorder, sinks, background=True), *gates))
    background = replace(responses_deps(gateway, in_background, hosting.rules), charge_journal=metering.charge_journal)
    runner = BackgroundRunner(background, process=urandom(8).hex())
    gateway = replace(gateway, runner=runner)
    live = LiveOutputs()
    # Live tokens would show what hooks and guardrails hold back.
    watching = () if config.unisono.hooks or config.guardrails else (LiveObservation(live),)
    outer = (observing.gates(pool, fidelity, recorder, sinks), *watching)
    service = GuardedService(engine, (*outer, *gates), can_drain=True)

    queues = [*writers, *([] if recorder is None else [recorder])]
    counted = [] if observing.metrics is None else [observing.metrics.answered]
    watches: list[FidelityWatch | Alerting] = [fidelity, *([] if alerting is None else [alerting])]
    app = _make_app(gateway, lambda _: _running(gateway, hooks, ledger, queues, runner, watches), [*counted, *sinks])
    mount(app, ROUTES, *_state_dependencies(gateway, ledger, share, live), *_api_dependencies(gateway, service, runner))
    app.state.gateway = gateway
    return app


def _make_gateway(config: Config, keep: Gateway | None, share: int, models: StoredModels) -> tuple[Gateway, Hookset]:
    """Build the components that the state and the routes need. Raises ConfigError."""
    if not config.model_list:
        raise ConfigError("`model_list` is empty; add a model")
    old_parts, old_pool = (None, None) if keep is None else (keep.parts, keep.pool)
    parts, hooks, catalogue, rules, pool = build_components(config, old_parts, old_pool, share, models)
    store, upkeep = parts.store.value
    salt = Salt(config, store)
    lenient = config.unisono.when_store_is_down == "known_keys"
    virtual_keys = VirtualKeys(store, salt, known_while_down=lenient)
    return Gateway(config, catalogue, pool, store, upkeep, parts, virtual_keys, salt, rules, models), hooks


@asynccontextmanager
async def _running(
    gateway: Gateway,
    hooks: Hookset,
    ledger: UsageLedger,
    queues: Sequence[Recorder | RequestWriter | RequestFile],
    runner: BackgroundRunner,
    watches: Sequence[FidelityWatch | Alerting],
) -> AsyncIterator[None]:
    """Start the components, and close them in reverse order at the end."""
    async with AsyncExitStack() as opened:
        # The stack closes in reverse order: background responses need the store until they are handed over, and all
        # generations need the pool.
        opened.push_async_callback(gateway.pool.aclose)
        opened.push_async_callback(hooks.aclose)
        gateway.pool.start()
        # Concurrently: each may be slow if its peer is absent.
        await asyncio.gather(
            opened.enter_async_context(gateway.parts.store),
            opened.enter_async_context(gateway.parts.server_tools),
        )
        await opened.enter_async_context(
            gateway.parts.observing.watching(
                gateway.config, gateway.catalogue, gateway.pool, gateway.upkeep, lambda: ledger.unwritten_records
            )
        )
        for watch in watches:
            watch.start()
            opened.push_async_callback(watch.aclose)
        for queue in queues:
            opened.push_async_callback(queue.aclose)
        opened.push_async_callback(ledger.aclose)
        ledger.start()
        opened.push_async_callback(runner.aclose)
        runner.start()
        prepare_routes(ROUTES)
        yield


def _make_app(
    gateway: Gateway,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    sinks: Sequence[RecordSink],
) -> FastAPI:
    """Return an application without routes. `sinks` receive the record of each request."""
    config = gateway.config
    master_key = config.general_settings.master_key
    keys: Keys = NoKeys() if master_key is None else MasterKey(master_key.get_secret_value(), gateway.virtual_keys)
    app = LayeredApp(
        title="Unisono",
        version=__version__,
        # The OpenAPI document is one of the routes, because it requires a key.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        layers=[
            *asgi_layers(
                authenticate=keys.identify,
                keyless=master_key is None,
                new_id=lambda: urandom(16).hex(),
                origins=config.unisono.cors_origins,
                open_paths=HEALTH_PATHS | PATHS,
                max_body_bytes=config.unisono.max_body_bytes,
                body_deadline_s=config.unisono.body_timeout_s,
                max_upload_bytes=config.unisono.max_upload_bytes,
                upload_deadline_s=config.unisono.upload_timeout_s,
                sinks=sinks,
                formats=FORMATS,
                networks=None if (allowed := config.general_settings.allowed_ips) is None else ClientNetworks(allowed),
                proxies=ClientNetworks(config.general_settings.proxies),
                failures=build_failures(config),
                rules=request_rules(config, gateway.catalogue, EndUsers(gateway.store).apply),
            ),
            Middleware(TokenComments),
            Middleware(DirectRoutes, routes=ROUTES),
        ],
    )
    register(app)
    return app


def _state_dependencies(gateway: Gateway, ledger: UsageLedger, share: int, live: LiveOutputs) -> tuple[object, ...]:
    """Return the dependencies of the routes on the state of the gateway."""
    config, catalogue, pool, store = gateway.config, gateway.catalogue, gateway.pool, gateway.store
    observing, zone = gateway.parts.observing, config.litellm_settings.zone
    is_keyless, prices = config.general_settings.master_key is None, build_prices(config, catalogue)
    return (
        ReadinessCheck(lambda: readiness(pool, gateway.upkeep, unaccounted=ledger.unwritten_records)),
        MetricsSource(observing.metrics_page, names_keys=config.unisono.metrics_per_key),
        ModelCards(lambda caller: cards(catalogue, pool, gateway.models, caller), int(time.time()), prices),
        UsageSource(store.ledger, time.time),
        RequestSource(store, time.time, config.unisono.request_records.ttl_s),
        BackendHealth(lambda: [*deployment_health(pool), *health_of(gateway.models)]),
        gateway.model_administration(share),
        Administration(store, gateway.salt, time.time, is_keyless, zone),
        WebDeps(Overview(config, catalogue, pool, observing.recent, kinds_of(config), share, time.time), store, live),
    )


def _api_dependencies(gateway: Gateway, service: GenerationService, runner: BackgroundRunner) -> tuple[object, ...]:
    """Return the dependencies of the routes of the APIs that generate."""
    config, catalogue, hosting = gateway.config, gateway.catalogue, gateway.parts.server_tools.value
    describer = image_describer(catalogue, service, gateway.parts.descriptions)
    files = build_file_reader(config.unisono.files, gateway.parts.file_texts)
    passing_files = files if config.unisono.hooks or config.guardrails else None
    deps = responses_deps(gateway, service, hosting.rules)
    deps = replace(deps, describer=describer, files=files, passing_files=passing_files)
    chat = ChatRoute(
        service=service,
        resolve=lambda name, caller: chat_model(catalogue, gateway.rules, name, hosting, caller),
        today=lambda: current_date(config.unisono),
        new_id=lambda: urandom(16).hex(),
        clock=time.time,
        fingerprint=f"unisono-{__version__}",
        find_way=answer_modes(catalogue),
        describer=describer,
        files=files,
        passing_files=passing_files,
    )
    return (
        chat,
        build_tokenizer(catalogue, gateway.pool, chat),
        CompletionRoute(
            service=service,
            resolve=lambda name, caller: raw_model(catalogue, gateway.rules, name, caller),
            permitted_name=partial(permitted_name, catalogue),
            switched_on=config.unisono.raw_completions,
            spell=load_encoding().decode,
            cut=load_encoding().encode_as_server,
            new_id=lambda: urandom(16).hex(),
            clock=time.time,
            fingerprint=f"unisono-{__version__}",
        ),
        ModeRoute(service, partial(mode_model, catalogue)),
        ConversationDeps(gateway.store, deps.today, deps.new_id, time.time, files),
        ResponsesApi(deps, runner),
        replace(messages_deps(gateway, service, hosting), describer=describer, files=files),
    )


def responses_deps(gateway: Gateway, service: GenerationService, servers: ServerRules | None = None) -> ResponsesDeps:
    """Return the dependencies of the Responses API."""
    return ResponsesDeps(
        service=service,
        store=gateway.store,
        resolve=partial(responses_model, gateway.catalogue, gateway.rules, gateway.pool),
        seals=gateway.sealer,
        today=lambda: current_date(gateway.config.unisono),
        new_id=lambda prefix: prefix + urandom(16).hex(),
        clock=time.time,
        lease_s=gateway.config.store.lease_s,
        retention_s=gateway.config.store.ttl_s,
        servers=servers or ServerRules(),
        caller_of=gateway.caller,
        find_way=answer_modes(gateway.catalogue),
    )


def messages_deps(gateway: Gateway, service: GenerationService, setup: ServerToolSetup) -> MessagesDeps:
    """Return the dependencies of the Messages API."""
    pause_after = gateway.config.unisono.pause_after_rounds
    return MessagesDeps(
        service=service,
        resolve=lambda name, caller: messages_model(
            gateway.catalogue, gateway.rules, gateway.pool, name, setup, caller, pause_after
        ),
        seals=gateway.sealer,
        today=lambda: current_date(gateway.config.unisono),
        new_id=lambda: urandom(12).hex(),
        clock=time.time,
    )


def current_date(settings: GatewaySettings) -> str:
    """Return the date for prompts as YYYY-MM-DD; empty for none."""
    if settings.current_date == "none":
        return ""
    day = datetime.now(UTC).date() if settings.current_date == "today" else settings.current_date
    return day.isoformat()
