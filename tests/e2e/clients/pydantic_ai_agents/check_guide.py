"""Test of the program in the Pydantic AI guide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guide import run_program

if TYPE_CHECKING:
    from conftest import Stage


def test_guide_program_prints_the_documented_output(stage: Stage) -> None:
    output, expected = run_program("Pydantic AI", stage.demo)
    assert output == expected
