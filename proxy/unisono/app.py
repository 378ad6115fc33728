"""Composition root: builds the application of a gateway from a Config.

Only this module and `bootstrap` know all packages. Importing and building access neither the network nor a model.
Backends are probed, and the store is opened, once the server runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from os import urandom
from typing import TYPE_CHECKING

from starlette.middleware import Middleware

from unisono import __version__
from unisono.access.end_users import EndUsers
from unisono.access.keys import Keys, MasterKey, NoKeys, VirtualKeys
from unisono.access.model_access import permitted_name
from unisono.access.usage_ledger import UsageLedger
from unisono.api.asgi_layers import HEALTH_PATHS, asgi_layers
from unisono.api.chat.routes import ChatRoute
from unisono.api.completions.routes import CompletionRoute
from unisono.api.health import ReadinessCheck
from unisono.api.layered_app import LayeredApp, Lifespan
from unisono.api.messages.routes import FORMATS, MessagesDeps
from unisono.api.metrics import MetricsSource
from unisono.api.models import ModelCards
from unisono.api.modes.routes import ModeRoute
from unisono.api.responses.background.runner import BackgroundRunner
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.routes.responses_api import ResponsesApi
from unisono.api.route_table import prepare_routes, provide
from unisono.api.server_rules import ServerRules
from unisono.bootstrap.alerts import Alerting
from unisono.bootstrap.budgets import build_budgets, build_prices
from unisono.bootstrap.components import build_components
from unisono.bootstrap.direct_routes import DIRECT_ROUTES
from unisono.bootstrap.engine import build_engine
from unisono.bootstrap.fidelity import FidelityWatch
from unisono.bootstrap.files import build_file_reader
from unisono.bootstrap.gateway import Gateway
from unisono.bootstrap.hooks import Hookset
from unisono.bootstrap.models import (
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
from unisono.bootstrap.request_rules import build_failures, request_rules
from unisono.bootstrap.salt import Salt, cache_salts
from unisono.bootstrap.store import build_ledger
from unisono.bootstrap.stored_models import NO_MODELS, StoredModels
from unisono.bootstrap.tool_servers import ServerToolSetup
from unisono.config import Config, GatewaySettings
from unisono.core.live_outputs import LiveOutputs
from unisono.core.request_record import RecordSink
from unisono.engine.request import GenerationService
from unisono.errors import ConfigError
from unisono.harmony.encoding import load_encoding
from unisono.middleware.live_outputs import LiveObservation
from unisono.middleware.pipeline import GuardedService
from unisono.middleware.quota import Metering
from unisono.net.client_networks import ClientNetworks
from unisono.observe.recorder import Recorder
from unisono.observe.request_file import RequestFile
from unisono.observe.request_writer import RequestWriter
from unisono.passthrough.dispatch import PassthroughService
from unisono.web.files import PATHS
from unisono.web.token_comments import TokenComments

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State


def build(
    config: Config, *, keep: Gateway | None = None, share: int = 1, models: StoredModels = NO_MODELS
) -> LayeredApp:
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
    watches: list[FidelityWatch | Alerting] = [fidelity, *([] if alerting is None else [alerting])]
    lifespan = partial(_running, gateway, hooks, ledger, queues, runner, watches)
    counted = [] if observing.metrics is None else [observing.metrics.answered]
    app = _make_app(gateway, lifespan, [*counted, *sinks], share)
    provide(app.state, live, *_state_sources(gateway, ledger), *_api_dependencies(gateway, service, runner))
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
        prepare_routes(DIRECT_ROUTES)
        yield


def _make_app(gateway: Gateway, lifespan: Lifespan, sinks: Sequence[RecordSink], share: int) -> LayeredApp:
    """Return the application; the caller provides the dependencies of its routes.

    `sinks` receive the record of each request.
    """
    config = gateway.config
    master_key = config.general_settings.master_key
    keys: Keys = NoKeys() if master_key is None else MasterKey(master_key.get_secret_value(), gateway.virtual_keys)

    def build_fastapi(state: State) -> FastAPI:
        from unisono.bootstrap.fastapi_routes import build_fastapi

        return build_fastapi(gateway, state, check=lambda config, _: build(config, share=share), share=share)

    return LayeredApp(
        routes=DIRECT_ROUTES,
        build_fastapi=build_fastapi,
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
        ],
    )


def _state_sources(gateway: Gateway, ledger: UsageLedger) -> tuple[object, ...]:
    """Return the dependencies of the routes for the list of models, readiness and metrics."""
    config, catalogue, pool, upkeep = gateway.config, gateway.catalogue, gateway.pool, gateway.upkeep
    prices, names_keys = build_prices(config, catalogue), config.unisono.metrics_per_key
    return (
        ModelCards(lambda caller: cards(catalogue, pool, gateway.models, caller), int(time.time()), prices),
        ReadinessCheck(lambda: readiness(pool, upkeep, unaccounted=ledger.unwritten_records)),
        MetricsSource(gateway.parts.observing.metrics_page, names_keys=names_keys),
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
