"""Tasks of the event loop that end before what started them."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancel_and_wait(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended, whatever they end with."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    if running:
        # To await a task itself would mix its cancellation up with one of the caller.
        await asyncio.wait(running)
