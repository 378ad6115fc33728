"""Abilities that a request requires, fields at fault in errors, and log probabilities.

The functions for log probabilities check the length of the prompt, and create the log and its recorders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from unisono.core.emitted_logprobs import LogprobLog
from unisono.core.generation import Capabilities, Chunk, CompletionJob
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.errors import BackendProtocolError, BackendRejected, ContextTooLong, InvalidRequest, UnsupportedValue
from unisono.harmony.encoding import Encoding

# Largest number of log probabilities that a backend may send for one prompt. A backend sends all log probabilities of a
# prompt in one event, and the size of an event is limited.
MAX_PROMPT_LOGPROBS: Final = 200_000


def required_abilities(request: GenerationRequest, *, prompt_logprobs: bool = False) -> frozenset[str]:
    """Return the names of the abilities that a backend needs for the request's next generation.

    `prompt_logprobs`: the backend must also report log probabilities of the prompt.
    """
    needed: set[str] = set()
    if request.answer.sampling.logit_bias:
        needed.add("logit_bias")
    if request.logprobs is not None:
        needed.add("logprobs")
    if prompt_logprobs:
        needed.add("prompt_logprobs")
    return frozenset(needed)


def check_abilities(request: GenerationRequest, capabilities: Capabilities, *, prompt_logprobs: bool = False) -> None:
    """Raise UnsupportedValue if the backend lacks an ability that the request needs.

    `prompt_logprobs`: the backend must also report log probabilities of the prompt.
    """
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


def field_at_fault(error: Exception, request: GenerationRequest) -> str | None:
    """Return the path of the client's field that a backend's error is about; None if unknown.

    The backend names a field of the request that it received. Only sampling fields have the same names as in the
    client's request.
    """
    if isinstance(error, ContextTooLong):
        return request.prompt.fields.conversation
    path = (isinstance(error, BackendRejected) and error.backend_field) or ""
    return path if path.replace("[", ".").partition(".")[0] in request.prompt.fields.sampling else None


def check_prompt_logprobs(request: GenerationRequest, prompt_tokens: int) -> None:
    """Raise InvalidRequest if the prompt is too long to report its log probabilities.

    Does nothing if the request does not ask for log probabilities of its prompt.
    """
    if request.raw is None or not request.raw.has_prompt_logprobs or request.logprobs is None:
        return
    # For each prompt token, a backend reports the token, the alternatives, and the token again among the alternatives.
    limit = MAX_PROMPT_LOGPROBS // (request.logprobs + 2)
    if prompt_tokens > limit:
        raise InvalidRequest(
            f"'logprobs': with {request.logprobs} alternatives per token, log probabilities are available for prompts "
            f"of at most {limit} tokens, but this prompt has {prompt_tokens} tokens; request fewer alternatives or "
            "shorten the prompt.",
            param=request.prompt.fields.logprobs,
        )


def logprob_log(request: GenerationRequest, report: GenerationReport, encoding: Encoding) -> LogprobLog | None:
    """Return the report's log; it is created if the request asks for log probabilities."""
    if request.logprobs is not None and report.facts.logprobs is None:
        report.facts.logprobs = LogprobLog(lambda token: encoding.decode_bytes([token]))
    return report.facts.logprobs


def logprob_recorder(
    request: GenerationRequest, report: GenerationReport, encoding: Encoding
) -> Callable[[Sequence[int], Chunk], None] | None:
    """Return a function that records the log probabilities of generated tokens.

    Returns None if the request asks for no log probabilities. The function takes the tokens of a chunk, and the chunk
    itself. An answer may consist of several generations: call `logprob_recorder` once for each generation. All returned
    functions record into `report.facts.logprobs`.
    """
    log = logprob_log(request, report, encoding)
    if log is None:
        return None
    log.start_generation()
    return lambda tokens, chunk: log.add(tokens, chunk.logprobs)


def note_missing_logprobs(request: GenerationRequest, report: GenerationReport) -> None:
    """Add a note to the report if the backend sent none of the requested log probabilities."""
    log = report.facts.logprobs
    if log is not None and log.has_only_unknown:
        field = request.prompt.fields.logprobs
        report.notes.append(f"{field}: no effect, because the backend sent no log probabilities")


def prompt_recorder(job: CompletionJob, report: GenerationReport) -> Callable[[Chunk], None]:
    """Return a function that records the prompt's log probabilities.

    Call the function with every chunk of the job. If the job requests no log probabilities of the prompt, the function
    does nothing. Otherwise it raises BackendProtocolError if the first chunk with content lacks a log probability for
    any token of the prompt.
    """
    log = report.facts.logprobs
    if log is None or not job.prompt_logprobs:
        return _ignore_chunk

    def record(chunk: Chunk) -> None:
        if log.prompt or not (chunk.tokens or chunk.finish or chunk.prompt_logprobs):
            return
        if len(chunk.prompt_logprobs) != len(job.prompt.tokens):
            raise BackendProtocolError("the backend did not send a log probability for each token of the prompt")
        log.prompt = list(zip(job.prompt.tokens, chunk.prompt_logprobs, strict=True))

    return record


def _ignore_chunk(chunk: Chunk) -> None:
    """Do nothing with the chunk."""
