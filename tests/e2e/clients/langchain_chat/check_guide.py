"""The program of the guide prints the output below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guide import run_program

if TYPE_CHECKING:
    from conftest import Stage


def test_the_program_of_the_guide_prints_the_output_below_it(stage: Stage) -> None:
    output, expected = run_program("LangChain", stage.demo)
    assert output == expected
