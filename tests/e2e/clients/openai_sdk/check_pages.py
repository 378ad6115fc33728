"""Python programs of the pages, run against the demo model."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    # The project's own pytest also imports this file, without the SDK.
    from conftest import Stage

ROOT = Path(__file__).parents[4]
PAGES = ("README.md", pytest.param("docs/guides/conversations.md", marks=pytest.mark.slow), "docs/api.md")
PROGRAM = re.compile(r"^```python\n(.*?)^```\n+(?:^```\n(.*?)^```$)?", re.S | re.M)


@pytest.mark.parametrize("page", PAGES)
def test_programs_on_a_page_print_the_output_below_them(page: str, stage: Stage) -> None:
    programs = PROGRAM.findall((ROOT / page).read_text())
    assert programs
    namespace: dict[str, Any] = {}
    for program, expected in programs:
        assert program.replace("http://localhost:4000", stage.demo) != program or "client" in namespace
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(program.replace("http://localhost:4000", stage.demo), namespace)
        assert output.getvalue() == expected
    namespace["client"].close()
