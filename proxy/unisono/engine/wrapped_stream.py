"""What the runs have in common that stand around another one, to watch it, to count it or to end it."""

from __future__ import annotations

from unisono.engine.turn import BatchStream, GenerationStream


class WrappedStream(BatchStream):
    """Closes its own batches first and the run `run` behind them; the report is that run's."""

    def __init__(self, run: GenerationStream) -> None:
        self.report = run.report
        self._run = run

    async def let_in(self) -> None:
        await self._run.let_in()

    async def aclose(self) -> None:
        await super().aclose()
        await self._run.aclose()
