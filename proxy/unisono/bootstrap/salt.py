"""Secret that protects data held by clients, and salts that separate the caches of tenants.

Part of the composition root. The secret is configured, or else generated and stored for all replicas. If the store
loses the secret, this process writes it again. If another process has already stored a new secret, this process uses
the new one.
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
    """Secret of the gateway. Unless it is configured, each call reads it from the store.

    A call raises StoreUnavailable if the store cannot be reached.
    """

    def __init__(self, config: Config, store: Store) -> None:
        self._configured = config.unisono.salt_key
        self._store = store
        self._secret: bytes | None = None

    async def __call__(self) -> bytes:
        if self._configured is not None:
            return self._configured.get_secret_value().encode()
        # The store keeps the given value only if it has no secret, and returns the secret that it has. So replicas that
        # start at the same time agree on one secret, and a store that has lost the secret gets it back.
        self._secret = await self._store.secret(NAME, self._secret or token_bytes(BYTES))
        return self._secret


def cache_salts(*, shared: bool) -> Callable[[str], str]:
    """Return a function from a tenant to its cache salt, which is the same on every replica.

    A backend shares cached prompts only between requests with the same salt. The salt is empty for the operator's own
    tenants. It is empty for all tenants if prompt caches are `shared`.
    """

    def salt_of(tenant: str) -> str:
        if shared or tenant in {LOCAL_TENANT, MASTER_TENANT}:
            return ""
        # Use a digest, because backends need not know the names of tenants.
        return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16, person=b"unisono cache").hexdigest()

    return salt_of
