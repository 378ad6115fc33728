"""Error for a conversation that is in use or was changed, which the store and the API raise."""

from __future__ import annotations

from typing import ClassVar

from unisono.errors import StoreConflict


class ConversationConflict(StoreConflict):
    """A conversation is in use or was changed. Requests name it in `conversation`."""

    IN_USE: ClassVar[str] = "The conversation has a response in progress; try again when it has ended."

    def __init__(self, message: str = IN_USE, *, param: str = "conversation") -> None:
        super().__init__(message, param=param)
