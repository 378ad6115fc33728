"""Watch which threads of this process run the code of a module."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Final

SAMPLE_INTERVAL_S: Final = 0.001


class ThreadWatch:
    """Sampler of this process's threads; `seen` are those that ran code of `module`.

    `on_sight` is called in the watching thread at each such sample.
    """

    def __init__(self, module: ModuleType, on_sight: Callable[[], None]) -> None:
        self.seen: set[int] = set()
        self._file = module.__file__
        self._on_sight = on_sight
        self._is_over = threading.Event()

    def run(self) -> None:
        own = threading.get_ident()
        while not self._is_over.is_set():
            frames = sys._current_frames()
            running = {ident for ident, frame in frames.items() if ident != own and self._runs(frame)}
            if running:
                self.seen |= running
                self._on_sight()
            time.sleep(SAMPLE_INTERVAL_S)

    def _runs(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_filename == self._file:
                return True
            frame = frame.f_back
        return False

    def end(self) -> None:
        self._is_over.set()


@contextmanager
def watching(module: ModuleType, on_sight: Callable[[], None] = lambda: None) -> Iterator[ThreadWatch]:
    watch = ThreadWatch(module, on_sight)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        yield watch
    finally:
        watch.end()
        thread.join()
