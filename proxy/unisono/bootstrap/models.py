"""Model lookups for each API surface, from the registry and the pool; stateless.

A lookup gives the group that serves a name (see `access.model_access`), and selects the output settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeAlias

from unisono.access.model_access import allowed_model, text_model, wrong_mode
from unisono.api.chat.defaults import to_answer_defaults
from unisono.api.chat.routes import ChatModel
from unisono.api.completions.routes import RawModel
from unisono.api.field_types import smallest
from unisono.api.gateway_tools import BROWSER, RunnableTools, allowed
from unisono.api.health import Readiness
from unisono.api.image_descriptions import DescriptionCache, ImageDescriber
from unisono.api.messages.inbound import MessagesModel
from unisono.api.model_rules import NO_DEFAULTS, AnswerDefaults, ModelRules
from unisono.api.modes.inbound import ModeModel
from unisono.api.passthrough_routes import FindWay
from unisono.api.request_options import REASONING_FIELDS
from unisono.api.responses.deps import ResponsesModel
from unisono.bootstrap.stored_models import StoredModels
from unisono.bootstrap.tool_servers import ServerToolSetup
from unisono.config import ModelRegistry, ServedModel
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.passthrough_request import MODES, AnswerMode, Api, ModelMode, ServedName
from unisono.engine.request import ForbiddenTools, GenerationService
from unisono.errors import ConfigError, InvalidRequest, UnsupportedValue
from unisono.routing.pool import RoutingPool
from unisono.store.health_monitor import Upkeep

# Rules of all models, by name.
Rules: TypeAlias = Mapping[str, ModelRules]


def mode_model(catalogue: ModelRegistry, api: Api, name: str, caller: Caller) -> ModeModel:
    """Return the model for a request that generates no text.

    Without a name, it is the only model whose mode fits the API. Raises as `allowed_model`, and UnsupportedValue for a
    model whose mode does not fit.
    """
    if not name:
        fitting = [model.name for model in catalogue.groups() if model.mode in MODES[api]]
        name = fitting[0] if len(fitting) == 1 else ""
    model = allowed_model(catalogue, name, caller)
    if model.mode not in MODES[api]:
        raise wrong_mode(name, model.mode)
    sizes = (entry.unisono.max_embedding_batch_size for entry in model.entries)
    # Any entry may answer a part.
    return ModeModel(model.name, min((size for size in sizes if size is not None), default=None))


def answer_modes(catalogue: ModelRegistry) -> FindWay | None:
    """Return a function that finds the answer mode of a name; None if the engine serves all.

    It raises as `text_model`.
    """

    def way_of(name: str, caller: Caller) -> ServedName:
        model = text_model(catalogue, name, caller)
        routing = caller.routing
        return ServedName(model.name, catalogue.answer_mode(model, routing), catalogue.stores_responses(model, routing))

    # Most configurations pass nothing through. Their requests skip the lookup.
    return way_of if catalogue.passes else None


def rules_by_model(catalogue: ModelRegistry) -> dict[str, ModelRules]:
    """Return the rules of all models by name. Raises ConfigError for invalid defaults."""
    return {model.name: _model_rules(catalogue, model) for model in catalogue.groups()}


def _model_rules(catalogue: ModelRegistry, model: ServedModel) -> ModelRules:
    settings = model.settings
    defaults = _answer_defaults(model)
    forbidden_tools = ForbiddenTools(settings.forbidden_tools)
    return ModelRules(
        smallest((settings.reasoning_budget, defaults.reasoning_budget)),
        settings.disabled_recoveries,
        settings.failover,
        forbidden_tools,
        strips_media=settings.media != "refuse",
        vision_model=settings.media_model and catalogue.resolve_alias(settings.media_model, "media_model"),
        defaults=defaults,
    )


def _answer_defaults(model: ServedModel) -> AnswerDefaults:
    """Return the defaults that `litellm_params` of a model gives."""
    params = next((entry.litellm_params for entry in model.entries if entry.harmony), None)
    fields = {} if params is None else params.request_defaults
    if params is None or not fields:
        return NO_DEFAULTS
    try:
        return to_answer_defaults(fields)
    except InvalidRequest as error:
        place = "litellm_params.extra_body" if (error.param or "") in params.extra_body else "litellm_params"
        raise ConfigError(f"{place}.{error.param} of the model `{model.name}`: {error.message}") from None


def image_describer(
    catalogue: ModelRegistry, service: GenerationService, cache: DescriptionCache
) -> ImageDescriber | None:
    """Return a describer of images; None if no model has a vision model."""
    has_vision_model = any(model.settings.media_model for model in catalogue.groups())
    return ImageDescriber(service, cache) if has_vision_model else None


def chat_model(catalogue: ModelRegistry, rules: Rules, name: str, setup: ServerToolSetup, caller: Caller) -> ChatModel:
    """Return the settings of a model for Chat Completions. Raises as `text_model`."""
    model = text_model(catalogue, name, caller)
    labels = model.settings.mcp_servers
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
        rules=rules[model.name],
    )


def raw_model(catalogue: ModelRegistry, rules: Rules, name: str, caller: Caller) -> RawModel:
    """Return the settings of a model for raw prompts. Raises as `text_model`."""
    model = text_model(catalogue, name, caller)
    return RawModel(model.name, rules[model.name])


def responses_model(
    catalogue: ModelRegistry, rules: Rules, pool: RoutingPool, name: str, caller: Caller
) -> ResponsesModel:
    """Return the settings of a model for the Responses API.

    Raises as `text_model`, and UnsupportedValue for a pass-through model, whose answers are not stored.
    """
    model = text_model(catalogue, name, caller)
    if catalogue.answer_mode(model) in (AnswerMode.PASSING, AnswerMode.PASSING_THEN_ENGINE):
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


def messages_model(
    catalogue: ModelRegistry,
    rules: Rules,
    pool: RoutingPool,
    name: str,
    setup: ServerToolSetup,
    caller: Caller,
    pause_after: int,
) -> MessagesModel:
    """Return the settings of a model for Messages. Raises as `text_model`.

    Its answers pause after `pause_after` rounds of server tools.
    """
    model = text_model(catalogue, name, caller)
    labels = model.settings.mcp_servers
    return MessagesModel(
        group=model.name,
        show_reasoning=model.settings.reasoning_field != "none",
        stream_tool_arguments=model.settings.stream_tool_arguments,
        runnable=RunnableTools(setup.servers_without_approval(labels, caller), model.settings.run_tools),
        trained=setup.rules.for_model(labels).for_caller(caller).trained,
        rules=rules[model.name],
        pause_after=pause_after,
        window=partial(pool.context, model.name),
        servers=setup.rules.for_model(labels).for_caller(caller),
    )


@dataclass(frozen=True, slots=True)
class Card:
    """Public facts about a model."""

    id: str
    context: int | None
    passes: bool = False
    mode: ModelMode = ModelMode.CHAT
    owned_by: str = "unisono"
    is_stored: bool = False


def cards(catalogue: ModelRegistry, pool: RoutingPool, stored: StoredModels, caller: Caller) -> list[Card]:
    """Return every name the caller may see, with the context window if it is known."""
    return [
        Card(
            name,
            pool.context(model.name),
            catalogue.answer_mode(model) in (AnswerMode.PASSING, AnswerMode.PASSING_THEN_ENGINE),
            model.mode,
            is_stored=all(stored.is_served(entry.model_info.id or "") for entry in model.entries),
        )
        for name, model in catalogue.listed()
        if caller.may_use_model(name, model.name, *model.access_groups)
    ]


def readiness(pool: RoutingPool, upkeep: Upkeep, *, unaccounted: int = 0) -> Readiness:
    """Return the models with a working deployment, and reasons for any degradation.

    A failed store is only a reason, because requests without state are still answered.
    """
    # A model is ready if one of its deployments is.
    models: dict[str, bool] = {}
    reasons = [upkeep.reason] if upkeep.reason else []
    if unaccounted:
        reasons.append("usage_unaccounted")
    for status in pool.status():
        models[status.model] = models.get(status.model, False) or status.state == "ready"
        if status.reason:
            reasons.append(status.reason)
    return Readiness(models, reasons)
