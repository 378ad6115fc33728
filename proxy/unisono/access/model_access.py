"""Lookup of the model for a request.

The caller's key must permit the model, and the mode of the model must fit the API.
"""

from __future__ import annotations

from contextlib import suppress

from unisono.config import ModelRegistry, ServedModel
from unisono.core.access import Caller
from unisono.core.passthrough_request import MODES, AnswerMode, ModelMode
from unisono.errors import InvalidRequest, ModelNotAllowed, UnknownModel, UnsupportedValue


def allowed_model(catalogue: ModelRegistry, name: str, caller: Caller) -> ServedModel:
    """Return the model for the name in a request, if the caller may use it.

    A key may permit a model by the name in the request, by the model's own name, or by an access group. Raises
    ModelNotAllowed if the key or the request's end user may not use the model. Raises UnknownModel if the model does
    not exist; for a caller with restricted models, ModelNotAllowed is raised then too. Raises InvalidRequest if `name`
    is empty and there is no default model.
    """
    # A caller with restricted models must not be able to distinguish unknown models from forbidden ones.
    model = None
    try:
        model = catalogue.resolve(name)
    except UnknownModel:
        if not caller.is_restricted:
            raise
    names = (name,) if model is None else (name, model.name, *model.access_groups)
    if model is None or (caller.is_restricted and not caller.may_use_model(*names)):
        raise _not_allowed(name, caller, is_of_end_user=caller.key_permits_model(*names))
    return model


def _not_allowed(name: str, caller: Caller, *, is_of_end_user: bool) -> ModelNotAllowed:
    """Return the error for a model that the caller may not use.

    `is_of_end_user` is True if the key permits the model, so that only the end user's models can exclude it.
    """
    if is_of_end_user and caller.end_user_models is not None:
        owner, remedy = "end user", "an admin can permit it with /customer/update"
    else:
        owner, remedy = "key", "use a model that `/v1/models` lists"
    return ModelNotAllowed(f"This {owner} may not use the model `{name[:256]}`; {remedy}.", param="model")


def permitted_name(catalogue: ModelRegistry, group: str, caller: Caller) -> str:
    """Return a name by which the caller may use the model `group`.

    Returns `group` itself if the caller may use none of the names in the model list.
    """
    return next(
        (
            name
            for name, model in catalogue.listed()
            if model.name == group and caller.may_use_model(name, model.name, *model.access_groups)
        ),
        group,
    )


def text_model(catalogue: ModelRegistry, name: str, caller: Caller) -> ServedModel:
    """Return the model for the name in a request to an API that generates text.

    Raises UnsupportedValue if the model does not generate text, and the same errors as `allowed_model`.
    """
    model = allowed_model(catalogue, name, caller)
    if model.mode is not ModelMode.CHAT:
        raise wrong_mode(name or model.name, model.mode)
    return model


def engine_model(catalogue: ModelRegistry, name: str, caller: Caller) -> ServedModel:
    """Return the model for the name in a request to an API that only gpt-oss models support.

    Raises UnsupportedValue if neither the model nor a fallback model is a gpt-oss model. Also raises the errors of
    `text_model`.
    """
    model = text_model(catalogue, name, caller)
    if catalogue.answer_mode(model, caller.routing) is AnswerMode.PASSTHROUGH:
        raise UnsupportedValue(
            f"The pass-through model `{(name or model.name)[:256]}` supports only Chat Completions and Responses.",
            param="model",
        )
    return model


def fallback_model(catalogue: ModelRegistry, name: str, requested: str, caller: Caller) -> str:
    """Return the model for a fallback `name` in a request for the model `requested`.

    Raises UnsupportedValue if the two models have different modes. It also raises UnsupportedValue for a wildcard,
    because its backend needs the model name in the request. Raises the same errors as `allowed_model`.
    """
    model = allowed_model(catalogue, name, caller)
    # If the requested model is unknown or missing, the request fails anyway.
    mode = model.mode
    with suppress(InvalidRequest):
        mode = catalogue.resolve(requested).mode
    if mode is not model.mode:
        raise UnsupportedValue(
            f"The model `{name}` has the mode `{model.mode}`, so it cannot be a fallback for a model of the mode "
            f"`{mode}`; remove it."
        )
    if "*" in model.name:
        raise UnsupportedValue(
            f"The model `{name}` is configured only by a wildcard, so it cannot be a fallback; remove it."
        )
    return model.name


def wrong_mode(name: str, mode: ModelMode) -> UnsupportedValue:
    """Return the error for a model whose mode does not fit the API of the request."""
    paths = " or ".join(f"`/v1/{api}`" for api, modes in MODES.items() if mode in modes)
    return UnsupportedValue(
        f"The model `{name[:256]}` has the mode `{mode}`; send its requests to {paths}.", param="model"
    )
