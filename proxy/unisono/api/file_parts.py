"""Content parts with files, for the OpenAPI document only.

The gateway replaces these parts with text before it validates a request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from unisono.api.field_types import OpenModel

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
