"""Prompt edit: tokens to cut and to insert before generation continues."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.core.conversation import Tokens
from unisono.core.generation import Constraint
from unisono.engine.regeneration import NONE_REJECTED, RejectedAttempts


@dataclass(frozen=True, slots=True)
class PromptEdit:
    """An edit of the tokens at the end of a step's prompt.

    Cut the tokens after position `kept`, insert the whole messages `between`, open a message with `header`, and
    continue. `header` follows `<|start|>assistant`; it is empty if the model chooses the header. With `closes`, an open
    message is closed first and stays in the prompt. With `naming`, the next generation is the name of a tool.
    """

    kept: int = 0
    header: Tokens = ()
    between: Tokens = ()
    closes: bool = False
    constraint: Constraint | None = None
    naming: bool = False
    attempts: RejectedAttempts = NONE_REJECTED  # rejected attempts at the message that follows
    body: Tokens = ()  # whole body of the message, with its terminator; empty if the model writes it
    # the open message stays open and continues with `body`; `kept` is the position after its header
    trims: bool = False
    ends: bool = False  # nothing more is generated
    rule: str = ""
