"""Base class and common types of the sections of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# The upper bounds are generous, but stores and clocks can still represent the values.
Seconds = Annotated[float, Field(gt=0, le=1e10)]
Count = Annotated[int, Field(gt=0, le=10**12)]
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]


class Section(BaseModel):
    """Base class of all sections.

    Sections are frozen and reject unknown keys. Their error messages contain no values, which may be secret.
    """

    # Pydantic builds a validator only for `Config`, because only the whole configuration is parsed.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
        defer_build=True,
    )
