"""Logs: one line per record, no injected lines, no secrets."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from unisono.observe.logs import MAX_VALUE_LENGTH, start_logging

SECRETS = ["sk-master-1", "sk-master-12345", 'quoted"secret', "schlüssel-ß", "ab"]


@pytest.fixture
def lines() -> Iterator[Any]:
    stream = io.StringIO()
    undo = start_logging("debug", SECRETS, stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().split("\n") if line]
    undo()


HOSTILE = {
    "injected line": 'x\n{"level": "info", "message": "all is well"}',
    "carriage return": "x\rroot logged in",
    "terminal colours": "x\x1b[2J\x1b[31m",
    "line separators": "x\u2028y\u0085z",
    "right to left": "x\u202egnp.exe",
    "NUL": "x\x00y",
    "lone surrogate": "x\udcffy",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_value_is_logged_as_one_line_of_printable_ascii(text: str) -> None:
    stream = io.StringIO()
    undo = start_logging("info", [], stream)
    logging.getLogger("t").warning("said %s", text, extra={"client": text})
    undo()
    line, rest = stream.getvalue().split("\n", 1)
    assert rest == ""
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["client"] == text


LEAKS = {
    "secret": "key sk-master-12345 used",
    "secret that is a prefix of another": "sk-master-1",
    "secret with characters that JSON escapes": 'failed: quoted"secret',
    "non-ASCII secret": "schlüssel-ß",
    "bearer key of a request": "Authorization: Bearer sk-proj-abc.def",
    "virtual key": "sk-uni-Zm9vYmFyYmF6cXV4-_Zm9vYmFy, says the store",
    "truncated virtual key": "path /v1/sk-uni-Zm9v",
    "virtual key in a repr": "{'key': 'sk-uni-Zm9vYmFyYmF6'}",
    "virtual key after another word": "x-api-key:sk-uni-Zm9vYmFyYmF6 at_sk-uni-Zm9v",
    "basic credentials": "authorization: basic dXNlcjpwYXNz",
    "password in a URL": "connect to redis://user:hunter22@cache:6379/0 failed",
}
PLANTED = ["Zm9v", "sk-master", "quoted", "schl", "sk-proj", "dXNlc", "hunter22"]


@pytest.mark.parametrize("text", LEAKS.values(), ids=LEAKS)
def test_secrets_are_redacted_in_messages_extras_and_tracebacks(text: str, lines: Any) -> None:
    try:
        raise RuntimeError(text)
    except RuntimeError:
        logging.getLogger("t").exception(text, extra={"detail": [text], "nested": {"a": text}})
    (line,) = lines()
    assert line["level"] == "error"
    written = json.dumps(line, ensure_ascii=False)
    assert not [planted for planted in PLANTED if planted in written]
    assert "[redacted]" in line["message"]


def test_a_line_has_time_level_logger_message_and_extras(lines: Any) -> None:
    logging.getLogger("unisono.routing").info("backend ready", extra={"backend": "vllm-1", "row": 2})
    (line,) = lines()
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "unisono.routing",
        "message": "backend ready",
        "backend": "vllm-1",
        "row": 2,
    }


def test_a_secret_at_the_truncation_is_redacted(lines: Any) -> None:
    logging.getLogger("t").info("%s%s", "x" * (MAX_VALUE_LENGTH - 5), "sk-master-12345")
    assert "sk-m" not in lines()[0]["message"]


def test_short_secrets_are_not_redacted_inside_words(lines: Any) -> None:
    logging.getLogger("t").info("a crab")
    assert lines()[0]["message"] == "a crab"


def test_long_values_are_truncated_and_tracebacks_keep_their_end(lines: Any) -> None:
    try:
        raise RuntimeError("y" * 3 * MAX_VALUE_LENGTH + "the end")
    except RuntimeError:
        logging.getLogger("t").exception("z" * 3 * MAX_VALUE_LENGTH)
    (line,) = lines()
    assert len(line["message"]) <= MAX_VALUE_LENGTH + 1
    assert line["error"].endswith("the end")


def test_server_info_messages_are_dropped_and_warnings_are_logged(lines: Any) -> None:
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    assert [line["message"] for line in lines()] == ["Invalid HTTP request received."]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_text_for_people_is_one_printable_line(text: str) -> None:
    stream = io.StringIO()
    undo = start_logging("info", SECRETS, stream, "text")
    logging.getLogger("t").warning("said %s", text, extra={"client": text, "used": "sk-master-12345"})
    undo()
    line, rest = stream.getvalue().split("\n", 1)
    assert rest == ""
    assert line.isprintable()
    assert "warning: said x" in line
    assert line.endswith(" used=[redacted]")


def test_a_traceback_follows_its_line() -> None:
    stream = io.StringIO()
    undo = start_logging("info", SECRETS, stream, "text")
    try:
        raise RuntimeError("sk-master-12345 \x1b[31m")
    except RuntimeError:
        logging.getLogger("t").exception("failed")
    undo()
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("error: failed")
    assert rest[0].startswith("Traceback")
    assert rest[-1] == r"RuntimeError: [redacted] \x1b[31m"
