"""The step plan on backends that strip every marker from their text: what stands in the prompt is known all the same,
and what is put there has its markers."""

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
    behind: Sequence[str]
    """What each further prompt has behind the first one's."""
    unmet: str = ""


CASES: dict[str, Case] = {
    "a tool is named, and the model answers": Case(
        turn(NAMED), [ANSWERED, PARIS], (HM, C("get_weather", PARIS)), [T + S + WEATHER]
    ),
    "a tool is named, and its call is broken": Case(
        turn(NAMED), [ANSWERED, '{"town":1}', PARIS], (HM, C("get_weather", PARIS)), [T + S + WEATHER] * 2
    ),
    "some tool is called": Case(
        turn(ANY), [ANSWERED, ".add", '{"a":1}'], (HM, C("add", '{"a":1}')), [T + S + NAMING, T + S + ADD]
    ),
    "an answer of a form": Case(
        turn(form=CITY_FORM, conversation=WITHOUT_TOOLS), ["analysisHm.assistantfinal" + PARIS], (HM, F(PARIS)), []
    ),
    "an answer of a form, generated again": Case(
        turn(form=CITY_FORM, conversation=WITHOUT_TOOLS), [ANSWERED, PARIS], (HM, F(PARIS)), [T + S + FINAL]
    ),
    "an answer of a form, never had": Case(
        turn(form=CITY_FORM, conversation=WITHOUT_TOOLS),
        [ANSWERED, "It rains.", "It rains."],
        (HM, F("It rains.")),
        [T + S + FINAL] * 2,
        UNMET_FORM,
    ),
    "no thoughts": Case(
        turn(reasoning_budget=0, conversation=WITHOUT_TOOLS), [ANSWERED, "It rains."], (F("It rains."),), [FINAL]
    ),
}


@pytest.mark.parametrize("per_chunk", [1, 7, 1000])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_what_is_asked_for_is_had_without_any_marker_from_the_backend(case: Case, per_chunk: int) -> None:
    asked = await ask(case.outputs, case.turn, MARKERLESS, per_chunk=per_chunk)
    assert asked.items == tuple(case.items)
    assert asked.behind[1:] == list(case.behind)
    assert asked.report.unmet == case.unmet
