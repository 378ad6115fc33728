"""Conversion of requests to models that generate no text, and checks of their bodies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from unisono.api.passthrough_estimates import estimated_input
from unisono.api.passthrough_requests import readable_text
from unisono.api.request_options import request_fields
from unisono.core.access import Caller
from unisono.core.conversation import Conversation, Json, Preamble, UserMessage
from unisono.core.frozen import dataclass
from unisono.core.passthrough_request import UPLOAD_APIS, AnswerMode, Api, PassthroughRequest, Upload
from unisono.core.unit_estimates import estimated_units, reserved_units
from unisono.engine.request import AnswerOptions, GenerationRequest, PromptOptions, RequestOrigin
from unisono.errors import InvalidRequest, UnsupportedValue

STREAMING_APIS: Final = UPLOAD_APIS | {Api.IMAGES}
# Bytes of audio that are estimated as one token. A second of MP3 with 128 kbit/s has 16,000 bytes, or 10 tokens.
AUDIO_BYTES_PER_TOKEN: Final = 1_600


@dataclass(frozen=True, slots=True)
class ModeTraits:
    """Traits of an API.

    `surface` is the name of the API in metrics. `texts` are the fields whose text hooks can read. A body must contain
    at least one of the fields in `needs`. `generates` is False if the answer contains no generated tokens.
    """

    surface: str
    texts: tuple[str, ...]
    needs: tuple[str, ...]
    generates: bool = False


@dataclass(frozen=True, slots=True)
class ModeModel:
    """Settings of a model for these APIs.

    `group` is the deployment group that serves the model. `max_embedding_batch_size` is the maximum number of inputs in
    one request to a backend; None for no limit.
    """

    group: str
    max_embedding_batch_size: int | None = None


# vLLM can also embed chat messages, and it has several names for the two sides of a score.
TRAITS: Final[Mapping[Api, ModeTraits]] = {
    Api.EMBEDDINGS: ModeTraits("embeddings", ("input", "messages"), ("input", "messages")),
    Api.RERANK: ModeTraits("rerank", ("query", "documents"), ("query",)),
    Api.SCORE: ModeTraits(
        "score",
        ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"),
        ("text_1", "queries", "data_1"),
    ),
    Api.MODERATIONS: ModeTraits("moderations", ("input",), ("input",)),
    Api.IMAGES: ModeTraits("images", ("prompt",), ("prompt",), generates=True),
    Api.TRANSCRIPTIONS: ModeTraits("transcriptions", ("prompt",), ("file",), generates=True),
    Api.TRANSLATIONS: ModeTraits("transcriptions", ("prompt",), ("file",), generates=True),
    Api.SPEECH: ModeTraits("speech", ("input", "instructions"), ("input",), generates=True),
}


def requested_model(body: Mapping[str, Json]) -> str:
    """Return the requested model, or "" if the body has none.

    Raises InvalidRequest if the field is not a string.
    """
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("Invalid value for 'model': must be a string.", param="model")
    return model or ""


def to_generation_request(
    api: Api,
    body: Mapping[str, Json],
    model: ModeModel,
    caller: Caller,
    request_id: str,
    upload: Upload | None = None,
) -> GenerationRequest:
    """Convert a JSON body or the fields of an upload. Raises InvalidRequest naming the field."""
    traits = TRAITS[api]
    _check(api, body)
    tokens = sum(estimated_input(body)) + _token_ids(body.get("input"))
    if upload is not None:
        tokens += upload.size("") // AUDIO_BYTES_PER_TOKEN
    inputs, size = _inputs(body), model.max_embedding_batch_size
    upload_bytes = 0 if upload is None else upload.size("")
    parts = 1 if size is None or inputs is None else -(-inputs // size)
    return GenerationRequest(
        model=model.group,
        # The conversation is the readable part of the body, for hooks.
        conversation=Conversation(Preamble(), tuple(_items(body, traits.texts))),
        passthrough=PassthroughRequest(
            api,
            AnswerMode.PASSTHROUGH,
            body,
            requested_model(body) or model.group,
            tokens=tokens,
            upload=upload,
            inputs=inputs,
            batch_size=size,
            units=estimated_units(api, body, upload_bytes),
            max_units=reserved_units(api, body, tokens, upload_bytes, parts),
        ),
        answer=AnswerOptions(max_tokens=None if traits.generates else 0, whole=not _is_streamed(api, body)),
        origin=RequestOrigin(tenant=caller.tenant, caller=caller, request_id=request_id, surface=traits.surface),
        prompt=PromptOptions(fields=request_fields(traits.needs[0])),
    )


def _check(api: Api, body: Mapping[str, Json]) -> None:
    needs = TRAITS[api].needs
    if all(body.get(name) is None for name in needs):
        raise InvalidRequest(f"'{needs[0]}' is required.", param=needs[0])
    if api is Api.EMBEDDINGS:
        check_input(body.get("input"))
    if api is Api.RERANK and not isinstance(body.get("documents"), list):
        raise InvalidRequest("'documents' is required, and must be a list.", param="documents")
    stream = body.get("stream")
    if api is Api.IMAGES and stream is not None and not isinstance(stream, bool):
        raise InvalidRequest("Invalid value for 'stream': must be true or false.", param="stream")
    if stream and api not in STREAMING_APIS:
        raise UnsupportedValue("'stream' is not supported by this API; remove it.", param="stream")


def _is_streamed(api: Api, body: Mapping[str, Json]) -> bool:
    """Return True if the answer is sent as it arrives. In forms, `stream` is a text."""
    stream = body.get("stream")
    return api is Api.SPEECH or (api in STREAMING_APIS and str(stream).lower() in ("true", "1"))


def _items(body: Mapping[str, Json], fields: tuple[str, ...]) -> Iterator[UserMessage]:
    """Yield the readable text of the fields in a body; each element of a list is its own item."""
    for name in fields:
        value = body.get(name)
        for each in value if isinstance(value, list) else (value,):
            if text := readable_text(each):
                yield UserMessage(text)


def check_input(value: Json) -> None:
    """Check the type of the field `input` for embeddings. Raises InvalidRequest for this field."""
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, list):
        raise InvalidRequest("Invalid value for 'input': must be a string or a list.", param="input")
    if not value:
        raise InvalidRequest("Invalid value for 'input': the list must not be empty.", param="input")


def _inputs(body: Mapping[str, Json]) -> int | None:
    """Return the number of inputs to embed, None if unknown. One list of token ids is one input."""
    value = body.get("input")
    if isinstance(value, str):
        return 1
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(each, int) for each in value):
        return 1
    return len(value) if all(isinstance(each, (str, list)) for each in value) else None


def _token_ids(value: Json) -> int:
    """Return the number of token ids in an input."""
    if not isinstance(value, list):
        return 0
    return sum(len(each) if isinstance(each, list) else isinstance(each, int) for each in value)
