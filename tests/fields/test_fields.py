"""No field of the newest SDKs is silently ignored, with any of its values."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.docs.pages import ROOT
from tests.fields.cases import CASES, UNSEEN, WORD
from tests.fields.table import COMMAND, Measured, measured, page
from unisono.observe.metrics import NOTED_FIELDS

# The measurement sends 1,300 requests, which take a minute of two cores.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fields() -> list[Measured]:
    return asyncio.run(measured())


def test_every_value_has_an_effect_a_note_or_an_error(fields: list[Measured]) -> None:
    assert [(each.api, each.path, each.silent) for each in fields if each.silent] == []


def test_no_value_fails_the_gateway_and_every_note_is_in_the_header(fields: list[Measured]) -> None:
    assert [(each.api, each.path, each.outcomes) for each in fields if each.values_with("failed")] == []


def test_the_page_is_current(fields: list[Measured]) -> None:
    assert (ROOT / "docs/fields.md").read_text() == page(fields), COMMAND


def test_the_metric_names_every_noted_field(fields: list[Measured]) -> None:
    paths = {
        re.sub(r"\.\d+(?=\.|$)", "", outcome.detail.partition(":")[0])
        for each in fields
        for _, outcome in each.outcomes
        if outcome.kind == "noted"
    }
    assert sorted(path for path in paths - NOTED_FIELDS if WORD not in path) == []


def test_every_case_and_every_unseen_effect_is_needed(fields: list[Measured]) -> None:
    without_effect = [
        (each.api, each.path, value)
        for each in fields
        if not each.values_with("in effect")
        for value, outcome in each.outcomes
        if outcome.kind != "noted"
    ]
    for api, entries in UNSEEN.items():
        for entry in entries:
            assert any(api == of and entry.applies_to(path, value) for of, path, value in without_effect), entry
    for api, cases in CASES.items():
        for pattern, _ in cases:
            assert any(api == each.api and re.match(pattern, each.path) for each in fields), pattern
