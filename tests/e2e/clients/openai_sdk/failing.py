"""Failures common to all API surfaces, and the SDK exceptions that they must raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openai
import pytest

TOO_MANY_WORDS = "one two three " * 200

Ask = Callable[[], object]


@dataclass(frozen=True)
class Failure:
    """A failing script or model, and the SDK exception that it causes."""

    script: str
    status: int
    code: str
    kind: type[openai.APIStatusError] = openai.InternalServerError
    model: str = "scripted"

    def asked(self, play: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Return the arguments that `play(script, **fields)` builds for this failure."""
        return play(self.script, model=self.model)


FAILING = {
    "connection refused": Failure("an answer", 503, "backend_unavailable", model="down"),
    "overloaded": Failure("busy", 503, "backend_overloaded"),
    "status 500": Failure("broken", 502, "backend_error"),
    "key rejected": Failure("locked", 503, "backend_unavailable"),
    "request rejected": Failure("rejected", 400, "backend_rejected_request", openai.BadRequestError),
    "context too long": Failure("too long", 400, "context_length_exceeded", openai.BadRequestError),
    "silent": Failure("silence later", 504, "backend_timeout", model="impatient"),
    "connection reset": Failure("a reset later", 502, "backend_protocol_error"),
}
BEFORE_THE_FIRST_WORD = ["connection refused", "overloaded", "status 500", "context too long"]

# script of a failure after the first tokens: error code
BREAKING = {
    "silence later": "backend_timeout",
    "a reset later": "backend_protocol_error",
    "garbage later": "backend_protocol_error",
}


def check_refusal(ask: Ask, param: str, code: str) -> None:
    """Check a bad request: the error names its field."""
    with pytest.raises(openai.BadRequestError) as raised:
        ask()
    error = raised.value
    assert (error.status_code, error.param, error.code) == (400, param, code)
    assert error.type == "invalid_request_error"
    assert isinstance(error.body, dict)
    assert error.body["message"]
    assert error.request_id is not None
    assert error.request_id.startswith("req_")


def check_failure(ask: Ask, failure: Failure) -> None:
    """Check a backend failure: class, status and code, and no detail of the backend."""
    with pytest.raises(openai.APIStatusError) as raised:
        ask()
    error = raised.value
    assert type(error) is failure.kind
    assert (error.status_code, error.code) == (failure.status, failure.code)
    assert "an inner secret" not in str(error)
    assert "127.0.0.1" not in str(error)
    assert ("retry-after" in error.response.headers) is (failure.status == 503)


def check_beginning(text: str) -> None:
    """Check the text before a failure: a non-empty prefix of the answer."""
    assert text
    assert (" word" * 20).startswith(text)
