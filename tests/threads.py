"""Threads that a test can look at: which functions left the event loop, and what goes on while one of them runs."""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any


class Threads(ThreadPoolExecutor):
    """For `set_default_executor`: records the functions of `asyncio.to_thread` by their names, and what they return.
    Those in `held` wait until `release` is set."""

    def __init__(self, held: Collection[str] = ()) -> None:
        super().__init__(8)
        self.begun: list[str] = []
        self.returned: list[tuple[str, object]] = []
        self.release = threading.Event()
        self._held = held

    def submit(self, fn: Any, /, *args: Any, **more: Any) -> Future[Any]:
        # `to_thread` runs a function in a context: `partial(context.run, function, ...)`.
        function = fn.args[0] if isinstance(fn, partial) else fn
        return super().submit(self._run, getattr(function, "__qualname__", ""), fn, *args, **more)

    def _run(self, name: str, fn: Any, *args: Any, **more: Any) -> Any:
        self.begun.append(name)
        if name in self._held:
            self.release.wait(30)
        result = fn(*args, **more)
        self.returned.append((name, result))
        return result
