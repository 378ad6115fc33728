"""What every section of the configuration is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Bounds that nobody misses, within what stores and clocks can count.
Seconds = Annotated[float, Field(gt=0, le=1e10)]
Count = Annotated[int, Field(gt=0, le=10**12)]
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]


class Section(BaseModel):
    """A part of the configuration. Frozen, closed, and quiet about its values when one of them is wrong."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )
