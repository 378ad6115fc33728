"""Who is calling: a bearer key becomes a Caller, or nobody.

Keys are compared as HMAC digests: the comparison takes the same time whatever was sent, and no plaintext is kept. What
is no key, is no longer one, or is another gateway's is refused in the same words.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Protocol

from unisono.core.access import LOCAL_TENANT, MASTER_TENANT, Caller
from unisono.errors import NotAuthenticated


class Keys(Protocol):
    """What the door asks of whatever knows keys."""

    async def identify(self, presented: str | None) -> Caller:
        """The caller a bearer key belongs to; `presented` is the key without its scheme, None when none was sent.
        Raises `NotAuthenticated`, and `StoreUnavailable` where it has to be looked up and cannot be."""
        ...


class KeyFinder(Protocol):
    """Where keys besides the master key are looked for."""

    async def find(self, presented: str) -> Caller | None: ...


class MasterKey:
    """The operator's key, for a tenant of its own; others are looked for in `others`. Anything may be presented."""

    def __init__(self, key: str, others: KeyFinder | None = None) -> None:
        if not key:
            raise ValueError("an empty master key would let everyone in")
        # Made at start: neither the key nor its digest outlives the process or means anything elsewhere.
        self._pepper = secrets.token_bytes(32)
        self._digest = self._digest_of(key)
        self._others = others

    def _digest_of(self, key: str) -> bytes:
        # Header bytes reach Python as latin-1 or with lone surrogates; both must encode.
        return hmac.digest(self._pepper, key.encode("utf-8", errors="surrogatepass"), hashlib.sha256)

    async def identify(self, presented: str | None) -> Caller:
        if presented is None:
            raise NotAuthenticated(
                "No API key was sent, or several: send one as `Authorization: Bearer <key>` or `x-api-key: <key>`."
            )
        if hmac.compare_digest(self._digest_of(presented), self._digest):
            return Caller(MASTER_TENANT, raw=True)
        caller = None if self._others is None else await self._others.find(presented)
        if caller is None:
            raise NotAuthenticated("The API key is not valid here.")
        return caller


class NoKeys:
    """A gateway without keys: everyone who reaches it is the local user. `serve` binds it to loopback only."""

    async def identify(self, presented: str | None) -> Caller:
        del presented  # SDKs insist on sending some key; without keys of our own it means nothing
        return Caller(LOCAL_TENANT, raw=True)
