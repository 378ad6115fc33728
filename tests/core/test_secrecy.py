"""Redaction of secrets: only values of plausible length and entropy are removed from logs."""

from __future__ import annotations

import io
import json
import logging

import pytest

from unisono.core.secrecy import is_plausible_secret
from unisono.observe.logs import start_logging
from unisono.observe.redaction import REDACTED
from unisono_adapters._failures import FailureTable

WORDS = ["none", "None", "EMPTY", "dummy", "null", "test", "token-abc", "lm-studio", "not-needed", "sk-no-key-required"]
NUMBERS = ["1234", "000000000000", "65536", "1700000000"]
SECRETS = [
    "sk-1234",
    "hunter2!",
    "s3cret",
    "correct-horse-battery-staple",
    "QwErTyUiOpAs",
    "123456789012",
    "schl\u00fcssel",
]


@pytest.mark.parametrize("value", [*WORDS, *NUMBERS, "", "aaaaaaaaaaaa"])
def test_words_and_numbers_stay_in_logs(value: str) -> None:
    assert not is_plausible_secret(value)
    assert logged(value, f"other than {value}") == f"other than {value}"


@pytest.mark.parametrize("value", SECRETS)
def test_secrets_are_redacted(value: str) -> None:
    assert logged(value, f"other than {value}") == f"other than {REDACTED}"


def logged(secret: str, message: str) -> str:
    stream = io.StringIO()
    undo = start_logging("info", [secret], stream)
    record = logging.LogRecord("t", logging.INFO, "", 0, message, None, None)
    line = logging.getLogger().handlers[0].format(record)
    undo()
    return str(json.loads(line)["message"])


def test_an_error_of_a_backend_keeps_ordinary_words() -> None:
    body = {"error": {"message": "none of the models is loaded; hunter2! is the key"}}
    for key, expected in {"none": "none of the models", "hunter2!": "[key] is the key"}.items():
        assert expected in str(FailureTable(None, [key]).refusal(400, body, {}).args)
