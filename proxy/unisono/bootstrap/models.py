"""Properties of models that several APIs need, such as answer modes and readiness.

They are derived from the registry of models and the pool of deployments. This module has no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from unisono.access.model_access import text_model
from unisono.api.chat.answer_options import to_answer_defaults
from unisono.api.field_types import smallest
from unisono.api.liveness import Readiness
from unisono.api.model_rules import NO_DEFAULTS, AnswerDefaults, ModelRules
from unisono.api.passthrough_requests import FindWay
from unisono.bootstrap.stored_models import StoredModels
from unisono.config import ModelRegistry, ServedModel
from unisono.core.access import Caller
from unisono.core.deployments import DeploymentState
from unisono.core.frozen import dataclass
from unisono.core.passthrough_request import AnswerMode, ModelMode, ServedName
from unisono.engine.request import ForbiddenTools
from unisono.errors import ConfigError, InvalidRequest
from unisono.routing.pool import RoutingPool
from unisono.store.health_monitor import Upkeep

# Rules of all models, by the name of the model.
Rules: TypeAlias = Mapping[str, ModelRules]


def answer_modes(catalogue: ModelRegistry) -> FindWay | None:
    """Return a function that finds the answer mode of a model.

    Returns None if the engine answers all requests. The function raises the same errors as `text_model`.
    """

    def way_of(name: str, caller: Caller) -> ServedName:
        model = text_model(catalogue, name, caller)
        routing = caller.routing
        return ServedName(model.name, catalogue.answer_mode(model, routing), catalogue.stores_responses(model, routing))

    # In most configurations no model passes through, so their requests need no lookup.
    return way_of if catalogue.passes else None


def rules_by_model(catalogue: ModelRegistry) -> dict[str, ModelRules]:
    """Return the rules of all models, keyed by model name.

    Raises ConfigError if a default for requests is invalid.
    """
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
        vision_model=_vision_model(catalogue, model),
        defaults=defaults,
    )


def _vision_model(catalogue: ModelRegistry, model: ServedModel) -> str | None:
    """Return the model that describes images for `model`; None if no model describes them."""
    name = model.settings.media_model
    return name and catalogue.resolve_alias(name, "media_model")


def _answer_defaults(model: ServedModel) -> AnswerDefaults:
    """Return the defaults for requests in `litellm_params` of a model's first Harmony entry."""
    params = next((entry.litellm_params for entry in model.entries if entry.harmony), None)
    fields = {} if params is None else params.request_defaults
    if params is None or not fields:
        return NO_DEFAULTS
    try:
        return to_answer_defaults(fields)
    except InvalidRequest as error:
        place = "litellm_params.extra_body" if (error.param or "") in params.extra_body else "litellm_params"
        raise ConfigError(f"{place}.{error.param} of the model `{model.name}`: {error.message}") from None


@dataclass(frozen=True, slots=True)
class Card:
    """Public properties of a model name, for the list of models.

    `context` is the context window in tokens. `context` and `can_read_images` are None if unknown. `is_stored` is True
    if all deployments of the model were added at run time.
    """

    id: str
    context: int | None
    passes: bool = False
    mode: ModelMode = ModelMode.CHAT
    owned_by: str = "unisono"
    can_read_images: bool | None = False
    is_stored: bool = False


def cards(catalogue: ModelRegistry, pool: RoutingPool, stored: StoredModels, caller: Caller) -> list[Card]:
    """Return a card for every model name that the caller may see."""
    vision_models = {_vision_model(catalogue, model) for model in catalogue.groups()}

    def to_card(name: str, model: ServedModel) -> Card:
        passes = catalogue.answer_mode(model) in (AnswerMode.PASSTHROUGH, AnswerMode.PASSTHROUGH_THEN_ENGINE)
        # A pass-through model can read images if it is a `media_model`; otherwise its abilities are unknown.
        can_read_images = (model.name in vision_models or None) if passes else model.settings.media == "describe"
        return Card(
            name,
            pool.context(model.name),
            passes,
            model.mode,
            can_read_images=can_read_images,
            is_stored=all(stored.is_served(entry.model_info.id or "") for entry in model.entries),
        )

    return [
        to_card(name, model)
        for name, model in catalogue.listed()
        if caller.may_use_model(name, model.name, *model.access_groups)
    ]


def readiness(pool: RoutingPool, upkeep: Upkeep, *, unaccounted: int = 0) -> Readiness:
    """Return which models have a working deployment, and why the gateway is degraded.

    `unaccounted` is the number of usage records that are not written to the store yet. A failed store is a reason, but
    models stay ready, because requests without state are still answered.
    """
    # A model is ready if one of its deployments is ready.
    models: dict[str, bool] = {}
    reasons = [upkeep.reason] if upkeep.reason else []
    if unaccounted:
        reasons.append("usage_unaccounted")
    for status in pool.status():
        models[status.model] = models.get(status.model, False) or status.state == DeploymentState.READY
        if status.reason:
            reasons.append(status.reason)
    return Readiness(models, reasons)
