"""Request body of `POST /v1/inspect`: a recording or its id, Harmony text, or token ids."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from unisono.api.field_types import OpenModel
from unisono.errors import InvalidRequest

MAX_CHARACTERS: Final = 500_000
MAX_TOKENS: Final = 200_000
MAX_TOOLS: Final = 64
# Largest integer that all JSON parsers represent exactly.
LARGEST: Final = 2**53 - 1

# Any integer: the response marks the numbers that are not token ids.
TokenNumber = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
WireName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class InspectRequest(OpenModel):
    """A recording, its id, Harmony text, or token ids: exactly one of the first four fields.

    In text and token ids, everything before the model's output is the prompt, unless `all_output` is true. `tools`
    names the tools that the model may call, by default every tool that it calls.
    """

    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    trace: dict[str, Any] | None = None
    text: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None
    tokens: Annotated[list[TokenNumber], Field(max_length=MAX_TOKENS)] | None = None
    all_output: bool = False
    tools: Annotated[list[WireName], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)

    def check(self) -> None:
        """Raise InvalidRequest unless exactly one source is given."""
        if sum(source is not None for source in (self.id, self.trace, self.text, self.tokens)) != 1:
            raise InvalidRequest("Set exactly one of 'id', 'trace', 'text' and 'tokens'.")
