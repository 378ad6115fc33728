"""The example of the documentation does what it says."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conftest import Stage

DOCS = Path(__file__).parents[4] / "docs/messages.md"


def test_the_example_prints_what_stands_below_it(stage: Stage) -> None:
    example, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", DOCS.read_text(), re.DOTALL).groups()  # type: ignore[union-attr]
    program = example.replace("http://localhost:4000", stage.demo)
    assert program != example
    out, names = StringIO(), dict[str, Any]()
    with redirect_stdout(out):
        exec(compile(program, str(DOCS), "exec"), names)
    names["client"].close()
    assert out.getvalue() == printed
