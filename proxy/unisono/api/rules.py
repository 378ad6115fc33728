"""What the operator says about the answers of a model, on every surface alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ModelRules:
    """`reasoning_budget` are the most tokens of thoughts there are, None for any number; a request may ask for fewer.
    `unmended` are names of rules by which nothing is mended. `failover` says whether another deployment goes on where
    one failed behind something that was shown."""

    reasoning_budget: int | None = None
    unmended: frozenset[str] = frozenset()
    failover: bool = True


NO_RULES: Final = ModelRules()
