"""The operator's rules for the answers of a model, common to all API surfaces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from unisono.engine.request import ForbiddenTools, GenerationRequest


@dataclass(frozen=True, slots=True)
class ModelRules:
    """Rules of one model.

    `reasoning_budget` is the maximum number of reasoning tokens, None for no limit; a request may set a lower one.
    `unmended` names disabled recovery rules. `failover` permits another deployment to continue after a failure when
    output was already emitted. `forbidden_tools` applies to requests that allow no call. With `strips_media`, images in
    the newest user message are replaced like earlier ones. `vision_model` is the group that describes them, or None.
    """

    reasoning_budget: int | None = None
    unmended: frozenset[str] = frozenset()
    failover: bool = True
    forbidden_tools: ForbiddenTools = ForbiddenTools.REMOVE
    strips_media: bool = False
    vision_model: str | None = None

    def applied_to(self, request: GenerationRequest, recoveries: tuple[str, ...] = ()) -> GenerationRequest:
        """Apply the rules that a request cannot change; `recoveries` were applied to its body."""
        return replace(
            request,
            answer=replace(request.answer, disabled_rules=self.unmended, forbidden_tools=self.forbidden_tools),
            routing=replace(request.routing, failover=self.failover),
            origin=replace(request.origin, recoveries=recoveries),
        )


NO_RULES: Final = ModelRules()
