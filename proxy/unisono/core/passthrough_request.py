"""Requests that pass through: what a model that is not Harmony is asked, in OpenAI's own words, and by which rules.

A passage is the client's body as it came. A turn that has one may be answered by a deployment of the kind
`ports.PassingBackend`; what it answers are `events.Passed`, which surfaces hand out as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from unisono.core.conversation import Json
from unisono.core.generation import Timeouts
from unisono.core.trace_context import TraceContext


class Api(StrEnum):
    """Which of OpenAI's APIs a body is of; the value is its path below `/v1`."""

    CHAT = "chat/completions"
    RESPONSES = "responses"


WITHOUT_OUTPUT: Final = frozenset({"response.created", "response.queued", "response.in_progress", "keepalive"})
"""Events of the Responses API that only say that an answer was accepted, or goes on."""


def has_output(api: Api, event: Mapping[str, Json]) -> bool:
    """Whether an event of a stream holds something generated, or an end. Servers may send a role, empty text or the
    usage long before the first token."""
    if api is Api.RESPONSES:
        return event.get("type") not in WITHOUT_OUTPUT
    choices = event.get("choices")
    return any(_choice_has_output(choice) for choice in choices) if isinstance(choices, list) else False


def _choice_has_output(choice: Json) -> bool:
    if not isinstance(choice, Mapping):
        return False
    delta = choice.get("delta")
    parts = delta if isinstance(delta, Mapping) else {}
    return bool(choice.get("finish_reason")) or any(value for name, value in parts.items() if name != "role")


class AnswerMode(StrEnum):
    """Who may answer the requests for a model: the engine, deployments that answer in OpenAI's own API, or both."""

    ENGINE = "engine"
    PASSING = "passing"
    ENGINE_THEN_PASSING = "engine then passing"
    PASSING_THEN_ENGINE = "passing then engine"

    @property
    def passes(self) -> bool:
        return self is not AnswerMode.ENGINE


def named(pattern: str, asked: str) -> str:
    """The backend's name for a model that was asked for: `pattern` itself, or what the client says in the place of the
    star in it."""
    before, star, after = pattern.partition("*")
    if not star:
        return pattern
    return asked if before and asked.startswith(before) else f"{before}{asked}{after}"


def starred(pattern: str, asked: str) -> str:
    """What a name that was asked for has in the place of the star of the pattern it was found by; all of it without."""
    before, star, after = pattern.partition("*")
    return asked.removeprefix(before).removesuffix(after) if star else asked


@dataclass(frozen=True, slots=True)
class ServedName:
    """How a name that clients ask for is served: by which group, and by whom. `keeps` says that whoever answers keeps
    responses and runs tools itself, so that requests may lean on what is kept there."""

    group: str = ""
    way: AnswerMode = AnswerMode.ENGINE
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class PassthroughRequest:
    """A request as it came. `model` is the name that was asked for, which the answer carries too; `tokens` is what its
    text is taken for. `choices` are the answers it asks for, `most` the tokens that each of them may have, None for
    any number."""

    api: Api
    way: AnswerMode
    body: Mapping[str, Json]
    model: str
    stream: bool = False
    tokens: int = 0
    choices: int = 1
    most: int | None = None
    wants_usage: bool = True
    """Whether the client is told the usage; a stream of Chat Completions tells it only where that was asked for."""


@dataclass(frozen=True, slots=True)
class PassthroughJob:
    """A request for a backend: the body as it is sent, but for the model's name, which the backend knows. `asked` is
    what the client asked for, for a backend that serves many (`named`)."""

    api: Api
    body: Mapping[str, Json]
    stream: bool
    asked: str = ""
    timeouts: Timeouts = field(default_factory=Timeouts)
    request_id: str = ""
    trace: TraceContext | None = None
