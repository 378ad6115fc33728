"""State that outlives a request: one Protocol (`core.state_store.Store`), an embedded store and a shared one."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from unisono.core.state_store import Retention, StateLimits, Store
from unisono.errors import ConfigError


def open_store(
    url: str,
    retention: Retention | None = None,
    bounds: StateLimits | None = None,
    *,
    deadline_s: float = 0.25,
    replicas: int | None = None,
    or_memory: bool = False,
) -> Store:
    """The store an address names: `memory://`, `sqlite:///path` (a path that begins with `~` is the user's own), or
    whatever `RedisStore` takes. `or_memory` has memory replace a file that cannot be made or written, with a warning.
    Touches neither network nor disk; that is for its `start`. Raises `ConfigError`."""
    scheme, found, _ = url.partition("://")
    if not found:
        raise ConfigError("store.url: not an address; write sqlite:///path, memory:// or redis://host:6379/0")
    if scheme in ("memory", "sqlite"):
        from unisono.store.sqlite import SqliteStore

        if scheme == "memory":
            return SqliteStore(None, retention, bounds)
        return SqliteStore(sqlite_path(url), retention, bounds, or_memory=or_memory)
    from unisono.store.redis import RedisStore

    return RedisStore(url, retention, bounds, deadline_s, replicas)


def sqlite_path(url: str) -> Path | None:
    """The file that a SQLite address names; None for any other address. Raises `ConfigError`."""
    scheme, _, rest = url.partition("://")
    if scheme != "sqlite":
        return None
    # sqlite:///home/me/state.db is absolute, as after three slashes everywhere; ~ stands for a home.
    path = unquote(rest)
    if not path.startswith("/") or path == "/":
        raise ConfigError("store.url: sqlite needs a path: sqlite:///var/lib/unisono/state.db")
    return Path(path.removeprefix("/") if path.startswith("/~") else path)
