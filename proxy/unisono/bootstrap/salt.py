"""The gateway's secret, from which everything is made that clients carry for it: the configured one, else one that the
store keeps for all replicas. And what keeps tenants apart at backends, which is no secret.

Part of the composition root. A store that lost what it knew gets back the secret that this process knows, unless
another process was faster and made a new one; then that one counts, here too.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from secrets import token_bytes
from typing import Final

from unisono.config import Config
from unisono.core.access import LOCAL_TENANT, MASTER_TENANT
from unisono.core.state_store import Store

NAME: Final = "salt"
"""Under which name the store keeps it."""
BYTES: Final = 32


class Salt:
    """Asks the store each time it is asked itself. Raises `StoreUnavailable`."""

    def __init__(self, config: Config, store: Store) -> None:
        self._configured = config.unisono.salt_key
        self._store = store
        self._known: bytes | None = None

    async def __call__(self) -> bytes:
        if self._configured is not None:
            return self._configured.get_secret_value().encode()
        self._known = await self._store.secret(NAME, self._known or token_bytes(BYTES))
        return self._known


def cache_salts(*, shared: bool) -> Callable[[str], str]:
    """By tenant: what its prompts are cached under at backends, the same on every replica. Nothing for the operator's
    own, and for nobody where what is cached is `shared`."""

    def salt_of(tenant: str) -> str:
        if shared or tenant in {LOCAL_TENANT, MASTER_TENANT}:
            return ""
        return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16, person=b"unisono cache").hexdigest()

    return salt_of
