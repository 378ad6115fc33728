"""Benchmark of prompt edits: each answer meets its requirements, each prompt extends the previous one."""

from dataclasses import replace

import pytest

from bench import intervention_timing
from bench.intervention_timing import CASES, ROUTER_VARIANTS, InterventionCase, InterventionJob
from unisono.core.conversation import Phase
from unisono.core.events import Closed, Text


@pytest.mark.parametrize("variant", CASES)
async def test_every_case_takes_its_declared_number_of_generations(variant: str) -> None:
    result = await intervention_timing.run(InterventionJob(variant, times=2))
    assert (result.faults, result.examples) == (0, [])
    assert result.generations == len(CASES[variant].outputs)
    assert result.ms_per_answer > 0


@pytest.mark.parametrize("variant", ROUTER_VARIANTS)
async def test_every_route_is_timed(variant: str) -> None:
    assert 0 < (await intervention_timing.run(InterventionJob(variant, times=1))).us_per_token < 1000


async def test_a_missing_answer_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["named"]
    monkeypatch.setitem(CASES, "named", replace(case, outputs=(case.outputs[0], '{"town":1}<|call|>')))
    result = await intervention_timing.run(InterventionJob("named", times=1))
    assert result.faults == 1


def test_a_prompt_that_does_not_extend_the_last_one_is_a_fault() -> None:
    closed = [Closed(Text(0, Phase.FINAL), intervention_timing.CITY_ARGUMENTS, (), True)]
    backend = intervention_timing.ScriptedBackend([[1], [2]], guided=False, prompts=[[1, 2], [1, 2, 3]])
    case = InterventionCase(("a", "b"), form=intervention_timing.ANSWER_FORM)
    assert intervention_timing.find_fault(case, backend, closed, "") == ""
    backend.prompts[1] = [1, 3, 2]
    assert "does not extend" in intervention_timing.find_fault(case, backend, closed, "")
