"""The operator's rules and defaults for the answers of a model, common to all API surfaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, Final

from unisono.core.conversation import AnswerForm, Effort
from unisono.core.frozen import dataclass
from unisono.engine.request import ForbiddenTools, GenerationRequest


@dataclass(frozen=True, slots=True)
class AnswerDefaults:
    """Defaults of a model for fields that a request does not set.

    None or an empty value means that the model has no such default. The keys of `sampling` are fields of `Sampling`.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    effort: Effort | None = None
    form: AnswerForm | None = None
    parallel_calls: bool = True
    reasoning_budget: int | None = None

    def effort_for(self, requested: Effort | None) -> Effort:
        # MEDIUM is the default of gpt-oss, as in its own chat template.
        return requested or self.effort or Effort.MEDIUM

    def allows_parallel_calls(self, requested: bool | None) -> bool:
        return self.parallel_calls if requested is None else requested


NO_DEFAULTS: Final = AnswerDefaults()


@dataclass(frozen=True, slots=True)
class ModelRules:
    """Rules of one model.

    `reasoning_budget` is the maximum number of reasoning tokens, None for no limit; a request may set a lower limit.
    `unmended` contains the names of disabled recovery rules. If `failover` is True, a different deployment continues
    the answer when a deployment fails after output was emitted. `forbidden_tools` is the treatment of the declared
    tools if a request allows no tool call. If `strips_media` is True, images in the newest user message are replaced
    like earlier images, and not refused. `vision_model` is the model group that describes images, or None. `defaults`
    apply to fields that a request does not set.
    """

    reasoning_budget: int | None = None
    unmended: frozenset[str] = frozenset()
    failover: bool = True
    forbidden_tools: ForbiddenTools = ForbiddenTools.REMOVE
    strips_media: bool = False
    vision_model: str | None = None
    defaults: AnswerDefaults = NO_DEFAULTS

    def applied_to(self, request: GenerationRequest, recoveries: tuple[str, ...] = ()) -> GenerationRequest:
        """Return the request with the rules that clients cannot change.

        `recoveries` are the names of the recovery rules that were applied to the body of the request.
        """
        answer, routing, origin = request.answer, request.routing, request.origin
        # Most models have no rules, and a copy of a request takes longer than the comparison.
        if (answer.disabled_rules, answer.forbidden_tools) != (self.unmended, self.forbidden_tools):
            answer = replace(answer, disabled_rules=self.unmended, forbidden_tools=self.forbidden_tools)
        if routing.failover != self.failover:
            routing = replace(routing, failover=self.failover)
        if origin.recoveries != recoveries:
            origin = replace(origin, recoveries=recoveries)
        if answer is request.answer and routing is request.routing and origin is request.origin:
            return request
        return replace(request, answer=answer, routing=routing, origin=origin)


NO_RULES: Final = ModelRules()
