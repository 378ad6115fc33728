"""Models that a caller may use: by the limits of its key, and by the mode of the model."""

from __future__ import annotations

from contextlib import suppress

from unisono.config import ModelRegistry, ServedModel
from unisono.core.access import Caller
from unisono.core.passthrough_request import MODES, ModelMode
from unisono.errors import ModelNotAllowed, UnknownModel, UnsupportedValue


def allowed_model(catalogue: ModelRegistry, name: str, caller: Caller) -> ServedModel:
    """Return the group for a client's name, if the caller may use it by this or its own name.

    Raises UnknownModel or ModelNotAllowed. A caller with restricted models cannot learn from the latter which other
    models exist.
    """
    # For a key with restricted models, an unknown model and a forbidden one must give the same answer.
    model = None
    try:
        model = catalogue.resolve(name)
    except UnknownModel:
        if not caller.is_restricted or not name:
            raise
    if model is None or (caller.is_restricted and not caller.may_use_model(name, model.name, *model.access_groups)):
        raise ModelNotAllowed(
            f"This key may not use the model `{name[:256]}`; use one from `/v1/models`.", param="model"
        )
    return model


def permitted_name(catalogue: ModelRegistry, group: str, caller: Caller) -> str:
    """Return a name by which the caller may use a group; that of the group if there is none."""
    return next(
        (
            name
            for name, model in catalogue.listed()
            if model.name == group and caller.may_use_model(name, model.name, *model.access_groups)
        ),
        group,
    )


def text_model(catalogue: ModelRegistry, name: str, caller: Caller) -> ServedModel:
    """Return the group for the name of a model that generates text.

    Raises as `allowed_model`, and UnsupportedValue for a model of another mode.
    """
    model = allowed_model(catalogue, name, caller)
    if model.mode is not ModelMode.CHAT:
        raise wrong_mode(name, model.mode)
    return model


def fallback_model(catalogue: ModelRegistry, name: str, requested: str, caller: Caller) -> str:
    """Return the group of a fallback that a client chose for a model.

    Raises as `allowed_model`, and UnsupportedValue for a model of another mode, and for a wildcard, whose backend needs
    the client's model name.
    """
    model = allowed_model(catalogue, name, caller)
    # The request itself fails if its model is unknown.
    with suppress(UnknownModel):
        mode = catalogue.resolve(requested).mode
        if mode is not model.mode:
            raise UnsupportedValue(
                f"The model `{name}` has the mode `{model.mode}`, so it cannot stand in for a model of the mode "
                f"`{mode}`; remove it."
            )
    if "*" in model.name:
        raise UnsupportedValue(f"The model `{name}` has no entry of its own, so it cannot be a fallback; remove it.")
    return model.name


def wrong_mode(name: str, mode: ModelMode) -> UnsupportedValue:
    """Return the error for a model of another mode than the request needs."""
    paths = " or ".join(f"`/v1/{api}`" for api, modes in MODES.items() if mode in modes)
    return UnsupportedValue(
        f"The model `{name[:256]}` has the mode `{mode}`; send its requests to {paths}.", param="model"
    )
