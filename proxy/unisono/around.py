"""What the runs have in common that stand around another one, to watch it, to count it or to end it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator

from unisono.core.events import Event
from unisono.engine.turn import Run


class Around(Run):
    """Closes its own batches first and the run `run` behind them; the report is that run's."""

    def __init__(self, run: Run) -> None:
        self.report = run.report
        self._run = run
        self._batches: AsyncGenerator[list[Event]] | None = None

    def __aiter__(self) -> AsyncIterator[list[Event]]:
        self._batches = self._each()
        return self._batches

    async def let_in(self) -> None:
        await self._run.let_in()

    async def aclose(self) -> None:
        if self._batches is not None:
            await self._batches.aclose()
        await self._run.aclose()

    @abstractmethod
    def _each(self) -> AsyncGenerator[list[Event]]:
        """The batches."""
