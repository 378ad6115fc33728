"""All routes, and the dependencies of the routes that need FastAPI.

This module is imported only when the first request that needs FastAPI arrives.
"""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.datastructures import State
from starlette.routing import BaseRoute

from unisono.access.model_access import allowed_model
from unisono.api.admin.routes import ADMIN, Administration, BackendHealth, ModelAdministration
from unisono.api.chat.routes import CHAT, ChatRoute
from unisono.api.completions.routes import COMPLETIONS
from unisono.api.embeddings_and_media.routes import OTHER_MODES, RERANK_V2
from unisono.api.fastapi_app import fastapi_app
from unisono.api.liveness import HEALTH
from unisono.api.messages.routes import MESSAGES
from unisono.api.metrics import METRICS
from unisono.api.model_facts import MODEL_FACTS
from unisono.api.models import MODELS
from unisono.api.openapi import DOCUMENT
from unisono.api.request_records import REQUESTS, RequestSource
from unisono.api.responses.conversations.routes import CONVERSATIONS, ConversationDeps
from unisono.api.responses.routes import OPEN_RESPONSES_ROUTES, RESPONSES
from unisono.api.responses.routes.responses_api import ResponsesApi
from unisono.api.responses.routes.retrieve import STORED_OPEN_RESPONSES, STORED_RESPONSES
from unisono.api.route_table import find_dependency, provide
from unisono.api.tokenizer import TOKENIZER, Tokenizer
from unisono.api.usage_report import USAGE, UsageSource
from unisono.bootstrap.gateway import Gateway
from unisono.bootstrap.model_admin import build_model_administration, health_of
from unisono.bootstrap.observability import kinds_of
from unisono.bootstrap.status import Overview, deployment_health
from unisono.bootstrap.stored_models import Build, file_config
from unisono.config import ModelRegistry
from unisono.core.access import Caller
from unisono.core.observer import LiveOutputs
from unisono.errors import UnsupportedValue
from unisono.harmony.encoding import load_encoding
from unisono.routing.pool import RoutingPool
from unisono.web.files import PAGE
from unisono.web.routes import WEB, WebDeps


def build_tokenizer(catalogue: ModelRegistry, pool: RoutingPool, chat: ChatRoute) -> Tokenizer:
    encoding = load_encoding()

    def check_model(name: str, caller: Caller) -> int | None:
        model = allowed_model(catalogue, name, caller)
        if not any(entry.harmony for entry in model.entries):
            raise UnsupportedValue(
                f"'model': the gateway has no tokenizer for `{name[:64]}`; send the request directly to the "
                "backend of this model.",
                param="model",
            )
        return pool.context(model.name)

    return Tokenizer(check_model, chat.count, encoding.encode_as_server, encoding.decode)


_TABLES = (
    *(CHAT, RESPONSES, MESSAGES, COMPLETIONS, OTHER_MODES, RERANK_V2, OPEN_RESPONSES_ROUTES),
    *(MODELS, METRICS, HEALTH, PAGE),
    *(STORED_RESPONSES, STORED_OPEN_RESPONSES, CONVERSATIONS),
    *(MODEL_FACTS, USAGE, REQUESTS, TOKENIZER, ADMIN, WEB, DOCUMENT),
)
# All routes of a gateway, in the order in which they appear in the OpenAPI document.
ROUTES: tuple[BaseRoute, ...] = tuple(route for table in _TABLES for route in table.routes)


def build_fastapi(gateway: Gateway, state: State, *, check: Build[object], share: int) -> FastAPI:
    """Return a FastAPI application with all routes.

    Puts the dependencies that are still missing into `state`. All `LazyRoutes` must have been loaded before. `check`
    checks a configuration by building a gateway from it without running the gateway. `share` is the number of
    processes.
    """
    config, catalogue, pool, store = gateway.config, gateway.catalogue, gateway.pool, gateway.store
    observing, responses = gateway.parts.observing, find_dependency(state, ResponsesApi).deps
    clock = time.time
    overview = Overview(config, catalogue, pool, observing.recent, kinds_of(config), share, clock)
    is_keyless = config.general_settings.master_key is None
    provide(
        state,
        UsageSource(store.ledger, clock),
        RequestSource(store, clock, config.unisono.request_records.ttl_s),
        BackendHealth(lambda: [*deployment_health(pool), *health_of(gateway.models)]),
        _model_administration(gateway, check),
        Administration(store, gateway.salt, clock, is_keyless, config.litellm_settings.zone),
        WebDeps(overview, store, find_dependency(state, LiveOutputs)),
        build_tokenizer(catalogue, pool, find_dependency(state, ChatRoute)),
        ConversationDeps(store, responses.today, responses.new_id, clock, responses.seals, responses.files),
    )
    return fastapi_app(ROUTES, state)


def _model_administration(gateway: Gateway, check: Build[object]) -> ModelAdministration:
    """Return the operations with which the admin API manages deployments."""
    feed, own = gateway.parts.model_feed, (gateway.config, gateway.pool, gateway.models)
    return build_model_administration(
        file_config(gateway.config, gateway.models),
        gateway.store,
        gateway.sealer,
        check,
        applied=feed.applied,
        current=lambda: own if feed.current is None else feed.current(),
    )
