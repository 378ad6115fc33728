"""Routes of the Responses API that generate answers or count tokens.

This module is imported when the first request to this API arrives, or when this process takes over a background
response that another process has abandoned.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from os import urandom

from starlette.datastructures import State
from starlette.routing import BaseRoute

from unisono.access.model_access import text_model
from unisono.api.responses.background.runner import BackgroundRunner
from unisono.api.responses.deps import ChargeJournal, ResponsesDeps, ResponsesModel
from unisono.api.responses.routes import OPEN_RESPONSES_ROUTES, RESPONSES
from unisono.api.responses.routes.responses_api import ResponsesApi
from unisono.api.route_table import provide
from unisono.api.tool_server_rules import ServerRules
from unisono.bootstrap.api_parts import ApiParts, current_date
from unisono.bootstrap.gateway import Gateway
from unisono.bootstrap.models import Rules, answer_modes
from unisono.config import ModelRegistry
from unisono.core.access import Caller
from unisono.core.passthrough_request import AnswerMode
from unisono.core.request_record import RecordSink
from unisono.engine.request import GenerationService
from unisono.errors import UnsupportedValue
from unisono.routing.pool import RoutingPool


def responses_routes(parts: ApiParts, state: State) -> Sequence[BaseRoute]:
    """Put the dependencies of the Responses API into `state`, and return its routes."""
    gateway = parts.gateway
    deps = responses_deps(gateway, parts.service, gateway.parts.server_tools.value.rules)
    deps = replace(
        deps,
        describer=parts.describer,
        files=parts.files,
        passthrough_files=parts.passthrough_files,
        sinks=parts.sinks,
    )
    provide(state, ResponsesApi(deps, parts.background.runner()))
    return [*RESPONSES.routes, *OPEN_RESPONSES_ROUTES.routes]


def background_runner(
    gateway: Gateway,
    service: GenerationService,
    charge_journal: ChargeJournal,
    sinks: Sequence[RecordSink],
    *,
    closing: bool,
) -> BackgroundRunner:
    """Return the runner of background responses.

    `service` generates the responses. `charge_journal` charges for the tokens in the journal of a response that cannot
    be continued. `sinks` receive the records of the responses. If `closing` is True, the runner starts no response.
    """
    deps = responses_deps(gateway, service, gateway.parts.server_tools.value.rules)
    deps = replace(deps, charge_journal=charge_journal, sinks=sinks)
    return BackgroundRunner(deps, process=urandom(8).hex(), jobs=gateway.parts.background_jobs, closing=closing)


def responses_deps(gateway: Gateway, service: GenerationService, servers: ServerRules | None = None) -> ResponsesDeps:
    """Return the dependencies of the Responses API. `servers` is None if no server is allowed."""
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


def responses_model(
    catalogue: ModelRegistry, rules: Rules, pool: RoutingPool, name: str, caller: Caller
) -> ResponsesModel:
    """Return the settings of a model for the Responses API.

    Raises UnsupportedValue for a pass-through model, whose answers are not stored, and the same errors as `text_model`.
    """
    model = text_model(catalogue, name, caller)
    if catalogue.answer_mode(model) in (AnswerMode.PASSTHROUGH, AnswerMode.PASSTHROUGH_THEN_ENGINE):
        raise UnsupportedValue(
            f"The pass-through model `{name[:256]}` supports only plain `POST /v1/responses` requests.",
            param="model",
        )
    return ResponsesModel(
        group=model.name,
        show_reasoning=model.settings.reasoning_field != "none",
        stream_tool_arguments=model.settings.stream_tool_arguments,
        tool_servers=None if model.settings.mcp_servers is None else frozenset(model.settings.mcp_servers),
        rules=rules[model.name],
        window=partial(pool.context, model.name),
    )
