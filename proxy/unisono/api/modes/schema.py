"""Bodies and answers of models that generate no text, for the OpenAPI document.

The server of the model validates its requests. The gateway checks only what it needs itself.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from unisono.api.answer_types import AnswerModel, Object
from unisono.api.field_types import OpenModel


class EmbeddingsRequest(OpenModel):
    """Request for embeddings. Further fields are those of the server."""

    model: str
    input: Annotated[
        Any, Field(description="A text, a list of texts, a list of token ids, or a list of lists of token ids.")
    ]
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None


class EmbeddingList(AnswerModel):
    """Embeddings in the order of the inputs."""

    object: str
    data: list[Object]
    model: str
    usage: Object
