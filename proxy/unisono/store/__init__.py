"""State that outlives a request: implementations of `core.state_store.Store`.

SQLite is the embedded store, Redis the shared one.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from unisono.config.addresses import SUPPORTED_STORES
from unisono.core.state_store import Retention, Store
from unisono.errors import ConfigError
from unisono.store.codec import StateLimits

# URL schemes that `store.url` accepts.
_REDIS = [
    f"{name}{tls}{way}" for name in ("redis", "valkey") for tls in ("", "s") for way in ("", "+sentinel", "+cluster")
]
SCHEMES = frozenset(("sqlite", "memory", "unix", *_REDIS))


def open_store(
    url: str,
    retention: Retention | None = None,
    bounds: StateLimits | None = None,
    *,
    deadline_s: float = 0.25,
    replicas: int | None = None,
    or_memory: bool = False,
) -> Store:
    """Create the store for an address. `Store.start` opens it; this function does no I/O.

    Accepts `memory://`, `sqlite:///path` (a leading `~` is the user's home directory), or any address of `RedisStore`.
    If `or_memory` is True and the SQLite file cannot be created or written, the store logs a warning and uses memory
    instead. `deadline_s` and `replicas` apply to `RedisStore` only. Raises `ConfigError` for an unsupported or
    malformed address.
    """
    scheme, found, _ = url.partition("://")
    if not found:
        raise ConfigError(f"store.url: not a store address; use one of {SUPPORTED_STORES}")
    if scheme not in SCHEMES:
        raise ConfigError(f"store.url: `{scheme[:32]}` is not a supported URL scheme; use one of {SUPPORTED_STORES}")
    if scheme in ("memory", "sqlite"):
        from unisono.store.sqlite import SqliteStore

        if scheme == "memory":
            return SqliteStore(None, retention, bounds)
        return SqliteStore(sqlite_path(url), retention, bounds, or_memory=or_memory)
    from unisono.store.redis import RedisStore

    return RedisStore(url, retention, bounds, deadline_s, replicas)


def sqlite_path(url: str) -> Path | None:
    """Return the file of a SQLite address, or None for any other address.

    Raises `ConfigError` for a path that is not absolute.
    """
    scheme, _, rest = url.partition("://")
    if scheme != "sqlite":
        return None
    # Three slashes begin an absolute path: sqlite:///home/me/state.db. In sqlite:///~/state.db, ~ is the home
    # directory.
    path = unquote(rest)
    if not path.startswith("/") or path == "/":
        raise ConfigError(
            "store.url: the URL of a SQLite file must contain an absolute path, as in sqlite:///var/lib/unisono/state.db"
        )
    # For SQLite, `:memory:` is a database in memory, and `file:` begins a URI. Here, both would create ordinary files.
    if path.startswith(("/:memory:", "/file:")):
        raise ConfigError("store.url: the path does not name a file; for a store in memory, use memory://")
    return Path(path.removeprefix("/") if path.startswith("/~") else path)
