"""Conversion of requests to models that generate no text, and checks of their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from unisono.api.passthrough_routes import BYTES_PER_TOKEN, readable_items, text_bytes
from unisono.api.request_options import request_fields
from unisono.core.access import Caller
from unisono.core.conversation import Conversation, Json, Preamble
from unisono.core.passthrough_request import AnswerMode, Api, PassthroughRequest
from unisono.engine.request import AnswerOptions, GenerationRequest, PromptOptions, RequestOrigin
from unisono.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ModeTraits:
    """Traits of an API: its name in metrics, and the field that holds the content.

    A body must have one of the fields `needs`. `generates` is False if the answer has no generated tokens.
    """

    surface: str
    field: str
    needs: tuple[str, ...]
    generates: bool = False


TRAITS: Final[Mapping[Api, ModeTraits]] = {
    # vLLM also makes embeddings of chat messages.
    Api.EMBEDDINGS: ModeTraits("embeddings", "input", ("input", "messages")),
}


def requested_model(body: Mapping[str, Json]) -> str:
    """Return the requested model; empty if there is none. Raises InvalidRequest."""
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("Invalid value for 'model': must be a text.", param="model")
    return model or ""


def to_generation_request(
    api: Api, body: Mapping[str, Json], group: str, caller: Caller, request_id: str
) -> GenerationRequest:
    """Convert a body. Raises InvalidRequest, naming the field."""
    traits = TRAITS[api]
    if all(body.get(name) is None for name in traits.needs):
        raise InvalidRequest(f"'{traits.needs[0]}' is required.", param=traits.needs[0])
    if api is Api.EMBEDDINGS:
        check_input(body.get("input"))
    tokens = text_bytes(body) // BYTES_PER_TOKEN + _token_ids(body.get("input"))
    return GenerationRequest(
        model=group,
        # The conversation is the readable part of the body, for hooks.
        conversation=Conversation(Preamble(), tuple(readable_items(body, traits.field))),
        passthrough=PassthroughRequest(api, AnswerMode.PASSING, body, requested_model(body), tokens=tokens),
        answer=AnswerOptions(max_tokens=None if traits.generates else 0, whole=True),
        origin=RequestOrigin(tenant=caller.tenant, caller=caller, request_id=request_id, surface=traits.surface),
        prompt=PromptOptions(fields=request_fields(traits.field)),
    )


def check_input(value: Json) -> None:
    """Check the form of an input for embeddings. Raises InvalidRequest, naming the field."""
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, list):
        raise InvalidRequest("Invalid value for 'input': must be a text or a list.", param="input")
    if not value:
        raise InvalidRequest("Invalid value for 'input': the list is empty.", param="input")


def _token_ids(value: Json) -> int:
    """Return the number of token ids in an input."""
    if not isinstance(value, list):
        return 0
    return sum(len(each) if isinstance(each, list) else isinstance(each, int) for each in value)
