"""Routes of the Completions API, and of the APIs that do not generate text.

This module is imported only when the first request to one of these APIs arrives.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from os import urandom

from starlette.datastructures import State
from starlette.routing import BaseRoute

from unisono.access.model_access import allowed_model, engine_model, permitted_name, wrong_mode
from unisono.api.completions.routes import COMPLETIONS, CompletionRoute, RawModel
from unisono.api.embeddings_and_media.inbound import ModeModel
from unisono.api.embeddings_and_media.routes import OTHER_MODES, RERANK_V2, ModeRoute
from unisono.api.route_table import provide
from unisono.bootstrap.api_parts import FINGERPRINT, ApiParts
from unisono.bootstrap.models import Rules
from unisono.config import ModelRegistry
from unisono.core.access import Caller
from unisono.core.passthrough_request import MODES, Api
from unisono.harmony.encoding import load_encoding


def other_routes(parts: ApiParts, state: State) -> Sequence[BaseRoute]:
    """Put the dependencies of the APIs in this module into `state`, and return their routes."""
    gateway = parts.gateway
    completions = CompletionRoute(
        service=parts.service,
        resolve=partial(raw_model, gateway.catalogue, gateway.rules),
        permitted_name=partial(permitted_name, gateway.catalogue),
        switched_on=gateway.config.unisono.raw_completions,
        spell=load_encoding().decode,
        cut=load_encoding().encode_as_server,
        new_id=lambda: urandom(16).hex(),
        clock=time.time,
        fingerprint=FINGERPRINT,
    )
    provide(state, completions, ModeRoute(parts.service, partial(mode_model, gateway.catalogue)))
    return [*COMPLETIONS.routes, *OTHER_MODES.routes, *RERANK_V2.routes]


def raw_model(catalogue: ModelRegistry, rules: Rules, name: str, caller: Caller) -> RawModel:
    """Return the settings of a model for prompts that are not rendered.

    Raises the same errors as `engine_model`.
    """
    model = engine_model(catalogue, name, caller)
    return RawModel(model.name, rules[model.name])


def mode_model(catalogue: ModelRegistry, api: Api, name: str, caller: Caller) -> ModeModel:
    """Return the model for a request to an API that does not generate text.

    If `name` is empty and exactly one model has a mode that fits the API, this model is returned. Raises
    UnsupportedValue if the mode of the model does not fit the API, and the same errors as `allowed_model`.
    """
    if not name:
        fitting = [model.name for model in catalogue.groups() if model.mode in MODES[api]]
        name = fitting[0] if len(fitting) == 1 else ""
    model = allowed_model(catalogue, name, caller)
    if model.mode not in MODES[api]:
        raise wrong_mode(name or model.name, model.mode)
    sizes = (entry.unisono.max_embedding_batch_size for entry in model.entries)
    # Each entry of the model may answer a part of the inputs, so the smallest limit applies.
    return ModeModel(model.name, min((size for size in sizes if size is not None), default=None))
