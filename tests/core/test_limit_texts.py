"""Messages about expired time limits: their values and settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.core.error_texts import incomplete, no_first_token, seconds, silent
from unisono.core.generation import Timeouts

CONFIGURATION = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()

DURATIONS = {0.0: "0 s", 0.25: "0.25 s", 12.3456: "12.3 s", 99.97: "100 s", 599.9968: "600 s", 3600.0: "3600 s"}
TEXTS: dict[str, tuple[Callable[[Timeouts], str], Timeouts, str, list[str]]] = {
    "first token": (
        lambda limits: no_first_token("it", limits),
        Timeouts(first_token_s=30.0),
        "no first token within 30 s",
        ["first_token_timeout_s", "min_first_token_timeout_s"],
    ),
    "first token, little time left": (
        lambda limits: no_first_token("it", limits),
        Timeouts(first_token_s=20.0, total_s=20.0),
        "20 s were left",
        ["timeout"],
    ),
    "silence": (
        lambda limits: silent("it", limits),
        Timeouts(silence_s=10.0),
        "nothing for 10 s",
        ["stream_timeout", "min_silence_timeout_s"],
    ),
    "total": (incomplete, Timeouts(total_s=412.34), "412 s were left", ["timeout"]),
}


@pytest.mark.parametrize(("value", "text"), DURATIONS.items())
def test_durations_have_no_exponent(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(("text_of", "limits", "expected", "settings"), TEXTS.values(), ids=TEXTS)
def test_a_message_names_its_limit_and_settings_that_raise_it(
    text_of: Callable[[Timeouts], str], limits: Timeouts, expected: str, settings: list[str]
) -> None:
    text = text_of(limits)
    assert expected in text
    assert re.findall(r"`(\w+)`", text) == settings
    assert all(f"| `{setting}` |" in CONFIGURATION for setting in settings)
