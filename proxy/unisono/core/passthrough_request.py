"""Pass-through requests: OpenAI request bodies for non-Harmony models, and their rules.

A `PassthroughRequest` contains the client's body unchanged. Deployments whose backend is a `ports.PassthroughBackend`
answer such requests. The answer consists of `events.Passed`, which API surfaces emit unchanged. `whole_number` reads a
whole number from a body in all forms that lenient servers accept.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

from unisono.core.billed_units import NO_UNITS, BilledUnits
from unisono.core.conversation import Json
from unisono.core.frozen import dataclass
from unisono.core.generation import Timeouts
from unisono.core.trace_context import TraceContext
from unisono.errors import InvalidRequest


class Api(StrEnum):
    """OpenAI API of a body; the value is its path below `/v1`."""

    CHAT = "chat/completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    SCORE = "score"
    MODERATIONS = "moderations"
    IMAGES = "images/generations"
    SPEECH = "audio/speech"
    TRANSCRIPTIONS = "audio/transcriptions"
    TRANSLATIONS = "audio/translations"


class ModelMode(StrEnum):
    """Kind of a model's output, with LiteLLM's names. All modes that generate text are `CHAT`."""

    CHAT = "chat"
    EMBEDDING = "embedding"
    RERANK = "rerank"
    SCORE = "score"
    MODERATION = "moderation"
    IMAGE_GENERATION = "image_generation"
    AUDIO_SPEECH = "audio_speech"
    AUDIO_TRANSCRIPTION = "audio_transcription"


# Modes of the models that can answer a request to an API.
MODES: Final[Mapping[Api, frozenset[ModelMode]]] = {
    Api.CHAT: frozenset({ModelMode.CHAT}),
    Api.RESPONSES: frozenset({ModelMode.CHAT}),
    Api.EMBEDDINGS: frozenset({ModelMode.EMBEDDING}),
    # Cross-encoders can rerank and score.
    Api.RERANK: frozenset({ModelMode.RERANK, ModelMode.SCORE}),
    Api.SCORE: frozenset({ModelMode.SCORE, ModelMode.RERANK}),
    Api.MODERATIONS: frozenset({ModelMode.MODERATION}),
    Api.IMAGES: frozenset({ModelMode.IMAGE_GENERATION}),
    Api.SPEECH: frozenset({ModelMode.AUDIO_SPEECH}),
    Api.TRANSCRIPTIONS: frozenset({ModelMode.AUDIO_TRANSCRIPTION}),
    Api.TRANSLATIONS: frozenset({ModelMode.AUDIO_TRANSCRIPTION}),
}
# APIs whose answers are generated token by token.
TEXT_APIS: Final = frozenset({Api.CHAT, Api.RESPONSES})
# APIs whose answers are always bytes of a media type.
BYTE_APIS: Final = frozenset({Api.SPEECH, Api.TRANSCRIPTIONS, Api.TRANSLATIONS})
# APIs whose requests are forms with a file.
UPLOAD_APIS: Final = frozenset({Api.TRANSCRIPTIONS, Api.TRANSLATIONS})

# Fields of a request body that are meant for the gateway, and that are not sent to backends. Further fields for the
# gateway, such as `guardrails`, are removed from the body as soon as the gateway has read them.
GATEWAY_FIELDS: Final = frozenset({"unisono", "tags", "litellm_metadata"})


def answers_bytes(api: Api, body: Mapping[str, Json]) -> bool:
    """Return True if the answer is relayed as bytes instead of JSON objects.

    This applies to `BYTE_APIS`, and to streamed images, whose events are relayed as bytes.
    """
    return api in BYTE_APIS or (api is Api.IMAGES and body.get("stream") is True)


class Upload(Protocol):
    """Request body that is not JSON; it can be sent several times."""

    @property
    def media_type(self) -> str: ...

    def size(self, model: str) -> int:
        """Return the size of the body in bytes; `model` is the server's name for the model."""
        ...

    def pieces(self, model: str) -> AsyncIterator[bytes]:
        """Yield the body in pieces; `model` is the server's name for the model."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerBytes:
    """Part of an answer that is not JSON objects.

    `media_type` is the type that the server sent, with its parameters. A part with `is_last` shows that the answer is
    complete; its data may be empty.
    """

    data: bytes
    media_type: str
    is_last: bool = False


# Part of an answer of a pass-through backend.
AnswerPart: TypeAlias = Mapping[str, Json] | AnswerBytes


# Responses API events that only report that an answer was accepted or is in progress.
WITHOUT_OUTPUT: Final = frozenset({"response.created", "response.queued", "response.in_progress", "keepalive"})


def has_output(api: Api, event: AnswerPart) -> bool:
    """Return True if a part of an answer contains generated content, or ends the answer.

    Servers may send a role, empty text or the usage long before the first token; for these, the result is False.
    """
    if isinstance(event, AnswerBytes):
        return bool(event.data)
    if api not in TEXT_APIS:
        return True
    if api is Api.RESPONSES:
        return str(event.get("type")) not in WITHOUT_OUTPUT
    choices = event.get("choices")
    return any(_choice_has_output(choice) for choice in choices) if isinstance(choices, list) else False


def _choice_has_output(choice: Json) -> bool:
    if not isinstance(choice, Mapping):
        return False
    delta = choice.get("delta")
    parts = delta if isinstance(delta, Mapping) else {}
    return bool(choice.get("finish_reason")) or any(value for name, value in parts.items() if name != "role")


def passed_texts(bodies: Sequence[Mapping[str, Json]]) -> list[str]:
    """Return the texts in a pass-through answer.

    `bodies` contains the single body of the answer, or the events of its stream. The deltas of one text are joined.
    """
    texts: dict[tuple[str, ...], list[str]] = {}
    # A stack, because an answer may be nested more deeply than Python recurses.
    stack: list[tuple[Json, tuple[str, ...]]] = [(dict(body), ()) for body in reversed(bodies)]
    while stack:
        value, path = stack.pop()
        if isinstance(value, str):
            texts.setdefault(path, []).append(value)
        else:
            stack += reversed([*_inner(value, path)])
    return ["".join(pieces) for pieces in texts.values()]


def transcript_texts(data: bytes) -> list[str]:
    """Return the texts of a transcript: JSON, server-sent events, subtitles or plain text."""
    text = data.decode("utf-8", "replace")
    lines = [line[5:] for line in text.splitlines() if line.startswith("data:")]
    for objects in ([text], lines):
        try:
            bodies = [json.loads(each) for each in objects if each.strip() != "[DONE]"]
        except (ValueError, RecursionError):
            continue
        if bodies and all(isinstance(body, dict) for body in bodies):
            return passed_texts(bodies)
    return [text]


# Fields whose values the model does not generate, or whose values are not text.
_NO_CONTENT: Final = frozenset(
    ("id", "object", "model", "type", "role", "status", "finish_reason", "embedding", "b64_json")
)
# Fields of a delta that identify the part of the answer to which it belongs.
_NUMBERS: Final = ("index", "output_index", "content_index", "summary_index", "item_id")


def _inner(value: Json, path: tuple[str, ...]) -> Iterator[tuple[Json, tuple[str, ...]]]:
    """Yield the values in an object or a list, with their paths.

    Deltas of one text have equal paths.
    """
    if isinstance(value, Mapping):
        # In the Responses API, the type distinguishes deltas from the complete text at the end.
        named = (value.get("type"), *(value[name] for name in _NUMBERS if name in value))
        numbers = [str(each) if isinstance(each, str | int) else "" for each in named]
        for name, inner in value.items():
            if name not in _NO_CONTENT:
                yield inner, (*path, *numbers, name)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            # Choices and calls of a stream contain their index, which may differ from their position in the list.
            place = "" if isinstance(inner, Mapping) and "index" in inner else str(number)
            yield inner, (*path, place)


class AnswerMode(StrEnum):
    """Components that may answer for a model: engine, pass-through deployments, or both."""

    ENGINE = "engine"
    PASSTHROUGH = "passing"
    ENGINE_THEN_PASSTHROUGH = "engine then passing"
    PASSTHROUGH_THEN_ENGINE = "passing then engine"

    @property
    def passes(self) -> bool:
        return self is not AnswerMode.ENGINE


def named(pattern: str, requested: str) -> str:
    """Return the backend's name for a requested model.

    `pattern` is the configured name. If it contains a star, the star is replaced with `requested`; a requested name
    that already begins with the text before the star is returned unchanged.
    """
    before, star, after = pattern.partition("*")
    if not star:
        return pattern
    return requested if before and requested.startswith(before) else f"{before}{requested}{after}"


def starred(pattern: str, requested: str) -> str:
    """Return the part of `requested` that matches the star in `pattern`.

    If `pattern` contains no star, returns `requested`.
    """
    before, star, after = pattern.partition("*")
    return requested.removeprefix(before).removesuffix(after) if star else requested


@dataclass(frozen=True, slots=True)
class ServedName:
    """Model group and answer mode of a requested model name.

    `stores_responses` is True if the deployments store responses and run tools themselves. Requests may then refer to
    the state of a deployment.
    """

    group: str = ""
    way: AnswerMode = AnswerMode.ENGINE
    stores_responses: bool = False


@dataclass(frozen=True, slots=True)
class PassthroughRequest:
    """Request as the client sent it.

    `model` is the requested name, which the answer contains too. `tokens` is the estimated number of tokens of the
    request's text and media. `choices` is the number of requested answers. `sequences` is the number of answers that
    the server generates, and from which it selects the best `choices`. `max_tokens` is the maximum number of tokens of
    each answer, None for no maximum.
    """

    api: Api
    way: AnswerMode
    body: Mapping[str, Json]
    model: str
    stream: bool = False
    tokens: int = 0
    choices: int = 1
    sequences: int = 1
    max_tokens: int | None = None
    # Estimated number of tokens that must fit into the context window of a deployment.
    window_tokens: int = 0
    # Number of inputs to embed; None if unknown.
    inputs: int | None = None
    # Maximum number of inputs in one request to a deployment; None for no maximum.
    batch_size: int | None = None
    # Body that is sent instead of `body`; only the model is still determined by `body`.
    upload: Upload | None = None
    # Estimated units other than tokens that are billed if the server reports no units.
    units: BilledUnits = NO_UNITS
    # Largest number of such units, which is reserved before the request.
    max_units: BilledUnits = NO_UNITS
    # True if the client gets the usage. A Chat Completions stream reports the usage only on request.
    is_usage_requested: bool = True


@dataclass(frozen=True, slots=True)
class PassthroughJob:
    """Pass-through request for a backend.

    The backend sends `body` with its own name for the model. `requested_model` is the name that the client sent; a
    backend with many models derives its own name from this name (`named`).
    """

    api: Api
    body: Mapping[str, Json]
    stream: bool
    requested_model: str = ""
    timeouts: Timeouts = field(default_factory=Timeouts)
    request_id: str = ""
    trace: TraceContext | None = None
    upload: Upload | None = None


# Texts that Pydantic reads as an integer, unless its strict mode is on. vLLM and SGLang read bodies in this way.
WHOLE: Final = re.compile(r"\s*([+-]?\d{1,30}(?:_\d{1,30})*)(?:\.0*)?\s*", re.ASCII)
# Maximum number of characters of a number that is sent as a string.
MAX_NUMBER_LENGTH: Final = 100


def whole_number(body: Mapping[str, Json], name: str) -> int | None:
    """Return the number in the field `name`; None if the field is missing or null.

    Servers also accept a whole number as a float or a string. Raises InvalidRequest for any other value, because a
    server might read it as a number that the reservation does not include.
    """
    value = body.get(name)
    if value is None or isinstance(value, int):
        return None if value is None else int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and (found := WHOLE.fullmatch(value)) and len(value) <= MAX_NUMBER_LENGTH:
        return int(found[1])
    raise InvalidRequest(f"Invalid value for '{name}': must be a whole number.", param=name)
