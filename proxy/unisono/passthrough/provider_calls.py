"""Functions of litellm by API, their arguments, and conversion of litellm's audio to bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final

import orjson
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from unisono.core.passthrough_request import UPLOAD_APIS, AnswerBytes, Api, Upload

_COMMON: Final = (
    "temperature top_p tools tool_choice parallel_tool_calls metadata user service_tier store stream_options "
    "safety_identifier prompt_cache_key top_logprobs"
)
# Body fields of a client that become arguments of litellm. All other fields are added to the body that litellm sends.
FIELDS: Final[Mapping[Api, frozenset[str]]] = {
    Api.CHAT: frozenset(
        (
            "messages n max_tokens max_completion_tokens stop presence_penalty frequency_penalty logit_bias logprobs "
            "response_format seed functions function_call modalities prediction audio reasoning_effort verbosity "
            f"web_search_options thinking top_k {_COMMON}"
        ).split()
    ),
    Api.RESPONSES: frozenset(
        (
            "input instructions max_output_tokens max_tool_calls text reasoning truncation include "
            f"previous_response_id conversation background prompt {_COMMON}"
        ).split()
    ),
    Api.EMBEDDINGS: frozenset({"input", "dimensions", "encoding_format", "user"}),
    Api.RERANK: frozenset(["query", "documents", "top_n", "rank_fields", "return_documents", "max_chunks_per_doc"]),
    Api.MODERATIONS: frozenset({"input"}),
    Api.IMAGES: frozenset(
        [
            "prompt",
            "n",
            "quality",
            "response_format",
            "size",
            "style",
            "background",
            "output_format",
            "output_compression",
            "moderation",
            "user",
        ]
    ),
    Api.SPEECH: frozenset({"input", "voice", "response_format", "speed", "instructions"}),
    Api.TRANSCRIPTIONS: frozenset(
        ["file", "language", "prompt", "response_format", "timestamp_granularities", "temperature", "user"]
    ),
}
# Functions of litellm.
FUNCTIONS: Final[Mapping[Api, str]] = {
    Api.CHAT: "acompletion",
    Api.RESPONSES: "aresponses",
    Api.EMBEDDINGS: "aembedding",
    Api.RERANK: "arerank",
    Api.MODERATIONS: "amoderation",
    Api.IMAGES: "aimage_generation",
    Api.SPEECH: "aspeech",
    Api.TRANSCRIPTIONS: "atranscription",
}


# Transcript formats other than JSON.
TEXT_FORMATS: Final = frozenset({"text", "srt", "vtt"})
# Media type of audio if the provider does not state one.
UNKNOWN_AUDIO: Final = "application/octet-stream"


async def form_body(upload: Upload) -> dict[str, Any]:
    """Return the fields of a form. The value of a file is a pair of its name and its content.

    The whole file is held in memory, because litellm reads it at once.
    """
    body: dict[str, Any] = {}

    def add_field(field: Field) -> None:
        name, value = _text(field.field_name), _text(field.value)
        if name.endswith("[]"):
            body.setdefault(name.removesuffix("[]"), []).append(value)
        else:
            body[name] = value

    def add_file(file: File) -> None:
        file.file_object.seek(0)
        body[_text(file.field_name)] = (_text(file.file_name), file.file_object.read())
        file.close()

    _, options = parse_options_header(upload.media_type)
    parser = FormParser("multipart/form-data", add_field, add_file, boundary=options[b"boundary"])
    await _parse(parser, upload.pieces(""))
    with suppress(ValueError, KeyError):
        body["temperature"] = float(body["temperature"])
    return body


async def _parse(parser: FormParser, pieces: AsyncIterator[bytes]) -> None:
    # The parser may write to a temporary file.
    async for piece in pieces:
        await asyncio.to_thread(parser.write, piece)
    await asyncio.to_thread(parser.finalize)


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def is_streamed(stream: object) -> bool:
    """Return True if the value of the field `stream` requests a stream. Form values are strings."""
    return str(stream).lower() in ("true", "1")


async def to_bytes(answer: Any, api: Api, response_format: object) -> AnswerBytes:
    """Return litellm's speech or transcript in the form that the provider itself would send."""
    if api not in UPLOAD_APIS:
        media_type = answer.response.headers.get("content-type", UNKNOWN_AUDIO)
        return AnswerBytes(await answer.aread(), media_type, is_last=True)
    if response_format in TEXT_FORMATS:
        return AnswerBytes((answer.text or "").encode("utf-8", "replace"), "text/plain; charset=utf-8", is_last=True)
    transcript = answer.model_dump(mode="json", exclude_none=True, warnings=False)
    return AnswerBytes(orjson.dumps(transcript), "application/json", is_last=True)
