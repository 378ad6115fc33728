"""Common types of all sections."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Generous bounds that stores and clocks can still represent.
Seconds = Annotated[float, Field(gt=0, le=1e10)]
Count = Annotated[int, Field(gt=0, le=10**12)]
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]


class Section(BaseModel):
    """Section of the configuration: frozen, no unknown keys, no values in error messages."""

    # Only the whole configuration is parsed, so its sections need no validators of their own.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
        defer_build=True,
    )
