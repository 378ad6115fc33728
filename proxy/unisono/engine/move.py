"""A move of the step plan, as data: what is cut, what is put there, and what the model goes on behind."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.core.conversation import Tokens
from unisono.core.generation import Constraint
from unisono.engine.regeneration import NONE_REJECTED, RejectedAttempts


@dataclass(frozen=True, slots=True)
class PromptEdit:
    """Cut what was said behind the place `kept`, put whole messages `between` there, open a message with `header` (what
    stands behind `<|start|>assistant`; empty where the model is to choose), and go on. `closes`: an open message is
    closed first, and stands. `naming`: what is generated next is the name of a tool."""

    kept: int = 0
    header: Tokens = ()
    between: Tokens = ()
    closes: bool = False
    constraint: Constraint | None = None
    naming: bool = False
    attempts: RejectedAttempts = NONE_REJECTED
    """Rejected attempts at the message that comes."""
    body: Tokens = ()
    """Whole body of the message, with its terminator; empty where the model writes it."""
    trims: bool = False
    """The open message stays open and continues with `body`; `kept` is the position after its header."""
    ends: bool = False
    """Nothing more is generated."""
    rule: str = ""
