"""The gateway's secret, from which everything is made that clients carry for it: the configured one, else one that the
store keeps for all replicas.

Part of the composition root. A store that lost what it knew gets back the secret that this process knows, unless
another process was faster and made a new one; then that one counts, here too.
"""

from __future__ import annotations

from secrets import token_bytes
from typing import Final

from unisono.config import Config
from unisono.core.state import Store

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
