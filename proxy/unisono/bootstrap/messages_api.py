"""Routes of the Messages API and their dependencies.

This module is imported only when the first request to this API arrives.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from os import urandom

from starlette.datastructures import State
from starlette.routing import BaseRoute

from unisono.access.model_access import engine_model
from unisono.api.gateway_tools import RunnableTools
from unisono.api.messages.inbound import MessagesModel
from unisono.api.messages.routes import MESSAGES, MessagesDeps
from unisono.api.route_table import provide
from unisono.bootstrap.api_parts import ApiParts
from unisono.bootstrap.gateway import Gateway
from unisono.core.access import Caller


def messages_routes(parts: ApiParts, state: State) -> Sequence[BaseRoute]:
    """Put the dependencies of the Messages API into `state`, and return its routes."""
    deps = MessagesDeps(
        service=parts.service,
        resolve=partial(messages_model, parts.gateway),
        seals=parts.gateway.sealer,
        today=parts.today,
        new_id=lambda: urandom(12).hex(),
        clock=time.time,
        describer=parts.describer,
        files=parts.files,
    )
    provide(state, deps)
    return MESSAGES.routes


def messages_model(gateway: Gateway, name: str, caller: Caller) -> MessagesModel:
    """Return the settings of a model for the Messages API.

    Raises the same errors as `engine_model`.
    """
    model = engine_model(gateway.catalogue, name, caller)
    setup, labels = gateway.parts.server_tools.value, model.settings.mcp_servers
    servers = setup.rules.for_model(labels).for_caller(caller)
    return MessagesModel(
        group=model.name,
        show_reasoning=model.settings.reasoning_field != "none",
        stream_tool_arguments=model.settings.stream_tool_arguments,
        runnable=RunnableTools(setup.servers_without_approval(labels, caller), model.settings.run_tools),
        trained=servers.trained,
        rules=gateway.rules[model.name],
        pause_after=gateway.config.unisono.pause_after_rounds,
        window=partial(gateway.pool.context, model.name),
        servers=servers,
    )
