"""Gateway secret for all client-held values, and the non-secret salts that separate tenants.

Part of the composition root. The secret is configured or, by default, stored for all replicas. If the store loses it,
this process restores it, unless another process has already stored a new one, which this process then adopts.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from secrets import token_bytes
from typing import Final

from unisono.config import Config
from unisono.core.access import LOCAL_TENANT, MASTER_TENANT
from unisono.core.state_store import Store

# Name of the secret in the store.
NAME: Final = "salt"
BYTES: Final = 32


class Salt:
    """Gateway secret, read from the store on every call. Raises `StoreUnavailable`."""

    def __init__(self, config: Config, store: Store) -> None:
        self._configured = config.unisono.salt_key
        self._store = store
        self._secret: bytes | None = None

    async def __call__(self) -> bytes:
        if self._configured is not None:
            return self._configured.get_secret_value().encode()
        # The store adopts the given value only if it has none, and returns the one it has. Replicas that start together
        # thus agree, and a store that lost the secret gets it back.
        self._secret = await self._store.secret(NAME, self._secret or token_bytes(BYTES))
        return self._secret


def cache_salts(*, shared: bool) -> Callable[[str], str]:
    """Return a function from tenant to cache salt for backends, equal on every replica.

    The salt is empty for the operator's own tenants, and for all tenants if prompt caches are `shared`.
    """

    def salt_of(tenant: str) -> str:
        if shared or tenant in {LOCAL_TENANT, MASTER_TENANT}:
            return ""
        # A digest separates tenants without their names, which backends need not know.
        return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16, person=b"unisono cache").hexdigest()

    return salt_of
