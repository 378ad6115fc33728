"""Who is calling: a bearer key becomes a Caller, or nobody.

Keys are compared as HMAC digests under a pepper made at start: the comparison takes the same time whatever was sent,
and neither the key nor its digest outlives the process or means anything elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Protocol

from unisono.errors import NotAuthenticated

MASTER_TENANT = "default"
LOCAL_TENANT = "local"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request counts for. `tenant` owns what the request stores and separates it from other tenants' state."""

    tenant: str


class Keys(Protocol):
    """What the door asks of whatever knows keys."""

    def identify(self, presented: str | None) -> Caller:
        """The caller a bearer key belongs to; `presented` is the key without its scheme, None when none was sent.
        Raises NotAuthenticated."""
        ...


class MasterKey:
    """One key for one tenant. Anything may be presented: what is not the key fails in constant time and nothing else
    happens."""

    def __init__(self, key: str) -> None:
        if not key:
            raise ValueError("an empty master key would let everyone in")
        self._pepper = secrets.token_bytes(32)
        self._digest = self._digest_of(key)

    def _digest_of(self, key: str) -> bytes:
        # Header bytes reach Python as latin-1 or with lone surrogates; both must encode.
        return hmac.digest(self._pepper, key.encode("utf-8", errors="surrogatepass"), hashlib.sha256)

    def identify(self, presented: str | None) -> Caller:
        if presented is None:
            raise NotAuthenticated("No API key was sent: send it as `Authorization: Bearer <key>`.")
        if not hmac.compare_digest(self._digest_of(presented), self._digest):
            raise NotAuthenticated("The API key is not valid here.")
        return Caller(MASTER_TENANT)


class NoKeys:
    """A gateway without keys: everyone who reaches it is the local user. `serve` binds it to loopback only."""

    def identify(self, presented: str | None) -> Caller:
        del presented  # SDKs insist on sending some key; without keys of our own it means nothing
        return Caller(LOCAL_TENANT)
