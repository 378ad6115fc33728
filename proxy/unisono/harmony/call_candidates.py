"""Decision about messages that may be calls, by their terminator or body."""

from __future__ import annotations

from dataclasses import replace

from unisono.core.generation import CALL
from unisono.core.json_syntax import json_kind
from unisono.harmony.header import COMMENTARY, Header


def decide(header: Header, text: str, token: int, *, terminated: bool) -> Header:
    """Return the header of a closed message with the body `text`, which may be a call.

    `token` ended the message. `terminated` is False if repair supplied this token, because the message was truncated.
    """
    if header.if_json is not None:
        is_call = is_json_object(text) if terminated else text.lstrip().startswith("{")
        return header.if_json if is_call else header
    if token == CALL and terminated:
        return replace(header, channel=COMMENTARY, recipient=header.if_called, dropped=False)
    return header


def is_json_object(text: str) -> bool:
    """Return whether `text` is one JSON object, of any size."""
    return json_kind(text) is dict
