"""Routes `/model/*` in LiteLLM's format, which change deployments at run time.

`visible_settings` removes the secrets from the settings of a deployment, for responses and audit records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from fastapi import Depends, Path, Query

from unisono.api.admin.administration import ADMIN, AdminDeps, Administration, CurrentActor, IdempotencyKey
from unisono.api.admin.fields import AdminBody, Name
from unisono.api.admin.model_changes import (
    ModelAdministration,
    change_model,
    create_model,
    delete_model,
    deployment_view,
    report_of,
    row_view,
    set_drained,
)
from unisono.api.answer_types import AnswerModel, Object
from unisono.api.dependencies import CurrentCaller, ParsedBody, check_query, provided
from unisono.api.model_facts import MODEL_FACTS, Cards, LiteLlmModel, to_litellm_model
from unisono.api.route_table import BODY_404_409
from unisono.config.stored_entry import without_answer_keys
from unisono.core.access import Caller
from unisono.core.deployments import ManagedDeployment
from unisono.errors import InvalidRequest, UnisonoError
from unisono.observe.redaction import secrets_in

# Pattern in the names of keys whose values are secret and never returned.
_SECRET: Final = re.compile(r"key|secret|(?<!per_)token$|password|credential|header|auth|cookie", re.IGNORECASE)


def visible_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a deployment without secrets, for responses and audit records."""
    return {
        key: visible_settings(value) if isinstance(value, Mapping) else _without_password(value)
        for key, value in without_answer_keys(settings).items()
        if not _SECRET.search(key) or key == "litellm_credential_name"
    }


def _without_password(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [visible_settings(each) if isinstance(each, Mapping) else _without_password(each) for each in value]
    if isinstance(value, str) and "://" in value:
        for secret in sorted(secrets_in(value), key=len, reverse=True):
            value = value.replace(secret, "***")
    return value


class NewModel(AdminBody):
    """Body of `/model/new`: an entry of `model_list`."""

    model_name: Name
    litellm_params: dict[str, Any]
    model_info: dict[str, Any] | None = None
    unisono: dict[str, Any] | None = None


class ChangedModel(AdminBody):
    """Body of `/model/update`.

    Each setting in a section replaces the deployment's setting with the same name; `null` removes the setting.
    """

    model_name: Name | None = None
    litellm_params: dict[str, Any] | None = None
    model_info: dict[str, Any] | None = None
    unisono: dict[str, Any] | None = None


class ModelReference(AdminBody):
    """Body of `/model/delete`."""

    id: Name


class ModelRow(AnswerModel):
    """Stored deployment, in the form in which LiteLLM's API returns it."""

    model_id: str
    model_name: str
    litellm_params: Object
    model_info: Object


class DeletedModel(AnswerModel):
    message: str


class ModelDeployment(AnswerModel):
    """LiteLLM's entry of `/model/info` for admins: settings and state of a deployment."""

    model_name: str
    litellm_params: Object
    model_info: Object


class ModelInfoList(AnswerModel):
    data: list[ModelDeployment | LiteLlmModel]


Models = Annotated[ModelAdministration, provided(ModelAdministration)]
DeploymentId = Annotated[
    str, Path(description="`model_info.id` of the deployment.", json_schema_extra={"minLength": 1})
]


@ADMIN.add("POST", "/model/new", BODY_404_409, answer=ModelRow, body=NewModel)
async def create_model_deployment(
    admin: AdminDeps,
    models: Models,
    actor: CurrentActor,
    body: ParsedBody[NewModel],
    idempotency_key: IdempotencyKey = "",
) -> Object:
    """Add a deployment. It gets requests as soon as a probe has succeeded."""
    entry = await create_model(admin, models, actor, body.model_dump(exclude_none=True), idempotency_key)
    return row_view(entry, await report_of(models, entry.id))


@ADMIN.add("POST", "/model/update", BODY_404_409, answer=ModelRow, body=ChangedModel)
async def update_model_deployment(
    admin: AdminDeps, models: Models, actor: CurrentActor, body: ParsedBody[ChangedModel]
) -> Object:
    """Change the settings that the body contains; all other settings of the deployment stay."""
    id = (body.model_info or {}).get("id")
    if not isinstance(id, str) or not id:
        raise InvalidRequest("Missing required field 'model_info.id'.", param="model_info.id")
    return await _changed(admin, models, actor, id, body)


@ADMIN.add("PATCH", "/model/{id:path}/update", BODY_404_409, answer=ModelRow, body=ChangedModel)
async def patch_model_deployment(
    admin: AdminDeps, models: Models, actor: CurrentActor, id: DeploymentId, body: ParsedBody[ChangedModel]
) -> Object:
    """Change the settings that the body contains; all other settings of the deployment stay."""
    return await _changed(admin, models, actor, id, body)


async def _changed(
    admin: Administration, models: ModelAdministration, actor: CurrentActor, id: str, body: ChangedModel
) -> Object:
    sent = body.model_dump(include=set(body.model_fields_set))
    entry = await change_model(admin, models, actor, id, sent)
    return row_view(entry, await report_of(models, entry.id))


@ADMIN.add("POST", "/model/delete", BODY_404_409, body=ModelReference)
async def delete_model_deployment(
    admin: AdminDeps, models: Models, actor: CurrentActor, body: ParsedBody[ModelReference]
) -> DeletedModel:
    """Remove a stored deployment. Answers in progress are completed."""
    await delete_model(admin, models, actor, body.id)
    return DeletedModel(message=f"Model: {body.id} deleted successfully")


@ADMIN.add("POST", "/model/{id:path}/drain", BODY_404_409)
async def drain_model_deployment(
    admin: AdminDeps, models: Models, actor: CurrentActor, id: DeploymentId
) -> ModelDeployment:
    """Stop new requests to a deployment until it is resumed. Answers in progress are completed."""
    await set_drained(admin, models, actor, id, is_drained=True)
    return _deployment(await report_of(models, id))


@ADMIN.add("POST", "/model/{id:path}/resume", BODY_404_409)
async def resume_model_deployment(
    admin: AdminDeps, models: Models, actor: CurrentActor, id: DeploymentId
) -> ModelDeployment:
    """Resume a drained deployment, so that it gets requests again."""
    await set_drained(admin, models, actor, id, is_drained=False)
    return _deployment(await report_of(models, id))


def _deployment(report: ManagedDeployment, facts: Object | None = None) -> ModelDeployment:
    """Return a deployment in LiteLLM's format. `facts` is the `model_info` of its model."""
    view = deployment_view(report)
    return ModelDeployment.model_validate({**view, "model_info": {**(facts or {}), **view["model_info"]}})


@MODEL_FACTS.add("GET", "/model/info", dependencies=[Depends(check_query)])
async def list_model_info(
    admin: AdminDeps,
    models: Models,
    known: Cards,
    caller: CurrentCaller,
    litellm_model_id: Annotated[str | None, Query(description="Id of one deployment, for admins.")] = None,
) -> ModelInfoList:
    """List the models in LiteLLM's format.

    Admins get every deployment with its settings and state.
    """
    cards = [to_litellm_model(card, known.prices) for card in known.cards(caller)]
    if not await _sees_deployments(admin, caller):
        return ModelInfoList(data=[card for card in cards if litellm_model_id in (None, card.model_info.id)])
    facts = {card.model_name: card.model_info.model_dump() for card in cards}
    reports = [each for each in models.deployments() if litellm_model_id in (None, each.id)]
    return ModelInfoList(data=[_deployment(each, facts.get(each.model_name)) for each in reports])


async def _sees_deployments(admin: Administration, caller: Caller) -> bool:
    try:
        return (await admin.actor(caller)).sees_all
    except UnisonoError:
        # Without the store, the list of models is still available.
        return False
