"""Benchmark of prompt edits: each answer meets its requirements, each prompt extends the previous one."""

from dataclasses import replace

import pytest

from bench import moves
from bench.moves import CASES, ROUTES, Ask, Case
from unisono.core.conversation import Phase
from unisono.core.events import Closed, Text


@pytest.mark.parametrize("how", CASES)
async def test_every_case_takes_its_declared_number_of_generations(how: str) -> None:
    result = await moves.run(Ask(how, times=2))
    assert (result.faults, result.examples) == (0, [])
    assert result.generations == len(CASES[how].outputs)
    assert result.ms_per_answer > 0


@pytest.mark.parametrize("how", ROUTES)
async def test_every_route_is_timed(how: str) -> None:
    assert 0 < (await moves.run(Ask(how, times=1))).us_per_token < 1000


async def test_a_missing_answer_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["named"]
    monkeypatch.setitem(CASES, "named", replace(case, outputs=(case.outputs[0], '{"town":1}<|call|>')))
    result = await moves.run(Ask("named", times=1))
    assert result.faults == 1


def test_a_prompt_that_does_not_extend_the_last_one_is_a_fault() -> None:
    closed = [Closed(Text(0, Phase.FINAL), moves.PLACE, (), True)]
    model = moves.Model([[1], [2]], guided=False, prompts=[[1, 2], [1, 2, 3]])
    case = Case(("a", "b"), form=moves.FORM)
    assert moves.wrong(case, model, closed, "") == ""
    model.prompts[1] = [1, 3, 2]
    assert "does not extend" in moves.wrong(case, model, closed, "")
