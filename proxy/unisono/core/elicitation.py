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

    The answer has the JSON Schema `schema`. Instead, `url` may be a page for the user to visit. The call continues with
    `state`, which only the tool host reads.
    """

    message: str
    schema: Mapping[str, Json] = field(default_factory=dict)
    url: str = ""
    state: Json = None


@dataclass(frozen=True, slots=True)
class UserAnswer:
    """Answer of the user to a question.

    `content` has the form of its schema, and `state` is the question's.
    """

    action: UserAction
    content: Json = None
    state: Json = None
