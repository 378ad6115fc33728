"""What each surface is told of a model: the group that serves a name, whether the caller may use it, and how its
answers are shown. Read from the catalogue and the pool; nothing is kept here."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.api.chat.routes import ChatModel
from unisono.api.completions.routes import RawModel
from unisono.api.gateway_tools import RunnableTools
from unisono.api.health import Readiness
from unisono.api.messages.inbound import MessagesModel
from unisono.api.model_rules import ModelRules
from unisono.api.passthrough_routes import FindWay
from unisono.api.reasoning import ReasoningField
from unisono.api.responses.deps import ResponsesModel
from unisono.bootstrap.tool_servers import ServerToolSetup
from unisono.config import ModelRegistry, ServedModel
from unisono.core.access import Caller
from unisono.core.passthrough_request import AnswerMode, ServedName
from unisono.engine.turn import ForbiddenTools
from unisono.errors import ModelNotAllowed, UnknownModel, UnsupportedValue
from unisono.routing.pool import RoutingPool
from unisono.store.health_monitor import Upkeep


def allowed_model(catalogue: ModelRegistry, name: str, caller: Caller) -> ServedModel:
    """The group a client's name stands for, if the caller may use it by this name or by its own. Raises UnknownModel,
    and ModelNotAllowed, which tells whoever may not use all models nothing of which others there are."""
    model = None
    try:
        model = catalogue.resolve(name)
    except UnknownModel:
        if caller.models is None or not name:
            raise
    if model is None or not caller.may_ask(name, model.name):
        raise ModelNotAllowed(f"This key may not use a model `{name[:256]}`.", param="model")
    return model


def ways(catalogue: ModelRegistry) -> FindWay | None:
    """What finds how a client's name is served; None where that is always by the engine. It raises as
    `allowed_model`."""

    def way_of(name: str, caller: Caller) -> ServedName:
        model = allowed_model(catalogue, name, caller)
        return ServedName(model.name, catalogue.way(model), catalogue.keeps(model))

    return way_of if catalogue.passes else None


def model_rules(model: ServedModel) -> ModelRules:
    settings = model.settings
    forbidden_tools = ForbiddenTools(settings.forbidden_tools)
    return ModelRules(settings.reasoning_budget, settings.unmended, settings.failover, forbidden_tools)


def chat_model(catalogue: ModelRegistry, name: str, hosting: ServerToolSetup, caller: Caller) -> ChatModel:
    """The group a client's name stands for, as Chat Completions shows it. Raises as `allowed_model`."""
    model = allowed_model(catalogue, name, caller)
    return ChatModel(
        group=model.name,
        reasoning=ReasoningField(model.settings.reasoning_field),
        stream_tool_arguments=model.settings.stream_tool_arguments,
        runnable=RunnableTools(hosting.unasked(model.settings.mcp_servers, caller), model.settings.run_tools),
        rules=model_rules(model),
    )


def raw_model(catalogue: ModelRegistry, name: str, caller: Caller) -> RawModel:
    """The group a client's name stands for, for prompts that are not rendered here. Raises as `allowed_model`."""
    model = allowed_model(catalogue, name, caller)
    return RawModel(model.name, model_rules(model))


def responses_model(catalogue: ModelRegistry, name: str, caller: Caller) -> ResponsesModel:
    """The group a client's name stands for, as the Responses API shows it. Raises as `allowed_model`, and
    UnsupportedValue for one that only passes through: nothing is kept of what it answers."""
    model = allowed_model(catalogue, name, caller)
    if catalogue.way(model) in (AnswerMode.PASSING, AnswerMode.PASSING_THEN_ENGINE):
        raise UnsupportedValue(
            f"The model `{name[:256]}` passes through: it answers plain `POST /v1/responses`, and nothing beside that.",
            param="model",
        )
    return ResponsesModel(
        group=model.name,
        show_reasoning=model.settings.reasoning_field != "none",
        stream_tool_arguments=model.settings.stream_tool_arguments,
        tool_servers=None if model.settings.mcp_servers is None else frozenset(model.settings.mcp_servers),
        rules=model_rules(model),
    )


def messages_model(
    catalogue: ModelRegistry, name: str, hosting: ServerToolSetup, caller: Caller, pause_after: int
) -> MessagesModel:
    """The group a client's name stands for, as Messages shows it; its answers pause behind `pause_after` rounds of
    server tools. Raises as `allowed_model`."""
    model = allowed_model(catalogue, name, caller)
    labels = model.settings.mcp_servers
    return MessagesModel(
        group=model.name,
        show_reasoning=model.settings.reasoning_field != "none",
        stream_tool_arguments=model.settings.stream_tool_arguments,
        runnable=RunnableTools(hosting.unasked(labels, caller), model.settings.run_tools),
        trained=hosting.rules.for_model(labels).for_caller(caller).trained,
        rules=model_rules(model),
        pause_after=pause_after,
    )


@dataclass(frozen=True, slots=True)
class Card:
    """What is public about a model."""

    id: str
    context: int | None
    passes: bool = False
    owned_by: str = "unisono"


def cards(catalogue: ModelRegistry, pool: RoutingPool, caller: Caller) -> list[Card]:
    """Every name a caller may see, with the window as far as it is known by now."""
    return [
        Card(
            name, pool.context(model.name), catalogue.way(model) in (AnswerMode.PASSING, AnswerMode.PASSING_THEN_ENGINE)
        )
        for name, model in catalogue.listed()
        if caller.may_ask(name, model.name)
    ]


def readiness(pool: RoutingPool, upkeep: Upkeep, *, unaccounted: int = 0) -> Readiness:
    """Which models have a deployment that works. A store that does not is a reason and no more: what needs no state is
    answered all the same."""
    models: dict[str, bool] = {}
    reasons = [upkeep.reason] if upkeep.reason else []
    if unaccounted:
        reasons.append("usage_unaccounted")
    for status in pool.status():
        models[status.model] = models.get(status.model, False) or status.state == "ready"
        if status.reason:
            reasons.append(status.reason)
    return Readiness(models, reasons)
