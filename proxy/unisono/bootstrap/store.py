"""Construction of the store, the usage ledger and the usage spool."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from unisono.access.usage_ledger import UsageLedger
from unisono.access.usage_spool import UsageSpool
from unisono.config import StoreSettings, data_folder
from unisono.core.quotas import QuotaObserver
from unisono.core.state_store import Retention, Store
from unisono.errors import ConfigError
from unisono.store import open_store, sqlite_path
from unisono.store.health_monitor import Upkeep


def build_store(settings: StoreSettings, share: int = 1) -> Store:
    """Open the configured store, or by default a SQLite file in the user's data folder.

    The store is not started yet. If the default file cannot be written and there is only one process, state is held in
    memory. `share` is the number of processes. Raises ConfigError if the address is invalid, or if several processes
    would hold state in memory.
    """
    if share > 1 and store_address(settings).startswith("memory:"):
        raise ConfigError(
            f"store.url: {share} workers cannot share state in memory; use a redis:// address, or remove `url` to use "
            "a SQLite file"
        )
    return open_store(
        store_address(settings),
        Retention(response_s=settings.ttl_s, conversation_s=settings.ttl_s, log_s=settings.log_ttl_s),
        deadline_s=settings.deadline_s,
        replicas=settings.replicas,
        or_memory=settings.url is None and share == 1,
    )


def build_ledger(
    settings: StoreSettings, store: Store, upkeep: Upkeep, observers: Sequence[QuotaObserver]
) -> UsageLedger:
    """Return the usage ledger of this process.

    `observers` are notified when a budget changes, and when a request is refused.
    """
    spool, on_failure = build_spool(settings), upkeep.check_now
    return UsageLedger(store, held_s=settings.lease_s, spool=spool, on_failure=on_failure, observers=observers)


def build_spool(settings: StoreSettings) -> UsageSpool:
    """Return the local spool of usage records.

    The spool is disabled if the store is in memory, because the usage is lost anyway when the process exits.
    """
    address = store_address(settings)
    if settings.spool_dir is not None:
        folder = Path(settings.spool_dir)
    elif address.startswith("memory:"):
        return UsageSpool()
    elif (path := sqlite_path(address)) is not None:
        folder = path.parent / "spool"
    else:
        folder = Path(data_folder()) / "spool"
    with suppress(RuntimeError):
        # If the user has no home folder, creating the spool fails later, and an error is logged then.
        folder = folder.expanduser()
    return UsageSpool(folder, address, settings.spool_max_bytes)


def store_address(settings: StoreSettings) -> str:
    """Return the configured URL, or the URL of a file in the user's data folder.

    A configured URL may contain a password.
    """
    if settings.url is not None:
        return settings.url.get_secret_value()
    # The path of the folder may contain characters that have a meaning in URLs, such as `?`.
    return f"sqlite:///{quote(data_folder().removeprefix('/'))}/state.db"
