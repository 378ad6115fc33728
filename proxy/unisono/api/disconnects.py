"""Cancellation of work whose client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from unisono.api.error_responses import ClientGone
from unisono.core.tasks import cancel_all

T = TypeVar("T")

# Key in the request's state for a function that the server provides. The function calls its argument when the client
# disconnects. It returns a function that prevents this call, or None if only `receive` can report the disconnect.
WATCH_DISCONNECT = "watch_disconnect"
WatchDisconnect = Callable[[Callable[[], None]], Callable[[], None] | None]


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects. The request's body must have been read already."""
    while (await receive())["type"] != "http.disconnect":
        pass


class DisconnectWatch:
    """Watch that calls `notify` when the client of a request disconnects.

    `notify` may still be called soon after `stop`. The request's body must be read before the watch begins.
    """

    def __init__(self, request: Request, notify: Callable[[], None]) -> None:
        watch: WatchDisconnect | None = request.scope.get("state", {}).get(WATCH_DISCONNECT)
        self._unwatch = None if watch is None else watch(notify)
        self._reading: asyncio.Task[None] | None = None
        if self._unwatch is None:
            self._reading = asyncio.create_task(disconnected(request.receive))
            self._reading.add_done_callback(lambda _: notify())

    def stop(self) -> Sequence[asyncio.Task[None]]:
        """End the watch. Return the tasks that the caller must cancel, if any."""
        if self._unwatch is not None:
            self._unwatch()
        return () if self._reading is None else (self._reading,)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` and return its result.

    If the client disconnects first, cancels `work` and raises ClientGone.
    """
    # `work` runs in its own task. In the request's task, each wake-up would also resume the coroutines of the ASGI
    # layers.
    working = asyncio.get_running_loop().create_task(work)
    is_gone = False

    def leave() -> None:
        nonlocal is_gone
        # A complete result is returned even if the client disconnected at the same moment.
        is_gone = working.cancel() or is_gone

    watch = DisconnectWatch(request, leave)
    try:
        return await working
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        # If the calling task was cancelled too, its cancellation takes precedence.
        if is_gone and not (task is not None and task.cancelling()):
            raise ClientGone from error
        raise
    finally:
        await cancel_all(working, *watch.stop())
