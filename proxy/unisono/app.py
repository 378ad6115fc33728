"""Composition root: builds the application of a gateway from a Config.

Only this module and `bootstrap` import all packages. Importing this module and building an application use no network
and no model. Backends are probed and the store is opened when the server starts the application.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from os import urandom
from typing import TYPE_CHECKING

from starlette.middleware import Middleware

from unisono.access.end_users import EndUsers
from unisono.access.keys import Keys, MasterKey, NoKeys, VirtualKeys
from unisono.access.usage_ledger import UsageLedger
from unisono.api.asgi_layers import HEALTH_PATHS, asgi_layers
from unisono.api.layered_app import LayeredApp, Lifespan
from unisono.api.liveness import ReadinessCheck
from unisono.api.messages.error_format import ERROR_FORMATS
from unisono.api.metrics import MetricsSource
from unisono.api.models import ModelCards
from unisono.api.route_table import prepare_routes, provide
from unisono.bootstrap.alerts import Alerting
from unisono.bootstrap.api_parts import ApiParts, build_api_parts, build_failed_authentications, request_rules
from unisono.bootstrap.background import BackgroundResponses
from unisono.bootstrap.budgets import build_budgets, build_eligible, build_prices
from unisono.bootstrap.chat_api import DIRECT_ROUTES, chat_route
from unisono.bootstrap.deployments import build_pool
from unisono.bootstrap.engine import build_engine
from unisono.bootstrap.fidelity import FidelityWatch
from unisono.bootstrap.gateway import Gateway, build_parts
from unisono.bootstrap.hooks import Hookset, build_hooks
from unisono.bootstrap.lazy_routes import lazy_routes
from unisono.bootstrap.models import cards, readiness, rules_by_model
from unisono.bootstrap.salt import Salt, cache_salts
from unisono.bootstrap.store import build_ledger
from unisono.bootstrap.stored_models import NO_MODELS, StoredModels
from unisono.config import Config, ModelRegistry
from unisono.core.observer import LiveOutputs
from unisono.core.request_record import RecordSink
from unisono.engine.request import GenerationService
from unisono.errors import ConfigError, ConfigErrors
from unisono.middleware.live_outputs import LiveObservation
from unisono.middleware.pipeline import GuardedService
from unisono.middleware.quota import Metering
from unisono.net.client_addresses import ClientNetworks
from unisono.observe.recorder import Recorder
from unisono.observe.request_records import RequestFile, RequestWriter
from unisono.passthrough.dispatch import PassthroughService
from unisono.web.files import PATHS
from unisono.web.live_tokens import TokenComments

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State

    from unisono.api.responses.background.runner import BackgroundRunner


def build(
    config: Config, *, keep: Gateway | None = None, share: int = 1, models: StoredModels = NO_MODELS
) -> LayeredApp:
    """Build the application of a gateway. Needs no running event loop.

    Components of the old gateway `keep` are reused if their settings are unchanged. `share` is the number of processes,
    by which limits are divided. `config` must include the stored deployments that are served, and `models` describes
    all stored deployments. Raises ConfigError for an invalid configuration.
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
    metering = Metering(engine, ledger, prices, build_eligible(config, catalogue), lenient=lenient, zone=zone)
    recorder = observing.recorder(config, store)
    # Quotas come before hooks, so that a request that exceeds its quota does not reach a hook.
    budgets = build_budgets(config, metering)
    gates = (metering, *(() if budgets is None else (budgets,)), hooks.gates(harmony.restore))
    # Background responses belong to no request. A shutdown does not wait for them: other processes take them over.
    writers = observing.writers(config.unisono, store)
    sinks = observing.sinks(writers)
    in_background = GuardedService(engine, (observing.gates(pool, fidelity, recorder, sinks, background=True), *gates))
    background = _background(gateway, in_background, metering, sinks)
    gateway = replace(gateway, background=background)
    live = LiveOutputs()
    # Live tokens would reveal text that hooks and guardrails hold back, so there are none if these are configured.
    watching = () if config.unisono.hooks or config.guardrails else (LiveObservation(live),)
    outer = (observing.gates(pool, fidelity, recorder, sinks), *watching)
    service = GuardedService(engine, (*outer, *gates), can_drain=True)
    api_parts = build_api_parts(gateway, service, background, sinks)

    queues = [*writers, *([] if recorder is None else [recorder])]
    watches: list[FidelityWatch | Alerting] = [fidelity, *([] if alerting is None else [alerting])]
    lifespan = partial(_running, gateway, hooks, ledger, queues, background, watches)
    counted = [] if observing.metrics is None else [observing.metrics.answered]
    app = _make_app(api_parts, lifespan, [*counted, *sinks], share)
    provide(app.state, live, *_state_sources(gateway, ledger), chat_route(api_parts))
    app.state.gateway = gateway
    return app


def _make_gateway(config: Config, keep: Gateway | None, share: int, models: StoredModels) -> tuple[Gateway, Hookset]:
    """Build the gateway's components and hooks, or reuse those of the old gateway `keep`.

    Raises ConfigError with the errors of all components.
    """
    if not config.model_list:
        raise ConfigError("`model_list` is empty; add a model")
    parts, errors = None, ConfigErrors()
    with errors:
        parts = build_parts(config, None if keep is None else keep.parts, share)
    with errors:
        hooks = build_hooks(config, None if parts is None else parts.observing.hook_failed)
    with errors:
        catalogue = ModelRegistry(config)
        rules = rules_by_model(catalogue)
        old_pool = None if keep is None else keep.pool
        pool = build_pool(
            config, catalogue, share=share, keep=old_pool, drained=models.drained, on_trial=models.settings
        )
    errors.raise_all()
    assert parts is not None
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
    background: BackgroundResponses,
    watches: Sequence[FidelityWatch | Alerting],
) -> AsyncIterator[None]:
    """Start the components; at the end, close them in reverse order."""
    async with AsyncExitStack() as opened:
        # The order matters: background responses need the store until other processes can take them over, and all
        # generations need the pool.
        opened.push_async_callback(gateway.pool.aclose)
        opened.push_async_callback(hooks.aclose)
        # Start them concurrently, because each start may be slow if its server cannot be reached.
        await asyncio.gather(
            opened.enter_async_context(gateway.parts.store),
            opened.enter_async_context(gateway.parts.server_tools),
        )
        await opened.enter_async_context(
            gateway.parts.observing.watching(
                gateway.config, gateway.catalogue, gateway.pool, gateway.upkeep, lambda: ledger.unwritten_records
            )
        )
        # The pool takes over deployments of the application that this one replaces. If a component above fails to
        # start, the old application keeps these deployments and continues to serve requests.
        gateway.pool.start()
        for watch in watches:
            watch.start()
            opened.push_async_callback(watch.aclose)
        for queue in queues:
            opened.push_async_callback(queue.aclose)
        opened.push_async_callback(ledger.aclose)
        ledger.start()
        opened.push_async_callback(background.aclose)
        background.start()
        prepare_routes(DIRECT_ROUTES)
        yield


def _background(
    gateway: Gateway, service: GenerationService, metering: Metering, sinks: Sequence[RecordSink]
) -> BackgroundResponses:
    def build_runner(closing: bool) -> BackgroundRunner:
        from unisono.bootstrap.responses_api import background_runner

        return background_runner(gateway, service, metering.charge_journal, sinks, closing=closing)

    return BackgroundResponses(gateway.store, gateway.config.store.lease_s, build_runner)


def _make_app(parts: ApiParts, lifespan: Lifespan, sinks: Sequence[RecordSink], share: int) -> LayeredApp:
    """Return the application, without the dependencies of its routes.

    `sinks` receive the record of each request. `share` is the number of processes.
    """
    gateway, config = parts.gateway, parts.gateway.config
    master_key = config.general_settings.master_key
    keys: Keys = NoKeys() if master_key is None else MasterKey(master_key.get_secret_value(), gateway.virtual_keys)

    def build_fastapi(state: State) -> FastAPI:
        from unisono.bootstrap.fastapi_routes import build_fastapi

        return build_fastapi(gateway, state, check=lambda config, _: build(config, share=share), share=share)

    return LayeredApp(
        routes=DIRECT_ROUTES,
        lazy=lazy_routes(parts),
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
                formats=ERROR_FORMATS,
                networks=None if (allowed := config.general_settings.allowed_ips) is None else ClientNetworks(allowed),
                proxies=ClientNetworks(config.general_settings.proxies),
                failures=build_failed_authentications(config),
                rules=request_rules(config, gateway.catalogue, EndUsers(gateway.store).apply),
            ),
            Middleware(TokenComments),
        ],
    )


def _state_sources(gateway: Gateway, ledger: UsageLedger) -> tuple[object, ...]:
    """Return the dependencies of the routes for models, readiness and metrics."""
    config, catalogue, pool, upkeep = gateway.config, gateway.catalogue, gateway.pool, gateway.upkeep
    prices, names_keys = build_prices(config, catalogue), config.unisono.metrics_per_key
    return (
        ModelCards(lambda caller: cards(catalogue, pool, gateway.models, caller), int(time.time()), prices),
        ReadinessCheck(lambda: readiness(pool, upkeep, unaccounted=ledger.unwritten_records)),
        MetricsSource(gateway.parts.observing.metrics_page, names_keys=names_keys),
    )
