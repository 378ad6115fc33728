"""Tokens of answers in progress, so that their client can watch them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Ended answers that are still found.
MAX_ENDED: Final = 16


@dataclass(slots=True, eq=False)
class LiveOutput:
    """Journal of an answer, which grows until `is_ended`."""

    tenant: str
    key: str
    journal: Sequence[int]
    is_ended: bool = False


class LiveOutputs:
    """Answers of this process by request id: those in progress, and the latest ended ones."""

    def __init__(self) -> None:
        self._outputs: dict[str, LiveOutput] = {}
        self._ended: deque[str] = deque()

    def add(self, id: str, output: LiveOutput) -> None:
        self._outputs[id] = output

    def end(self, id: str) -> None:
        """Mark an answer as ended, and forget the oldest one that has ended."""
        if (output := self._outputs.get(id)) is None or output.is_ended:
            return
        output.is_ended = True
        self._ended.append(id)
        if len(self._ended) > MAX_ENDED:
            self._outputs.pop(self._ended.popleft(), None)

    def find(self, id: str, tenant: str, key: str) -> LiveOutput | None:
        """Return an answer of this key, or None."""
        output = self._outputs.get(id)
        return output if output is not None and (output.tenant, output.key) == (tenant, key) else None
