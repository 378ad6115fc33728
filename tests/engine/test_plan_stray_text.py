"""Stray text behind a message that was generated again: an answer only where the step has none, and no call."""

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
    "behind a call": (turn(), [f"{NOW}{{}}<|end|>{S}{BROKEN}", STRAY], (NOW_CALLED, HM)),
    "behind an answer": (turn(), [f"{FINAL}Hello.<|end|>{S}{BROKEN}", STRAY], (HELLO, HM)),
    "behind neither": (turn(), [BROKEN, STRAY], (HM, F("Stray words."))),
    "behind a call that was forced": (
        turn(ANY),
        [STRAY, ".get_weather", f"{PARIS}<|end|>{S}{BROKEN}", STRAY],
        (HM, C("get_weather", PARIS), HM),
    ),
}


@pytest.mark.parametrize("told", [IDS, TEXT], ids=["ids", "text"])
@pytest.mark.parametrize("per_chunk", [1, 1000])
@pytest.mark.parametrize(("asked_turn", "outputs", "expected"), CASES.values(), ids=CASES)
async def test_stray_text_is_the_answer_only_where_nothing_else_is(
    asked_turn: GenerationRequest,
    outputs: Sequence[str],
    expected: Sequence[R | F | C],
    per_chunk: int,
    told: Capabilities,
) -> None:
    asked = await ask(outputs, asked_turn, told, per_chunk=per_chunk)
    assert asked.items == tuple(expected)
    assert ("free-text-between" in asked.rules) is (F("Stray words.") not in expected)
