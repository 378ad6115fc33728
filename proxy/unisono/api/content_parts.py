"""Content parts of a message: text, refusals, reasoning, files; others are refused.

The models of parts with files are for the OpenAPI document only. The gateway replaces these parts with text before it
validates a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from unisono.api.body import MAX_RUN, RUN_TOO_LONG, has_piece_of_length
from unisono.api.field_types import OpenModel, Text, invalid_field, refused
from unisono.errors import InvalidRequest

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
REASONING_PARTS = frozenset({"thinking", "reasoning", "reasoning_text"})
KINDS = TEXT_PARTS | REASONING_PARTS | {"refusal"}
# Kinds of parts other than text, with their media type.
MEDIA_PARTS = {
    "image_url": "image",
    "image": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio": "audio",
    "audio_url": "audio",
    "file": "file",
    "input_file": "file",
    "container_upload": "file",
    "document": "file",
    "video_url": "video",
    "video": "video",
    # Part of a message between agents. Only the server that encrypted the part can read it.
    "encrypted_content": "encrypted content",
}


# Required fields of each kind of part, for the OpenAPI document.
_FORMS: list[Any] = [
    {"properties": {"type": {"enum": sorted(TEXT_PARTS)}, "text": {"type": "string"}}, "required": ["text"]},
    {"properties": {"type": {"enum": sorted(KINDS - TEXT_PARTS)}}},
]


class ContentPart(OpenModel):
    model_config = ConfigDict(json_schema_extra={"anyOf": _FORMS})

    type: Annotated[str, Field(json_schema_extra={"enum": sorted(KINDS)})]
    text: Text | None = Field(None, validate_default=True)
    thinking: Text | None = None
    refusal: Text | None = None

    @field_validator("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        if value in MEDIA_PARTS:
            raise refused(f"'{value}' is not accepted: the model does not support {MEDIA_PARTS[value]} input")
        if value not in KINDS:
            raise invalid_field(f"must be {', '.join(sorted(KINDS)[:-1])} or {max(KINDS)}")
        return value

    @field_validator("text")
    @classmethod
    def _check_present(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("type") in TEXT_PARTS:
            raise invalid_field("must be a string")
        return value


def text_of(parts: Sequence[ContentPart], *, param: str) -> str:
    """Return the visible text of a message's content, including refusals.

    Raises InvalidRequest with the field `param` if the text is too long for the tokenizer (see `join`).
    """
    texts = []
    for part in parts:
        if part.type not in REASONING_PARTS:
            texts.append((part.refusal if part.type == "refusal" else part.text) or "")
    return join(texts, param=param)


def join(texts: Iterable[str], between: str = "", *, param: str) -> str:
    """Join the texts that are not empty, with `between` between them.

    Raises InvalidRequest with the field `param` if the result has a run of characters that is too long for the
    tokenizer. Each text was checked alone, but a run may extend over several texts.
    """
    some = [*filter(None, texts)]
    joined = between.join(some)
    if len(some) > 1 and has_piece_of_length(joined, MAX_RUN):
        raise InvalidRequest(RUN_TOO_LONG, param=param)
    return joined


Data = Annotated[str | None, Field(description="Content as base64, or a `data:` URL.")]
Url = Annotated[str | None, Field(description="URL of the file. The operator must allow its host.")]
Name = Annotated[
    str | None, Field(description="Name of the file. Without a media type, its extension determines the file's type.")
]


class InputFilePart(OpenModel):
    """File in the Responses API: text, Markdown, JSON, CSV, HTML or PDF.

    The string `file_data` or `file_url` contains the file or its URL. If a file in an earlier message cannot be read, a
    line of text replaces it.
    """

    type: Literal["input_file"]
    filename: Any = None
    file_data: Any = None
    file_url: Any = None


class ChatFileContent(OpenModel):
    filename: Name = None
    file_data: Annotated[str, Field(description="Content as base64, or a `data:` URL.")]


class ChatFilePart(OpenModel):
    """File in Chat Completions: text, Markdown, JSON, CSV, HTML or PDF."""

    type: Literal["file"]
    file: ChatFileContent


class DocumentSource(OpenModel):
    """Content of a document.

    For the types `base64` and `text`, the field `data` contains the content. For the other types, the field is named
    after the type.
    """

    type: Literal["base64", "text", "url", "content"]
    media_type: Annotated[str | None, Field(description="Media type, such as `application/pdf`.")] = None
    data: str | None = None
    url: Url = None
    content: str | list[dict[str, Any]] | None = None


class DocumentPart(OpenModel):
    """File in Messages: text, Markdown, JSON, CSV, HTML or PDF."""

    type: Literal["document"]
    source: DocumentSource
    title: Annotated[str | None, Field(description="Name of the file.")] = None
    context: Annotated[str | None, Field(description="The client's text about the file.")] = None
