"""Estimates of the billed units of a request, until its server reports the actual units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from unisono.core.billed_units import MAX_UNITS, BilledUnits
from unisono.core.conversation import Json
from unisono.core.passthrough_request import UPLOAD_APIS, Api, whole_number

# Assumed bytes per second of audio if the server reports no duration: MP3 at 128 kbit/s.
AUDIO_BYTES_PER_SECOND: Final = 16_000
# Assumed bytes per second of audio for reservations: speech is rarely encoded at less than 32 kbit/s.
MIN_AUDIO_BYTES_PER_SECOND: Final = 4_000
# Cohere bills one query of a reranker for up to this number of documents, each with up to this number of tokens.
DOCUMENTS_PER_QUERY: Final = 100
TOKENS_PER_DOCUMENT: Final = 500
CHARACTERS_PER_TOKEN: Final = 4


QUERY_APIS: Final = frozenset({Api.EMBEDDINGS, Api.RERANK, Api.SCORE, Api.MODERATIONS})


def estimated_units(api: Api, body: Mapping[str, Json], upload_bytes: int = 0) -> BilledUnits:
    """Return the units that are billed for a request whose server reports no units.

    Raises InvalidRequest if the number of images is not a whole number.
    """
    return BilledUnits(
        queries=int(api in QUERY_APIS),
        images=_images(body) if api is Api.IMAGES else 0,
        seconds=_bounded(upload_bytes / AUDIO_BYTES_PER_SECOND) if api in UPLOAD_APIS else 0.0,
        characters=_characters(body.get("input")) if api in (Api.EMBEDDINGS, Api.SPEECH) else 0,
    )


def reserved_units(api: Api, body: Mapping[str, Json], tokens: int, upload_bytes: int, parts: int) -> BilledUnits:
    """Return the units to reserve for a request; the estimate errs on the high side.

    `tokens` is the estimated number of input tokens, `upload_bytes` the size of the uploaded file, and `parts` the
    number of requests to the server. Raises the errors of `estimated_units`.
    """
    units = estimated_units(api, body, upload_bytes)
    documents = body.get("documents")
    queries = units.queries * parts
    if api is Api.RERANK and isinstance(documents, list):
        queries = max(1, -(-(len(documents) + tokens // TOKENS_PER_DOCUMENT) // DOCUMENTS_PER_QUERY))
    seconds = _bounded(units.seconds * AUDIO_BYTES_PER_SECOND / MIN_AUDIO_BYTES_PER_SECOND)
    return BilledUnits(queries, units.images, seconds, units.characters)


def _images(body: Mapping[str, Json]) -> int:
    return min(max(whole_number(body, "n") or 1, 1), MAX_UNITS)


def _characters(value: Json) -> int:
    """Return the number of characters of an input: a text, token ids, or a list of these."""
    if isinstance(value, str):
        return min(len(value), MAX_UNITS)
    if not isinstance(value, list):
        return 0
    return min(sum(CHARACTERS_PER_TOKEN if type(each) is int else _flat(each) for each in value), MAX_UNITS)


def _flat(value: Json) -> int:
    return len(value) * CHARACTERS_PER_TOKEN if isinstance(value, list) else len(value) if isinstance(value, str) else 0


def _bounded(seconds: float) -> float:
    return min(seconds, float(MAX_UNITS))
