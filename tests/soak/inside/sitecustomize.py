"""Report of what a process holds, written on SIGUSR2 by the interpreter that has this folder on its PYTHONPATH."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import tracemalloc
from collections import Counter
from pathlib import Path

TARGET = "SOAK_REPORT"
"""Environment variable: the path of the report."""
MAX_TYPES = 400


def write_report(*_: object) -> None:
    """Count tasks and objects; with tracemalloc on, write a snapshot next to the report."""
    path = Path(os.environ[TARGET])
    objects = gc.get_objects()
    # The cache itself is frozen and not listed; its entries are.
    entries = (each for each in objects if type(each).__qualname__ == "_Entry" and hasattr(each, "size"))
    cached = sum(each.size for each in entries)
    types = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in objects)
    loop = asyncio.get_running_loop()
    report = {
        "pid": os.getpid(),
        "tasks": len(asyncio.all_tasks(loop)),
        "objects": len(objects),
        "cached": cached,
        "types": dict(types.most_common(MAX_TYPES)),
    }
    del objects, entries
    if tracemalloc.is_tracing():
        tracemalloc.take_snapshot().dump(str(path.with_suffix(".snapshot")))
    # The reader must not see half a report.
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(report))
    draft.rename(path)


if TARGET in os.environ:
    signal.signal(signal.SIGUSR2, write_report)
