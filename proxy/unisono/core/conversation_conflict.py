"""Error of the store and the API about a conversation that is in use or was changed."""

from __future__ import annotations

from typing import ClassVar

from unisono.errors import StoreConflict


class ConversationConflict(StoreConflict):
    """A conversation is in use or was changed. `param` is the field that names the conversation."""

    IN_USE: ClassVar[str] = "The conversation has a response in progress; try again when it has ended."

    def __init__(self, message: str = IN_USE, *, param: str = "conversation") -> None:
        super().__init__(message, param=param)
