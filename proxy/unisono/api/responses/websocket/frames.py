"""Frames of a Responses socket: client requests and error frames.

A client's frame is one JSON object with a `type` and the fields of `POST /responses`. `stream_id` names the lane of the
response, and is repeated in all its events.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import orjson

from unisono.api.body import to_object
from unisono.api.error_responses import to_body
from unisono.core.frozen import dataclass
from unisono.errors import InvalidRequest, InvalidStreamId, UnisonoError, UnsupportedValue

# Responses of one lane are generated in sequence. None is the unnamed lane.
Lane: TypeAlias = str | None

Fields = dict[str, Any]

# Fields for the socket, which are not part of the request. `stream` has no effect, because a socket always receives
# events.
ENVELOPE = frozenset({"type", "stream_id", "generate", "stream"})

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")


@dataclass(frozen=True, slots=True)
class CreateFrame:
    """Request for a response.

    `body` is the body of `POST /responses`, and `size` the length of the frame in bytes. If `should_generate` is False,
    the request only prepares a later request. `number` is the 1-based number of the request on the socket.
    """

    body: Mapping[str, Any]
    size: int
    lane: Lane = None
    should_generate: bool = True
    number: int = 1


@dataclass(frozen=True, slots=True)
class SteerFrame:
    """Input for a running response. The gateway does not support it."""

    previous_response_id: str
    input: str | list[Any]


@dataclass(frozen=True, slots=True)
class EmptyFrame:
    """Frame that needs no reply."""


ClientFrame: TypeAlias = CreateFrame | SteerFrame | EmptyFrame


def fields_of(message: Mapping[str, Any]) -> tuple[Fields, int]:
    """Parse the JSON object of a message, and return it with its length in bytes.

    Raises InvalidRequest for a binary message and for text that is not a JSON object.
    """
    text = message.get("text")
    if text is None:
        raise InvalidRequest("A frame must be a text message with one JSON object.")
    data = text.encode()
    return to_object(data), len(data)


def lane_of(fields: Fields) -> Lane:
    """Return the lane of a frame: its `stream_id`, or None if the field is missing.

    Raises InvalidStreamId if the `stream_id` has invalid characters or an invalid length.
    """
    lane = fields.get("stream_id")
    if lane is None:
        return None
    if not isinstance(lane, str) or not _STREAM_ID.fullmatch(lane):
        raise InvalidStreamId(
            "'stream_id' must have 1 to 256 letters, digits, underscores, hyphens or periods.", param="stream_id"
        )
    return lane


def to_client_frame(fields: Fields, size: int, lane: Lane) -> ClientFrame:
    """Parse the fields of a frame by its `type`.

    Raises InvalidRequest for an unknown type and for a field that the type does not allow.
    """
    kind = fields.get("type")
    reader = READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise InvalidRequest(f"'type' must be one of {', '.join(READERS)}.", param="type")
    return reader(fields, size, lane)


def _create(fields: Fields, size: int, lane: Lane) -> CreateFrame:
    if fields.get("background") is True:
        raise UnsupportedValue(
            "'background' is not supported on a WebSocket; use POST /v1/responses.", param="background"
        )
    generate = fields.get("generate")
    if generate not in (None, True, False):
        raise InvalidRequest("'generate' must be true or false.", param="generate")
    cache = fields.get("prompt_cache_options")
    prewarm = isinstance(cache, dict) and cache.get("prewarm") is True
    body = {name: value for name, value in fields.items() if name not in ENVELOPE}
    return CreateFrame(body | {"stream": True}, size, lane, should_generate=generate is not False and not prewarm)


def _steer(fields: Fields, _: int, __: Lane) -> SteerFrame:
    parent, input = fields.get("previous_response_id"), fields.get("input")
    if not isinstance(parent, str):
        raise InvalidRequest("'previous_response_id' must be a string.", param="previous_response_id")
    if not isinstance(input, str | list):
        raise InvalidRequest("'input' must be a string or a list of items.", param="input")
    return SteerFrame(parent, input)


def _empty_frame(_: Fields, __: int, ___: Lane) -> EmptyFrame:
    return EmptyFrame()


# Parsers by frame type.
READERS: Mapping[str, Callable[[Fields, int, Lane], ClientFrame]] = {
    "response.create": _create,
    "response.steer": _steer,
    # Codex sends this frame when it has read an answer. There is no reply: Codex would attribute an error to its next
    # request.
    "response.processed": _empty_frame,
}


def to_lane_frame(event: bytes, lane: Lane) -> str:
    """Return an event's JSON as a frame of its lane."""
    if lane is None:
        return event.decode()
    return f'{event[:-1].decode()},"stream_id":"{lane}"}}'


def error_frame(error: UnisonoError, lane: Lane) -> str:
    """Return the frame of an error that does not belong to a response."""
    return to_lane_frame(orjson.dumps({"type": "error", "status": error.status, **to_body(error)}), lane)


def not_steered(steer: SteerFrame) -> str:
    """Return the reply to a steer frame: an error that repeats the input for later use."""
    frame = {
        "type": "response.steer.failed",
        "sequence_number": 0,
        "error": {
            "type": "invalid_request_error",
            "code": "steering_not_supported",
            "message": "Steering a response is not supported; send the input with the next 'response.create'.",
        },
        "steer": {"previous_response_id": steer.previous_response_id, "input": steer.input},
    }
    return orjson.dumps(frame).decode()
