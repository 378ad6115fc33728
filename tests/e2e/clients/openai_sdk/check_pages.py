"""What the documents let Python do is done, in front of the demo model: it prints what stands below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    # The project's own pytest reads this file too, and has no SDK.
    from conftest import Stage

ROOT = Path(__file__).parents[4]
PAGES = ("README.md", "docs/api.md")
PROGRAM = re.compile(r"^```python\n(.*?)^```\n+(?:^```\n(.*?)^```$)?", re.S | re.M)


@pytest.mark.parametrize("page", PAGES)
def test_programs_on_a_page_print_what_it_says(page: str, stage: Stage) -> None:
    programs = PROGRAM.findall((ROOT / page).read_text())
    assert programs
    names: dict[str, Any] = {}
    for program, printed in programs:
        assert program.replace("http://localhost:4000", stage.demo) != program or "client" in names
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(program.replace("http://localhost:4000", stage.demo), names)
        assert said.getvalue() == printed
    names["client"].close()
