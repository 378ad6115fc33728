"""Stray text after a regenerated message: the answer only in a step without answer and call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.engine.planning import ANY, FINAL, NOW, PARIS, WEATHER, S, T, ask, turn
from tests.engine.scripted import IDS, TEXT
from tests.harmony.recoveries import C, F, R
from unisono.core.generation import Capabilities
from unisono.engine.request import GenerationRequest

STRAY = T + "Stray words."
BROKEN = WEATHER + '{"city":<|call|>'
HM, NOW_CALLED, HELLO = R("Hm."), C("now", "{}"), F("Hello.")

CASES: dict[str, tuple[GenerationRequest, Sequence[str], Sequence[R | F | C]]] = {
    "after a call": (turn(), [f"{NOW}{{}}<|end|>{S}{BROKEN}", STRAY], (NOW_CALLED, HM)),
    "after an answer": (turn(), [f"{FINAL}Hello.<|end|>{S}{BROKEN}", STRAY], (HELLO, HM)),
    "after neither": (turn(), [BROKEN, STRAY], (HM, F("Stray words."))),
    "after a forced call": (
        turn(ANY),
        [STRAY, ".get_weather", f"{PARIS}<|end|>{S}{BROKEN}", STRAY],
        (HM, C("get_weather", PARIS), HM),
    ),
}


@pytest.mark.parametrize("capabilities", [IDS, TEXT], ids=["ids", "text"])
@pytest.mark.parametrize("per_chunk", [1, 1000])
@pytest.mark.parametrize(("generation_request", "outputs", "expected"), CASES.values(), ids=CASES)
async def test_stray_text_is_the_answer_only_without_call_or_answer(
    generation_request: GenerationRequest,
    outputs: Sequence[str],
    expected: Sequence[R | F | C],
    per_chunk: int,
    capabilities: Capabilities,
) -> None:
    outcome = await ask(outputs, generation_request, capabilities, per_chunk=per_chunk)
    assert outcome.items == tuple(expected)
    assert ("free-text-between" in outcome.rules) is (F("Stray words.") not in expected)
