"""Abilities that a request needs from its backend."""

from __future__ import annotations

from unisono.core.generation import Capabilities
from unisono.engine.logprobs import LogprobLog
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.errors import UnsupportedValue
from unisono.harmony.encoding import Encoding


def required_abilities(request: GenerationRequest) -> frozenset[str]:
    """Return the names of abilities that the backend of a request needs."""
    answer = request.answer
    return frozenset().union(
        ["logit_bias"] if answer.sampling.logit_bias else [], ["logprobs"] if answer.logprobs is not None else []
    )


def check_abilities(request: GenerationRequest, capabilities: Capabilities) -> None:
    """Raise UnsupportedValue if the backend lacks an ability that the request needs."""
    answer, fields = request.answer, request.prompt.fields
    if answer.sampling.logit_bias and not capabilities.logit_bias:
        raise UnsupportedValue(
            "The backend of this model cannot bias tokens; omit 'logit_bias'.", param=fields.logit_bias
        )
    if answer.logprobs is not None and not capabilities.logprobs:
        raise UnsupportedValue(
            f"The backend of this model reports no log probabilities; omit '{fields.logprobs}'.", param=fields.logprobs
        )


def log_of(request: GenerationRequest, report: GenerationReport, encoding: Encoding) -> LogprobLog | None:
    """Return the log for another generation; None if the request asks for no log probabilities."""
    if request.answer.logprobs is None:
        return None
    if report.logprobs is None:
        report.logprobs = LogprobLog(lambda token: encoding.decode_bytes([token]))
    report.logprobs.start_generation()
    return report.logprobs
