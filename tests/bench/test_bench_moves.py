"""What is measured of moves is an answer as it was asked for; a prompt that does not extend the last one is told."""

from dataclasses import replace

import pytest

from bench import moves
from bench.moves import CASES, ROUTES, Ask, Case
from unisono.core.conversation import Phase
from unisono.core.events import Closed, Text


@pytest.mark.parametrize("how", CASES)
async def test_every_case_takes_as_many_generations_as_it_says(how: str) -> None:
    told = await moves.run(Ask(how, times=2))
    assert (told.faults, told.examples) == (0, [])
    assert told.generations == len(CASES[how].outputs)
    assert told.ms_per_answer > 0


@pytest.mark.parametrize("how", ROUTES)
async def test_every_route_is_timed(how: str) -> None:
    assert 0 < (await moves.run(Ask(how, times=1))).us_per_token < 1000


async def test_an_answer_that_is_not_had_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["named"]
    monkeypatch.setitem(CASES, "named", replace(case, outputs=(case.outputs[0], '{"town":1}<|call|>')))
    told = await moves.run(Ask("named", times=1))
    assert told.faults == 1


def test_a_prompt_that_extends_nothing_is_a_fault() -> None:
    closed = [Closed(Text(0, Phase.FINAL), moves.PLACE, (), True)]
    model = moves.Model([[1], [2]], guided=False, prompts=[[1, 2], [1, 2, 3]])
    case = Case(("a", "b"), form=moves.FORM)
    assert moves.wrong(case, model, closed, "") == ""
    model.prompts[1] = [1, 3, 2]
    assert "does not extend" in moves.wrong(case, model, closed, "")
