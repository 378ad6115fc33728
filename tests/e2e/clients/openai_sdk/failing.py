"""What is refused and what fails, the same for every surface, and how the SDK has to raise it."""

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
    """A script or a model at which a request fails, and what the SDK raises for it."""

    script: str
    status: int
    code: str
    kind: type[openai.APIStatusError] = openai.InternalServerError
    model: str = "scripted"

    def asked(self, play: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """The arguments `play` makes for it: `play(script, **fields)`."""
        return play(self.script, model=self.model)


FAILING = {
    "nobody is there": Failure("an answer", 503, "backend_unavailable", model="down"),
    "it is busy": Failure("busy", 503, "backend_overloaded"),
    "it is broken": Failure("broken", 502, "backend_error"),
    "it refuses our key": Failure("locked", 503, "backend_unavailable"),
    "it rejects the request": Failure("rejected", 400, "backend_rejected_request", openai.BadRequestError),
    "it has less context": Failure("too long", 400, "context_length_exceeded", openai.BadRequestError),
    "it says nothing": Failure("silence later", 504, "backend_timeout", model="impatient"),
    "its answer breaks off": Failure("a reset later", 502, "backend_protocol_error"),
}
BEFORE_THE_FIRST_WORD = ["nobody is there", "it is busy", "it is broken", "it has less context"]

# what happens behind the first words: code
BREAKING = {
    "silence later": "backend_timeout",
    "a reset later": "backend_protocol_error",
    "garbage later": "backend_protocol_error",
}


def check_refusal(ask: Ask, param: str, code: str) -> None:
    """A bad request names its field."""
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
    """A backend's failure has its class, status and code, and tells nothing about the backend."""
    with pytest.raises(openai.APIStatusError) as raised:
        ask()
    error = raised.value
    assert type(error) is failure.kind
    assert (error.status_code, error.code) == (failure.status, failure.code)
    assert "an inner secret" not in str(error)
    assert "127.0.0.1" not in str(error)
    assert ("retry-after" in error.response.headers) is (failure.status == 503)


def check_beginning(said: str) -> None:
    """What was said before an answer broke is some of its words, and nothing else."""
    assert said
    assert (" word" * 20).startswith(said)
