"""Pass-through requests: OpenAI request bodies for non-Harmony models, and their rules.

A `PassthroughRequest` holds the client's body unchanged. A deployment of the kind `ports.PassthroughBackend` may
answer it. The answer consists of `events.Passed`, which surfaces emit unchanged.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

from unisono.core.billed_units import NO_UNITS, BilledUnits
from unisono.core.conversation import Json
from unisono.core.frozen import dataclass
from unisono.core.generation import Timeouts
from unisono.core.trace_context import TraceContext


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
    """Kind of output of a model, under LiteLLM's name. All modes that generate text are `CHAT`."""

    CHAT = "chat"
    EMBEDDING = "embedding"
    RERANK = "rerank"
    SCORE = "score"
    MODERATION = "moderation"
    IMAGE_GENERATION = "image_generation"
    AUDIO_SPEECH = "audio_speech"
    AUDIO_TRANSCRIPTION = "audio_transcription"


# Modes of the models that can answer a request of an API.
MODES: Final[Mapping[Api, frozenset[ModelMode]]] = {
    Api.CHAT: frozenset({ModelMode.CHAT}),
    Api.RESPONSES: frozenset({ModelMode.CHAT}),
    Api.EMBEDDINGS: frozenset({ModelMode.EMBEDDING}),
    # Cross-encoders do both.
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


def answers_bytes(api: Api, body: Mapping[str, Json]) -> bool:
    """Return True if the answer is relayed as bytes instead of JSON objects.

    This applies to `BYTE_APIS`, and to streamed images, whose events are relayed as bytes.
    """
    return api in BYTE_APIS or (api is Api.IMAGES and body.get("stream") is True)


class Upload(Protocol):
    """Body of a request that is no JSON, and that can be sent several times."""

    @property
    def media_type(self) -> str: ...

    def size(self, model: str) -> int:
        """Return the bytes of the body for a server's name of the model."""
        ...

    def pieces(self, model: str) -> AsyncIterator[bytes]:
        """Yield the body for a server's name of the model."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerBytes:
    """Part of an answer that is not JSON objects.

    `media_type` is the server's, with its parameters. The last part, which may be empty, marks a complete answer.
    """

    data: bytes
    media_type: str
    is_last: bool = False


# Part of an answer of a pass-through backend.
AnswerPart: TypeAlias = Mapping[str, Json] | AnswerBytes


# Responses API events that only report that an answer was accepted or is in progress.
WITHOUT_OUTPUT: Final = frozenset({"response.created", "response.queued", "response.in_progress", "keepalive"})


def has_output(api: Api, event: AnswerPart) -> bool:
    """Return True if a part of an answer holds generated content or an end.

    Servers may send a role, empty text or the usage long before the first token.
    """
    if isinstance(event, AnswerBytes):
        return bool(event.data)
    if api not in TEXT_APIS:
        return True
    if api is Api.RESPONSES:
        return event.get("type") not in WITHOUT_OUTPUT
    choices = event.get("choices")
    return any(_choice_has_output(choice) for choice in choices) if isinstance(choices, list) else False


def _choice_has_output(choice: Json) -> bool:
    if not isinstance(choice, Mapping):
        return False
    delta = choice.get("delta")
    parts = delta if isinstance(delta, Mapping) else {}
    return bool(choice.get("finish_reason")) or any(value for name, value in parts.items() if name != "role")


def passed_texts(bodies: Sequence[Mapping[str, Json]]) -> list[str]:
    """Return the texts of a pass-through answer: its body, or the events of its stream.

    The deltas of one text in a stream are joined.
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
    """Return the texts of a transcript: JSON, events, subtitles or text."""
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


# Fields whose values the model does not generate, or that are no text.
_NO_CONTENT: Final = frozenset(
    ("id", "object", "model", "type", "role", "status", "finish_reason", "embedding", "b64_json")
)
# Fields of a delta that identify the part of the answer to which it belongs.
_NUMBERS: Final = ("index", "output_index", "content_index", "summary_index", "item_id")


def _inner(value: Json, path: tuple[str, ...]) -> Iterator[tuple[Json, tuple[str, ...]]]:
    """Yield the values in an object or a list, with their paths."""
    if isinstance(value, Mapping):
        # In the Responses API, the type distinguishes deltas from the complete text at the end.
        named = (value.get("type"), *(value[name] for name in _NUMBERS if name in value))
        numbers = [str(each) if isinstance(each, str | int) else "" for each in named]
        for name, inner in value.items():
            if name not in _NO_CONTENT:
                yield inner, (*path, *numbers, name)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            # Choices and calls of a stream contain their index; the position in the list is not the same.
            place = "" if isinstance(inner, Mapping) and "index" in inner else str(number)
            yield inner, (*path, place)


class AnswerMode(StrEnum):
    """Eligible answerers for a model: the engine, pass-through deployments, or both in an order."""

    ENGINE = "engine"
    PASSING = "passing"
    ENGINE_THEN_PASSING = "engine then passing"
    PASSING_THEN_ENGINE = "passing then engine"

    @property
    def passes(self) -> bool:
        return self is not AnswerMode.ENGINE


def named(pattern: str, requested: str) -> str:
    """Return the backend's name for a requested model.

    This is `pattern` itself, or the pattern with its star replaced by the client's text.
    """
    before, star, after = pattern.partition("*")
    if not star:
        return pattern
    return requested if before and requested.startswith(before) else f"{before}{requested}{after}"


def starred(pattern: str, requested: str) -> str:
    """Return the part of a requested name that matches the star of its pattern.

    Without a star, return the whole name.
    """
    before, star, after = pattern.partition("*")
    return requested.removeprefix(before).removesuffix(after) if star else requested


@dataclass(frozen=True, slots=True)
class ServedName:
    """Serving of a model name: its group and its answer mode.

    `stores_responses` is True if the deployments store responses and run tools themselves, so that requests may refer
    to their state.
    """

    group: str = ""
    way: AnswerMode = AnswerMode.ENGINE
    stores_responses: bool = False


@dataclass(frozen=True, slots=True)
class PassthroughRequest:
    """Request as the client sent it.

    `model` is the requested name, which the answer carries too. `tokens` is the estimated size of its text. `choices`
    is the number of requested answers, `max_tokens` the maximum tokens of each, None for any number.
    """

    api: Api
    way: AnswerMode
    body: Mapping[str, Json]
    model: str
    stream: bool = False
    tokens: int = 0
    choices: int = 1
    max_tokens: int | None = None
    # Estimated tokens that a deployment needs for the request at once. Its context window must hold them.
    window_tokens: int = 0
    # Number of inputs to embed, None if unknown, and the maximum for one request to a deployment, None for any number.
    inputs: int | None = None
    batch_size: int | None = None
    # Replaces the body, except for the model.
    upload: Upload | None = None
    # Estimated units besides tokens: to bill if the server reports none, and to reserve.
    units: BilledUnits = NO_UNITS
    max_units: BilledUnits = NO_UNITS
    # True if the client gets the usage; a Chat Completions stream reports it only on request.
    is_usage_requested: bool = True


@dataclass(frozen=True, slots=True)
class PassthroughJob:
    """Pass-through request for a backend: the body to send, except for the model's name.

    The backend sets that name. `requested_model` is the client's name, for a backend of many models (`named`).
    """

    api: Api
    body: Mapping[str, Json]
    stream: bool
    requested_model: str = ""
    timeouts: Timeouts = field(default_factory=Timeouts)
    request_id: str = ""
    trace: TraceContext | None = None
    upload: Upload | None = None
