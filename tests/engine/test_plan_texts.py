"""Interventions on markerless backends: prompts have markers, although the output has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from tests.engine.planning import (
    ADD,
    ANY,
    CITY_FORM,
    FINAL,
    NAMED,
    NAMING,
    PARIS,
    WEATHER,
    WITHOUT_TOOLS,
    S,
    T,
    ask,
    turn,
)
from tests.engine.scripted import TEXT
from tests.harmony.recoveries import C, F, P, R
from unisono.core.generation import OutputForm
from unisono.engine.interventions.requirements import UNMET_FORM
from unisono.engine.request import GenerationRequest

MARKERLESS = replace(TEXT, output=OutputForm.MARKERLESS)
ANSWERED = "analysisHm.assistantfinalIt rains."
HM = R("Hm.")


@dataclass(frozen=True)
class Case:
    turn: GenerationRequest
    outputs: Sequence[str]
    items: Sequence[R | P | F | C]
    suffixes: Sequence[str]  # text that each further prompt adds to the first one
    unmet: str = ""


CASES: dict[str, Case] = {
    "named tool, answer": Case(turn(NAMED), [ANSWERED, PARIS], (HM, C("get_weather", PARIS)), [T + S + WEATHER]),
    "named tool, invalid call": Case(
        turn(NAMED), [ANSWERED, '{"town":1}', PARIS], (HM, C("get_weather", PARIS)), [T + S + WEATHER] * 2
    ),
    "any tool": Case(
        turn(ANY), [ANSWERED, ".add", '{"a":1}'], (HM, C("add", '{"a":1}')), [T + S + NAMING, T + S + ADD]
    ),
    "answer in the form": Case(
        turn(form=CITY_FORM, conversation=WITHOUT_TOOLS), ["analysisHm.assistantfinal" + PARIS], (HM, F(PARIS)), []
    ),
    "answer not in the form, regenerated": Case(
        turn(form=CITY_FORM, conversation=WITHOUT_TOOLS), [ANSWERED, PARIS], (HM, F(PARIS)), [T + S + FINAL]
    ),
    "answer not in the form after all retries": Case(
        turn(form=CITY_FORM, conversation=WITHOUT_TOOLS),
        [ANSWERED, "It rains.", "It rains."],
        (HM, F("It rains.")),
        [T + S + FINAL] * 2,
        UNMET_FORM,
    ),
    "reasoning budget of zero": Case(
        turn(reasoning_budget=0, conversation=WITHOUT_TOOLS), [ANSWERED, "It rains."], (F("It rains."),), [FINAL]
    ),
}


@pytest.mark.parametrize("per_chunk", [1, 7, 1000])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_requirements_are_met_on_a_markerless_backend(case: Case, per_chunk: int) -> None:
    outcome = await ask(case.outputs, case.turn, MARKERLESS, per_chunk=per_chunk)
    assert outcome.items == tuple(case.items)
    assert outcome.suffixes[1:] == list(case.suffixes)
    assert outcome.report.unmet == case.unmet
