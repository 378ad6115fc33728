"""Identity of the client, for routing.

Failures of a single identity do not make a deployment unavailable to others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from hashlib import blake2b
from typing import Final

from unisono.core.conversation import UserMessage
from unisono.core.generation import Sampling
from unisono.engine.turn import GenerationRequest

USUAL: Final = Sampling()
# body fields of pass-through requests that a backend may fail on
UNUSUAL_FIELDS: Final = (
    "logit_bias",
    "stop",
    "tools",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def identity_of(turn: GenerationRequest) -> str:
    """Return the key's public id, or a digest of the request if there is no key.

    The digest is that of its unusual options, or else of the beginning of the conversation. A client that repeats or
    continues a request therefore has the same identity.
    """
    if turn.caller is not None and turn.caller.key:
        return turn.caller.key
    said = repr(_options(turn) or _beginning(turn))
    return f"request {blake2b(said.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"


def _options(turn: GenerationRequest) -> Mapping[str, object]:
    """Return the options that differ from the defaults."""
    # The seed is excluded: it may differ with every repetition.
    if turn.passage is not None:
        return {name: turn.passage.body[name] for name in UNUSUAL_FIELDS if turn.passage.body.get(name) is not None}
    told: dict[str, object] = {
        field.name: value
        for field in fields(Sampling)
        if field.name != "seed" and (value := getattr(turn.sampling, field.name)) != getattr(USUAL, field.name)
    }
    if turn.stop:
        told["stop"] = turn.stop
    if tools := turn.conversation.preamble.tools:
        told["tools"] = [tool.name for tool in tools]
    return told


def _beginning(turn: GenerationRequest) -> object:
    if turn.raw is not None:
        return turn.raw.tokens if turn.raw.text is None else turn.raw.text
    items = turn.conversation.items
    first = next((at for at, item in enumerate(items, 1) if isinstance(item, UserMessage)), len(items))
    return turn.conversation.preamble.instructions, items[:first]
