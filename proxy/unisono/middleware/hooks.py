"""Choice of the hooks that apply to a request, and of the gate that calls them.

This layer is inside the quota layer. So a request over a limit never reaches a hook, and a request that a hook refuses
uses no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.engine.journal import noted_in
from unisono.engine.request import GenerationRequest
from unisono.middleware.answer_masking import BufferingHookGate
from unisono.middleware.hook_gates import GUARDRAILS_NOTE, AnswerHookGate, HookGate, NamedHook, Restore


class Hooking:
    """Factory of gates that call hooks in order.

    `restore` completes a request before hooks see it, such as with reasoning that the client did not send back.
    """

    def __init__(self, hooks: Sequence[NamedHook], restore: Restore) -> None:
        self.hooks = tuple(hooks)
        self._restore = restore

    def __call__(self, request: GenerationRequest) -> HookGate | None:
        if not self.hooks:
            return None
        requested = _requested_guardrails(request)
        # A guardrail of a model also applies if the client names the model as a fallback.
        caller = request.origin.caller
        models = {request.model, *((caller.routing.fallbacks or ()) if caller is not None else ())}
        hooks = [hook for hook in self.hooks if hook.applies_to(models, requested)]
        if not hooks:
            return None
        if any(hook.holds_answers for hook in hooks):
            return BufferingHookGate(hooks, requested, self._restore)
        kind = AnswerHookGate if any(hook.checks_answers for hook in hooks) else HookGate
        return kind(hooks, requested, self._restore)


def _requested_guardrails(request: GenerationRequest) -> tuple[str, ...]:
    """Return the names of the guardrails that the request named when its answer began."""
    if request.resumption.journal:
        names = (noted_in(request.resumption.journal) or {}).get(GUARDRAILS_NOTE)
        return tuple(map(str, names)) if isinstance(names, Sequence) else ()
    return tuple(sorted(request.origin.caller.guardrails)) if request.origin.caller is not None else ()
