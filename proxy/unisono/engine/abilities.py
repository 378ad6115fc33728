"""Backend abilities that a request requires, and the recorder of log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from unisono.core.generation import Capabilities, Chunk, CompletionJob
from unisono.core.logprobs import LogprobLog
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.errors import BackendProtocolError, InvalidRequest, UnsupportedValue
from unisono.harmony.encoding import Encoding

# Log probabilities of one prompt. Backends send all of them in one event, whose size is limited.
MAX_PROMPT_LOGPROBS: Final = 200_000


def required_abilities(request: GenerationRequest, *, prompt_logprobs: bool = False) -> frozenset[str]:
    """Return the names of abilities that the backend of a request needs for its next generation."""
    needed: set[str] = set()
    if request.answer.sampling.logit_bias:
        needed.add("logit_bias")
    if request.logprobs is not None:
        needed.add("logprobs")
    if prompt_logprobs:
        needed.add("prompt_logprobs")
    return frozenset(needed)


def check_abilities(request: GenerationRequest, capabilities: Capabilities, *, prompt_logprobs: bool = False) -> None:
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
    if prompt_logprobs and not capabilities.prompt_logprobs:
        raise UnsupportedValue(
            "The backend of this model reports no log probabilities of the prompt; omit 'echo' or 'logprobs'.",
            param=fields.logprobs,
        )


def check_prompt_logprobs(request: GenerationRequest, prompt_tokens: int) -> None:
    """Raise InvalidRequest if a backend cannot send as many log probabilities of a prompt."""
    if request.raw is None or not request.raw.has_prompt_logprobs or request.logprobs is None:
        return
    # A backend reports the token itself, its alternatives, and the token among them.
    limit = MAX_PROMPT_LOGPROBS // (request.logprobs + 2)
    if prompt_tokens > limit:
        raise InvalidRequest(
            f"'logprobs': with {request.logprobs} alternatives, log probabilities of a prompt are limited to {limit} "
            f"tokens, and this prompt has {prompt_tokens}; request fewer alternatives or shorten the prompt.",
            param=request.prompt.fields.logprobs,
        )


def logprob_recorder(
    request: GenerationRequest, report: GenerationReport, encoding: Encoding
) -> Callable[[Sequence[int], Chunk], None] | None:
    """Return a function that records a chunk's tokens and their log probabilities.

    Returns None if the request asks for no log probabilities. An answer may consist of several generations, and each
    needs a function of its own. All these functions record into `report.facts.logprobs`.
    """
    if request.logprobs is None:
        return None
    if report.facts.logprobs is None:
        report.facts.logprobs = LogprobLog(lambda token: encoding.decode_bytes([token]))
    log = report.facts.logprobs
    log.start_generation()
    return lambda tokens, chunk: log.add(tokens, chunk.logprobs)


def prompt_recorder(job: CompletionJob, report: GenerationReport) -> Callable[[Chunk], None]:
    """Return a function that records the prompt's log probabilities from a job's chunks.

    It raises BackendProtocolError if the first tokens arrive without them.
    """
    log = report.facts.logprobs
    if log is None or not job.prompt_logprobs:
        return _ignore_chunk

    def record(chunk: Chunk) -> None:
        if log.prompt or not (chunk.tokens or chunk.finish or chunk.prompt_logprobs):
            return
        if len(chunk.prompt_logprobs) != len(job.prompt.tokens):
            raise BackendProtocolError("the backend sent no log probabilities of the prompt")
        log.prompt = list(zip(job.prompt.tokens, chunk.prompt_logprobs, strict=True))

    return record


def _ignore_chunk(chunk: Chunk) -> None:
    """Record nothing."""
