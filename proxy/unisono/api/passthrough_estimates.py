"""Estimates of the number of input tokens in bodies that are passed through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from unisono.core.conversation import Json

# Bytes of text per token, for estimates. Most text has more bytes per token, so an estimate is usually too high.
BYTES_PER_TOKEN: Final = 3
# Maximum tokens of an image for GPT-4.1, which has 1,536 patches. For GPT-4o, the maximum is 1,445 tokens: 85, and 170
# for each of 8 tiles.
IMAGE_TOKENS: Final = 1_536
# Tokens of a minute of audio, at 10 tokens per second.
AUDIO_TOKENS: Final = 600
# Tokens of a page of a PDF: its text, and its image.
FILE_TOKENS: Final = 3_000
# Kinds of parts with data instead of text, with their estimated tokens. Only the backend knows the actual number.
MEDIA_TOKENS: Final[Mapping[str, int]] = {
    "image_url": IMAGE_TOKENS,
    "input_image": IMAGE_TOKENS,
    "image": IMAGE_TOKENS,
    "input_audio": AUDIO_TOKENS,
    "audio_url": AUDIO_TOKENS,
    "audio": AUDIO_TOKENS,
    "input_file": FILE_TOKENS,
    "file": FILE_TOKENS,
    "source": FILE_TOKENS,
}


def is_media(part: Mapping[str, Json]) -> bool:
    """Return True if an object of a body is a part with data instead of text."""
    return media_tokens(part) > 0


def media_tokens(part: Mapping[str, Json]) -> int:
    """Return the estimated number of tokens of a part with data; 0 for any other object."""
    kind = part.get("type")
    return MEDIA_TOKENS.get(kind, 0) if isinstance(kind, str) else 0


def estimated_input(body: Mapping[str, Json]) -> tuple[int, int]:
    """Return the estimated numbers of tokens of the text in a body, and of its media."""
    letters = media = 0
    stack: list[Json] = list(body.values())
    while stack:
        match stack.pop():
            case str() as text:
                letters += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
            case list() as many:
                stack += many
            case dict() as one:
                if tokens := media_tokens(one):
                    media += tokens
                else:
                    stack += one.values()
    return letters // BYTES_PER_TOKEN, media
