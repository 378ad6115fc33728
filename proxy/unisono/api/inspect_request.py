"""What `POST /v1/inspect` takes: the id of a recording, a recording, text in Harmony, or token ids."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from unisono.api.field_types import OpenModel
from unisono.errors import InvalidRequest

MOST_CHARACTERS: Final = 500_000
MOST_TOKENS: Final = 200_000
MOST_TOOLS: Final = 64
LARGEST: Final = 2**53 - 1
"""Numbers beyond it are not the same to every reader of JSON."""

TokenNumber = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
"""Any number: one that is no token is shown as none."""
WireName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class InspectRequest(OpenModel):
    """One of the first four. Of text and ids what comes before the model's own output is taken for the prompt, but with
    `all_output`; `tools` are the names of those it may call, by default all that it does."""

    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    trace: dict[str, Any] | None = None
    text: Annotated[str, Field(max_length=MOST_CHARACTERS)] | None = None
    tokens: Annotated[list[TokenNumber], Field(max_length=MOST_TOKENS)] | None = None
    all_output: bool = False
    tools: Annotated[list[WireName], Field(max_length=MOST_TOOLS)] = Field(default_factory=list)

    def check(self) -> None:
        """Raises InvalidRequest."""
        if sum(given is not None for given in (self.id, self.trace, self.text, self.tokens)) != 1:
            raise InvalidRequest("Give one of 'id', 'trace', 'text' and 'tokens'.")
