"""Faults that the gateway detects in answers, by the deployment that generated the answer."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from unisono.core.observer import GenerationDone, GenerationOutcome, StepDone
from unisono.core.recovery_rules import (
    CODE_FENCE,
    REASONING_BUDGET,
    REGENERATED_ANSWER,
    REGENERATED_CALL,
    RULES,
    TOOL_NOT_ALLOWED,
    UNDECLARED_TOOL,
    WRAPPED_INPUT,
)
from unisono.errors import BackendProtocolError, ContextTooLong


class AnswerFault(StrEnum):
    """Kind of fault of an answer. The values are labels of a metric and do not change."""

    RECOVERY = "recovery"  # malformed Harmony, repetition, or a missing answer
    INVALID_CALL = "invalid_call"  # a call with invalid arguments
    UNDECLARED_TOOL = "undeclared_tool"  # a call to a tool that the request does not offer
    UNMET_FORMAT = "unmet_format"  # an answer that is not in the required format
    CUT_STREAM = "cut_stream"  # a stream that broke off


# Recoveries that are no evidence of a faulty model. Their causes are limits of the request, the state of tool servers,
# or the API of an engine, which is the same for all deployments of this kind.
HARMLESS_RULES: Final = frozenset(
    {
        *("approval-void", "call-limit", "call-not-repeated", "late-call", "repeated-call", "tool-deadline"),
        *("tool-left-out", "tools-ended", "media-left-out", "echoed-prefix", "restored-stop", REASONING_BUDGET),
    }
)
_SPECIAL: Final[Mapping[str, AnswerFault]] = {
    "bad-tool-arguments": AnswerFault.INVALID_CALL,
    "unfinished-call": AnswerFault.INVALID_CALL,
    REGENERATED_CALL: AnswerFault.INVALID_CALL,
    WRAPPED_INPUT: AnswerFault.INVALID_CALL,
    "not-a-tool": AnswerFault.UNDECLARED_TOOL,
    "unknown-tool": AnswerFault.UNDECLARED_TOOL,
    TOOL_NOT_ALLOWED: AnswerFault.UNDECLARED_TOOL,
    UNDECLARED_TOOL: AnswerFault.UNDECLARED_TOOL,
    CODE_FENCE: AnswerFault.UNMET_FORMAT,
    REGENERATED_ANSWER: AnswerFault.UNMET_FORMAT,
}
FAULT_OF_RULE: Final[Mapping[str, AnswerFault]] = {
    rule: _SPECIAL.get(rule, AnswerFault.RECOVERY) for rule in RULES if rule not in HARMLESS_RULES
}
# Recoveries that the token limit of the request can cause.
_OF_A_LIMIT: Final = frozenset({"cut-header", "unfinished-call"})

NO_FAULTS: Final[frozenset[AnswerFault]] = frozenset()
_CUT: Final = frozenset({AnswerFault.CUT_STREAM})


def faults_by_deployment(done: GenerationDone) -> Mapping[str, frozenset[AnswerFault]]:
    """Return the faults of an answer, by the deployment to which they are attributed.

    The set of a deployment is empty if its answer has no fault. A stream that broke off is attributed to its
    deployment. If several deployments generated parts of the answer, other faults are attributed to no deployment.
    """
    found: dict[str, frozenset[AnswerFault]] = {}
    generating: set[str] = set()
    for step in done.steps:
        if step.failure and _is_cut(step):
            found[step.deployment] = _CUT
        if step.generated:
            generating.add(step.deployment)
    # The recoveries of a resumed answer include those of the interrupted generation, which a different deployment may
    # have caused.
    is_whole = done.outcome is GenerationOutcome.COMPLETED and not done.start.resumed
    if is_whole and len(generating) == 1 and not generating & found.keys():
        found[generating.pop()] = _faults(done)
    return found


def _is_cut(step: StepDone) -> bool:
    """Return whether the stream of a failed step broke off."""
    if step.failure == ContextTooLong.code:
        return False
    # A failure before the first token is a matter of availability, which the circuit breaker handles.
    return step.first_token_s is not None or step.failure == BackendProtocolError.code


def _faults(done: GenerationDone) -> frozenset[AnswerFault]:
    if not (done.recoveries or done.repairs or done.unmet):
        return NO_FAULTS
    rules = {*done.recoveries, *(repair.rule for repair in done.repairs)}
    is_limited = done.finish == "length"
    if is_limited:
        rules -= _OF_A_LIMIT
    faults = {FAULT_OF_RULE[rule] for rule in rules if rule in FAULT_OF_RULE}
    if done.unmet and not is_limited:
        faults.add(AnswerFault.UNMET_FORMAT)
    return frozenset(faults) if faults else NO_FAULTS
