"""Results of built-in tools that the client runs, as text for the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson


def output_texts(output: Any) -> Iterator[str]:
    """Yield the texts of a result: one for each command of `shell`, and one for any other tool."""
    yield from map(_text, output if isinstance(output, list) else [output])


def _text(part: Any) -> str:
    match part:
        case None:
            return ""
        case str():
            return part
        case {"stdout": stdout, "stderr": stderr}:
            return "\n".join(str(text) for text in (stdout, stderr, _ending(part.get("outcome"))) if text)
        case _:
            return orjson.dumps(part).decode()


def _ending(outcome: Any) -> str:
    """Return how a command ended. Success needs no words."""
    match outcome:
        case {"type": "exit", "exit_code": int(code)} if code:
            return f"exit code {code}"
        case {"type": "timeout"}:
            return "The command exceeded its time limit."
        case _:
            return ""
