"""Thread pool for tests that records the functions it runs and can hold some of them."""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any


class Threads(ThreadPoolExecutor):
    """Executor for `set_default_executor` that records the names and results of `asyncio.to_thread` functions.

    Functions in `held` wait until `release` is set.
    """

    def __init__(self, held: Collection[str] = ()) -> None:
        super().__init__(8)
        self.begun: list[str] = []
        self.returned: list[tuple[str, object]] = []
        self.release = threading.Event()
        self._held = held

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        # `to_thread` runs a function in a context: `partial(context.run, function, ...)`.
        function = fn.args[0] if isinstance(fn, partial) else fn
        return super().submit(self._run, getattr(function, "__qualname__", ""), fn, *args, **kwargs)

    def _run(self, name: str, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self.begun.append(name)
        if name in self._held:
            self.release.wait(30)
        result = fn(*args, **kwargs)
        self.returned.append((name, result))
        return result
