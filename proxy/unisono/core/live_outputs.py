"""Tokens of answers in progress, so that clients can watch their answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Number of ended answers that can still be found.
MAX_ENDED: Final = 16


@dataclass(slots=True, eq=False)
class LiveOutput:
    """Journal of an answer, which grows until `is_ended`; `key` is the public id of its API key."""

    tenant: str
    key: str
    journal: Sequence[int]
    is_ended: bool = False


class LiveOutputs:
    """Answers in progress in this process, and the latest ended answers, by request id."""

    def __init__(self) -> None:
        self._outputs: dict[str, LiveOutput] = {}
        self._ended: deque[str] = deque()

    def add(self, id: str, output: LiveOutput) -> None:
        self._outputs[id] = output

    def end(self, id: str) -> None:
        """Mark an answer as ended; if more than `MAX_ENDED` have ended, forget the oldest."""
        if (output := self._outputs.get(id)) is None or output.is_ended:
            return
        output.is_ended = True
        self._ended.append(id)
        if len(self._ended) > MAX_ENDED:
            self._outputs.pop(self._ended.popleft(), None)

    def find(self, id: str, tenant: str, key: str) -> LiveOutput | None:
        """Return the answer with the request id `id` if it belongs to this tenant and key, or None."""
        output = self._outputs.get(id)
        return output if output is not None and (output.tenant, output.key) == (tenant, key) else None
