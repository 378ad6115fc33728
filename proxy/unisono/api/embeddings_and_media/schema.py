"""Bodies and answers of models that generate no text, for the OpenAPI document.

The model's server validates the requests. The gateway checks only the fields that it needs itself.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from unisono.api.answer_types import AnswerModel, Object
from unisono.api.field_types import OpenModel


class EmbeddingsRequest(OpenModel):
    """Request for embeddings. Any other field is forwarded to the server."""

    model: Annotated[str | None, Field(description="By default the only model of the mode `embedding`.")] = None
    input: Annotated[
        Any, Field(description="A text, a list of texts, a list of token ids, or a list of lists of token ids.")
    ]
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | int | None = None


class EmbeddingList(AnswerModel):
    """Embeddings in the order of the inputs."""

    object: str
    data: list[Object]
    model: str
    usage: Object


class RerankRequest(OpenModel):
    """Request to order documents by relevance. Any other field is forwarded to the server."""

    model: Annotated[str | None, Field(description="By default the only model of the mode `rerank`.")] = None
    query: str
    documents: Annotated[list[Any], Field(description="Texts, or objects with a field `text`.")]
    top_n: int | None = None
    return_documents: bool | None = None


class RerankResults(AnswerModel):
    """Documents, most relevant first; `index` is the 0-based position in the request."""

    results: list[Object]


class ScoreRequest(OpenModel):
    """Request to score pairs of texts, as in vLLM. Any other field is forwarded to the server."""

    model: Annotated[str | None, Field(description="By default the only model of the mode `score`.")] = None
    text_1: Annotated[Any, Field(description="A text, or a list of texts.")] = None
    text_2: Annotated[Any, Field(description="A text, or a list of texts.")] = None


class ScoreList(AnswerModel):
    """Scores in the order of the pairs."""

    data: list[Object]


class ModerationsRequest(OpenModel):
    """Request to classify texts. Any other field is forwarded to the server."""

    input: Annotated[Any, Field(description="A text, or a list of texts or parts.")]
    model: Annotated[str | None, Field(description="By default the only model of the mode `moderation`.")] = None


class Moderations(AnswerModel):
    results: list[Object]


class ImagesRequest(OpenModel):
    """Request for images. Any other field is forwarded to the server."""

    prompt: str
    model: Annotated[str | None, Field(description="By default the only model of the mode `image_generation`.")] = None
    n: int | None = None
    size: str | None = None
    response_format: str | None = None
    stream: bool | None = None
    partial_images: Annotated[int | None, Field(description="Unfinished images to send in a stream.")] = None
    user: str | int | None = None


class Images(AnswerModel):
    data: list[Object]


class SpeechRequest(OpenModel):
    """Request for spoken text. Any other field is forwarded to the server."""

    model: Annotated[str | None, Field(description="By default the only model of the mode `audio_speech`.")] = None
    input: str
    voice: Annotated[Any, Field(description="A name, or an object with an id.")] = None
    response_format: str | None = None
    speed: float | None = None
    stream_format: str | None = None


class AudioTranscript(AnswerModel):
    """Transcript in JSON. Other values of `response_format` lead to other media types."""

    text: str
