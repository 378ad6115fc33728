"""Authentication: maps a bearer key to a Caller.

Keys are compared as HMAC digests: the comparison takes constant time, and no plaintext is stored. Invalid, expired and
foreign keys are refused with the same message.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Protocol

from unisono.core.access import LOCAL_TENANT, MASTER_TENANT, Caller
from unisono.errors import NotAuthenticated


class Keys(Protocol):
    """Authentication of a request: identifies its caller by the key that was sent."""

    async def identify(self, presented: str | None) -> Caller:
        """Return the caller of a bearer key.

        `presented` is the key without its scheme, None if none was sent. Raises `NotAuthenticated`, and
        `StoreUnavailable` if a necessary lookup fails.
        """
        ...


class KeyFinder(Protocol):
    """Lookup of keys other than the master key."""

    async def find(self, presented: str) -> Caller | None:
        """Return the caller with this key; None if the key is not valid. Raises `StoreUnavailable`."""
        ...


class MasterKey:
    """Authentication by the operator's key, which has its own tenant; `others` finds other keys."""

    def __init__(self, key: str, others: KeyFinder | None = None) -> None:
        if not key:
            raise ValueError("the master key must not be empty")
        # Random per process: neither the key nor its digest outlives the process or means anything elsewhere.
        self._pepper = secrets.token_bytes(32)
        self._digest = self._digest_of(key)
        self._other_keys = others

    def _digest_of(self, key: str) -> bytes:
        # Header bytes reach Python as latin-1 or with lone surrogates; both must encode.
        return hmac.digest(self._pepper, key.encode("utf-8", errors="surrogatepass"), hashlib.sha256)

    async def identify(self, presented: str | None) -> Caller:
        if presented is None:
            raise NotAuthenticated("Send exactly one API key, as `Authorization: Bearer <key>` or `x-api-key: <key>`.")
        if hmac.compare_digest(self._digest_of(presented), self._digest):
            return Caller(MASTER_TENANT, raw=True)
        caller = None if self._other_keys is None else await self._other_keys.find(presented)
        if caller is None:
            raise NotAuthenticated("The API key is not valid.")
        return caller


class NoKeys:
    """Gateway without keys: every client is the local user. `serve` binds it to loopback only."""

    async def identify(self, presented: str | None) -> Caller:
        del presented  # SDKs insist on sending some key; a gateway without keys ignores it
        return Caller(LOCAL_TENANT, raw=True)
