"""Units other than tokens by which the use of models is billed."""

from __future__ import annotations

from typing import Final

from unisono.core.conversation import Json
from unisono.core.frozen import dataclass

# Maximum number of each unit, so that costs stay within the number range of the stores.
MAX_UNITS: Final = 10**7


@dataclass(frozen=True, slots=True)
class BilledUnits:
    """Billed units of one request.

    `queries` counts requests, or search units of a reranker. `images` counts images. `seconds` is the duration of
    audio. `characters` counts the characters of the input.
    """

    queries: int = 0
    images: int = 0
    seconds: float = 0.0
    characters: int = 0


NO_UNITS: Final = BilledUnits()


def reported_units(number: Json, otherwise: float) -> float:
    """Return the number of units that a server reports, or `otherwise` if it is implausible."""
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= MAX_UNITS:
        return otherwise
    return number
