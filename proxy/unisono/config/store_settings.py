"""Section `store`: storage of state that outlives a request."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from unisono.config.section_base import Count, Name, Seconds, Section


def _check_store_url(url: SecretStr) -> SecretStr:
    # Reject an empty address: with the default, a local file, replicas would silently not share their state.
    if not url.get_secret_value().strip():
        raise ValueError("must not be empty; set an address, or remove the key to use a SQLite file")
    return url


class StoreSettings(Section):
    """Storage of state that outlives a request: responses, conversations, keys and usage."""

    url: Annotated[SecretStr, AfterValidator(_check_store_url)] | None = None
    """Address of the store: `sqlite:///path`, `memory://`, or `redis://` and its variants.
    By default a SQLite file in the user's data folder. Several gateways with the same state need a shared Redis. The
    address is treated as secret, because it may contain a password."""
    ttl_s: Seconds = 30 * 86400.0
    """Time for which responses and conversations are kept after their last change, in seconds.
    A new response restarts this time for the responses that it continues, and for their conversation. It does so only
    if less than nine tenths of the time are left."""
    log_ttl_s: Seconds = 600.0
    """Time for which the events of a finished response can be streamed again, in seconds."""
    deadline_s: Seconds = 0.25
    """Time limit for one operation of a shared store, in seconds.
    Raise it if the network to the store is slow."""
    replicas: Annotated[int, Field(ge=0)] | None = None
    """Number of Redis replicas that must acknowledge a write.
    By default one if the primary has a connected replica, or had one within the last 30 seconds. Otherwise none."""
    lease_s: Seconds = 10.0
    """Duration of a lease, in seconds.
    If a process does not renew the lease of a background response for this time, another process takes over."""
    spool_dir: Name | None = None
    """Folder for usage records that could not be written to the store yet.
    By default `spool` next to the SQLite file, or in the user's data folder. `memory://` has no such folder."""
    spool_max_bytes: Count = 64 * 1024 * 1024
    """Maximum size of the usage records of one process in `spool_dir`, in bytes."""
