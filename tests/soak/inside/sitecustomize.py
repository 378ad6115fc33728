"""Report of the memory and tasks of a process, written on SIGUSR2.

A process loads this module if the folder is on its PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import re
import signal
import sys
import tempfile
import tracemalloc
from collections import Counter, OrderedDict
from pathlib import Path
from sys import getsizeof
from typing import Any
from weakref import WeakSet

# Environment variable: the path of the report.
TARGET = "SOAK_REPORT"
# Environment variable: capacity of each cache as a share of its usual one.
CACHE_SHARE = "SOAK_CACHE_SHARE"
MAX_TYPES = 400
# Memory of an entry in an OrderedDict beyond its key and value: the linked node and its share of two tables.
NODE_BYTES = 88

# The caches of the process. Each has a bound, and is not yet full after the warm-up.
caches: WeakSet[Any] = WeakSet()


def register_instances(kind: type, capacity: str, share: float) -> None:
    """Register each new instance of `kind` in `caches`, and scale the attribute `capacity`."""
    original = kind.__init__

    def registering(self: object, *args: object, **options: object) -> None:
        original(self, *args, **options)  # type: ignore[misc]
        setattr(self, capacity, int(getattr(self, capacity) * share))
        caches.add(self)

    kind.__init__ = registering  # type: ignore[misc]


def memory_of(cache: object) -> int:
    """Return the bytes of the entries of a cache."""
    tables = [table for table in vars(cache).values() if isinstance(table, OrderedDict)]
    return sum(_entry_bytes(key, value) for table in tables for key, value in list(table.items()))


def _entry_bytes(key: object, value: Any) -> int:
    # An entry of the conversation cache states its own size.
    size = getattr(value, "size", None)
    return size if size is not None else NODE_BYTES + _bytes_of(key) + _bytes_of(value)


def _bytes_of(value: object) -> int:
    parts = value if isinstance(value, tuple) else ()
    # All entries share the objects of token ids, so only the references count.
    return getsizeof(value) + sum(_bytes_of(part) for part in parts if not isinstance(parts[0], int))


class Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`, see mallinfo(3)."""

    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in names)


def malloc_bytes() -> int:
    """Return the bytes that malloc has allocated, without its free memory."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


def small_object_bytes() -> int:
    """Return the bytes in use by Python's allocator of small objects.

    Its arenas do not come from malloc.
    """
    stderr_copy = os.dup(2)
    with tempfile.TemporaryFile() as file:
        # Python prints these figures on stderr and nowhere else.
        os.dup2(file.fileno(), 2)
        try:
            sys._debugmallocstats()
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)
        file.seek(0)
        text = file.read().decode()
    found = re.search(r"bytes in allocated blocks\s*=\s*([\d,]+)", text)
    return int(found[1].replace(",", "")) if found else 0


def write_report(*_: object) -> None:
    """Count bytes, tasks and objects; with tracemalloc on, write a snapshot next to the report."""
    path = Path(os.environ[TARGET])
    gc.collect()
    allocated = malloc_bytes() + small_object_bytes()
    objects = gc.get_objects()
    types = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in objects)
    loop = asyncio.get_running_loop()
    cached: Counter[str] = Counter()
    for cache in caches:
        cached[type(cache).__name__] += memory_of(cache)
    report = {
        "pid": os.getpid(),
        "allocated": allocated,
        "tasks": len(asyncio.all_tasks(loop)),
        "objects": len(objects),
        "cached": cached,
        "types": dict(types.most_common(MAX_TYPES)),
    }
    del objects
    if tracemalloc.is_tracing():
        tracemalloc.take_snapshot().dump(str(path.with_suffix(".snapshot")))
    # The reader must not see half a report.
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(report))
    draft.rename(path)


if TARGET in os.environ:
    from unisono.core.lru_cache import LruCache
    from unisono.engine.conversation_cache import ConversationCache

    cache_share = float(os.environ.get(CACHE_SHARE, "1"))
    register_instances(ConversationCache, "_max_bytes", cache_share)
    register_instances(LruCache, "_capacity", cache_share)
    signal.signal(signal.SIGUSR2, write_report)
