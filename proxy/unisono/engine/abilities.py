"""Abilities that a request needs from its backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.core.generation import Capabilities, Chunk
from unisono.core.logprobs import LogprobLog
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.errors import UnsupportedValue
from unisono.harmony.encoding import Encoding


def required_abilities(request: GenerationRequest) -> frozenset[str]:
    """Return the names of abilities that the backend of a request needs."""
    answer = request.answer
    return frozenset().union(
        ["logit_bias"] if answer.sampling.logit_bias else [], ["logprobs"] if request.logprobs is not None else []
    )


def check_abilities(request: GenerationRequest, capabilities: Capabilities) -> None:
    """Raise UnsupportedValue if the backend lacks an ability that the request needs."""
    answer, fields = request.answer, request.prompt.fields
    if answer.sampling.logit_bias and not capabilities.logit_bias:
        raise UnsupportedValue(
            "The backend of this model cannot bias tokens; omit 'logit_bias'.", param=fields.logit_bias
        )
    if request.logprobs is not None and not capabilities.logprobs:
        raise UnsupportedValue(
            f"The backend of this model reports no log probabilities; omit '{fields.logprobs}'.", param=fields.logprobs
        )


def logprob_recorder(
    request: GenerationRequest, report: GenerationReport, encoding: Encoding
) -> Callable[[Sequence[int], Chunk], None]:
    """Return a function that records the log probabilities of a chunk, for another generation."""
    if request.logprobs is None:
        return _ignore
    if report.facts.logprobs is None:
        is_raw = request.raw is not None
        report.facts.logprobs = LogprobLog(lambda token: encoding.decode_bytes([token]), is_raw=is_raw)
    log = report.facts.logprobs
    log.start_generation()
    return lambda tokens, chunk: log.add(tokens, chunk.logprobs)


def _ignore(tokens: Sequence[int], chunk: Chunk) -> None:
    """Record nothing."""
