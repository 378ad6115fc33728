"""Dependencies of Chat Completions, and all routes that every process imports at startup."""

from __future__ import annotations

import time
from functools import partial
from os import urandom

from starlette.routing import BaseRoute

from unisono.access.model_access import text_model
from unisono.api.chat.routes import CHAT, ChatModel, ChatRoute
from unisono.api.gateway_tools import BROWSER, RunnableTools, allowed
from unisono.api.liveness import HEALTH
from unisono.api.metrics import METRICS
from unisono.api.models import MODELS
from unisono.api.request_options import REASONING_FIELDS
from unisono.bootstrap.api_parts import FINGERPRINT, ApiParts
from unisono.bootstrap.gateway import Gateway
from unisono.bootstrap.models import answer_modes
from unisono.core.access import Caller
from unisono.web.files import PAGE


def chat_route(parts: ApiParts) -> ChatRoute:
    return ChatRoute(
        service=parts.service,
        resolve=partial(chat_model, parts.gateway),
        today=parts.today,
        new_id=lambda: urandom(16).hex(),
        clock=time.time,
        fingerprint=FINGERPRINT,
        find_way=answer_modes(parts.gateway.catalogue),
        describer=parts.describer,
        files=parts.files,
        passthrough_files=parts.passthrough_files,
    )


def chat_model(gateway: Gateway, name: str, caller: Caller) -> ChatModel:
    """Return the settings of a model for Chat Completions.

    Raises the same errors as `text_model`.
    """
    model = text_model(gateway.catalogue, name, caller)
    setup, labels = gateway.parts.server_tools.value, model.settings.mcp_servers
    browser = setup.rules.for_model(labels).for_caller(caller).trained.get(BROWSER) if setup.rules.builtins else None
    return ChatModel(
        group=model.name,
        reasoning=REASONING_FIELDS[model.settings.reasoning_field],
        stream_tool_arguments=model.settings.stream_tool_arguments,
        runnable=RunnableTools(
            setup.servers_without_approval(labels, caller),
            model.settings.run_tools,
            None if browser is None else allowed(browser, BROWSER),
        ),
        rules=gateway.rules[model.name],
    )


DIRECT_ROUTES: tuple[BaseRoute, ...] = tuple(
    route for table in (CHAT, MODELS, METRICS, HEALTH, PAGE) for route in table.routes
)
