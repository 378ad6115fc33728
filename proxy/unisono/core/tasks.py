"""Cancellation of event loop tasks."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancel_and_wait(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended; the event loop logs their errors."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    if running:
        # Awaiting a cancelled task raises CancelledError, which would look like a cancellation of the caller.
        await asyncio.wait(running)


async def cancel_all(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, ignore their errors, and wait until they have ended."""
    running = []
    for task in tasks:
        if not task.done():
            task.cancel()
            running.append(task)
        elif not task.cancelled():
            # Retrieve the error, because the event loop logs errors that were never retrieved.
            task.exception()
    if running:
        await asyncio.gather(*running, return_exceptions=True)
