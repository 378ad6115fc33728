"""Error codes of generations and of their requests, for logs and records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from unisono.core.observer import GenerationDone, GenerationOutcome
from unisono.errors import InternalError, UnisonoError


def outcome_of(error: BaseException | None, *, has_finished: bool) -> tuple[GenerationOutcome, str]:
    """Return the outcome of a generation, and the code of the error that ended it."""
    match error:
        case None:
            return GenerationOutcome.COMPLETED, ""
        case UnisonoError():
            return GenerationOutcome.FAILED, error.code
        case asyncio.CancelledError() | GeneratorExit():
            # A consumer may stop iterating after the last event. This is not a cancellation.
            return (GenerationOutcome.COMPLETED if has_finished else GenerationOutcome.LEFT), ""
        case _:
            return GenerationOutcome.FAILED, InternalError.code


def error_of_request(code: str, generations: Iterable[GenerationDone]) -> str:
    """Return the error code of a request: `code`, or the code of the first failed generation."""
    # `code` is the code in an error body. A stream that fails later has no error body, so its generation has the code.
    return code or next((done.error for done in generations if done.error), "")
