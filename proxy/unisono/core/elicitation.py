"""Questions of tools to the user, which the Model Context Protocol calls elicitations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from unisono.core.conversation import Json
from unisono.core.frozen import dataclass


class UserAction(StrEnum):
    """Reaction of the user to a question of a tool: an answer, a refusal, or neither."""

    ACCEPT = "accept"
    DECLINE = "decline"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class ToolQuestion:
    """Question of a tool to the user.

    The answer must match the JSON Schema `schema`. If `url` is not empty, the user has to visit this page instead.
    `state` is sent back when the call is repeated with the answer; only the tool host interprets it.
    """

    message: str
    schema: Mapping[str, Json] = field(default_factory=dict)
    url: str = ""
    state: Json = None


@dataclass(frozen=True, slots=True)
class UserAnswer:
    """Answer of the user to a question.

    `content` is the content of the answer, which must match the schema of the question. `state` is the `state` of the
    question.
    """

    action: UserAction
    content: Json = None
    state: Json = None
