"""Base class of streams that wrap another stream to observe, count or end it."""

from __future__ import annotations

from unisono.engine.turn import BatchStream, GenerationStream


class WrappedStream(BatchStream):
    """A stream that wraps the stream `run` and shares its report.

    `aclose` closes its own batches first, then `run`.
    """

    def __init__(self, run: GenerationStream) -> None:
        self.report = run.report
        self._run = run

    async def let_in(self) -> None:
        await self._run.let_in()

    async def aclose(self) -> None:
        await super().aclose()
        await self._run.aclose()
