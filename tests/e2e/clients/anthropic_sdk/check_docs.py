"""Example program in the documentation of the Messages API."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conftest import Stage

PAGE = Path(__file__).parents[4] / "docs/messages.md"


def test_the_example_prints_the_documented_output(stage: Stage) -> None:
    example, expected = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE.read_text(), re.DOTALL).groups()  # type: ignore[union-attr]
    program = example.replace("http://localhost:4000", stage.demo)
    assert program != example
    output, namespace = StringIO(), dict[str, Any]()
    with redirect_stdout(output):
        exec(compile(program, str(PAGE), "exec"), namespace)
    namespace["client"].close()
    assert output.getvalue() == expected
