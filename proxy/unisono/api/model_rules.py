"""What the operator says about the answers of a model, on every surface alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from unisono.engine.turn import ForbiddenTools, GenerationRequest


@dataclass(frozen=True, slots=True)
class ModelRules:
    """`reasoning_budget` are the most tokens of thoughts there are, None for any number; a request may ask for fewer.
    `unmended` are names of rules by which nothing is mended. `failover` says whether another deployment goes on where
    one failed behind something that was shown. `forbidden_tools` applies to requests that allow no call."""

    reasoning_budget: int | None = None
    unmended: frozenset[str] = frozenset()
    failover: bool = True
    forbidden_tools: ForbiddenTools = ForbiddenTools.REMOVE

    def applied_to(self, turn: GenerationRequest) -> GenerationRequest:
        """The turn under the rules that no request changes."""
        return replace(turn, unmended=self.unmended, failover=self.failover, forbidden_tools=self.forbidden_tools)


NO_RULES: Final = ModelRules()
