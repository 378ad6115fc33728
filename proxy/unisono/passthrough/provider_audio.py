"""Conversion of audio forms for litellm, and of its speech and transcripts to bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import orjson
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from unisono.core.passthrough_request import UPLOAD_APIS, AnswerBytes, Api, Upload

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
    """Return True for a field `stream` that requests a stream. Values in forms are texts."""
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
