"""Plaintext of virtual keys: creation, recognition, and the digest that is stored.

A key ends in a seal that requires this gateway's pepper. An invented key is therefore recognised locally, so that a
flood of invented keys costs neither memory nor store access.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final

PREFIX: Final = "sk-uni-"
ENTROPY_BYTES: Final = 32
# Size of the seal; with the entropy 42 bytes, which are 56 base64 letters without padding.
SEAL_BYTES: Final = 10
# A complete key, including its seal.
FORM: Final = re.compile(PREFIX + r"[A-Za-z0-9_-]{56}")


class Mint:
    """Maker of keys; `salt` is the gateway's secret, the same on all replicas.

    With another salt, all existing keys become invalid.
    """

    def __init__(self, salt: bytes) -> None:
        self._seal_key = hmac.digest(salt, b"unisono virtual keys: seal", hashlib.sha256)
        self._pepper = hmac.digest(salt, b"unisono virtual keys: digest", hashlib.sha256)

    def new(self) -> str:
        """Return a new unguessable key. Its plaintext is not stored."""
        entropy = secrets.token_bytes(ENTROPY_BYTES)
        return PREFIX + urlsafe_b64encode(entropy + self._seal(entropy)).decode()

    def digest(self, key: str) -> str:
        """Return the hexadecimal digest that identifies a key in the store."""
        return hmac.digest(self._pepper, key.encode(), hashlib.sha256).hex()

    def issued(self, presented: str) -> bool:
        """Return True if a key was issued with this salt, even if the key was revoked since.

        The check takes constant time for all keys of the right form.
        """
        if not has_form(presented):
            return False
        content = urlsafe_b64decode(presented[len(PREFIX) :])
        entropy, seal = content[:ENTROPY_BYTES], content[ENTROPY_BYTES:]
        return hmac.compare_digest(self._seal(entropy), seal)

    def _seal(self, entropy: bytes) -> bytes:
        return hmac.digest(self._seal_key, entropy, hashlib.sha256)[:SEAL_BYTES]


def has_form(presented: str) -> bool:
    """Return True if `presented` has the form of a virtual key of any gateway."""
    return FORM.fullmatch(presented) is not None
