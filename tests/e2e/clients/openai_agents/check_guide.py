"""Agents SDK program of the guide to clients and frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guide import run_program

if TYPE_CHECKING:
    from conftest import Stage


def test_the_guide_program_prints_the_documented_output(stage: Stage) -> None:
    output, expected = run_program("OpenAI Agents SDK", stage.demo)
    assert output == expected
