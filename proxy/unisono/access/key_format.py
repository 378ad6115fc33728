"""The plaintext of virtual keys: how one is made, told from anything else, and turned into what is kept of it.

A key ends in a seal that only this gateway's pepper makes. What somebody made up is known as that without asking
anyone, so that a flood of invented keys costs neither memory nor the store anything.
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
SEAL_BYTES: Final = 10
"""Together 42 bytes, which have one spelling of 56 letters and no padding."""
FORM: Final = re.compile(PREFIX + r"[A-Za-z0-9_-]{56}")


class Mint:
    """`salt` is the gateway's secret, the same on all replicas: with another one every key is another's."""

    def __init__(self, salt: bytes) -> None:
        self._seal_key = hmac.digest(salt, b"unisono virtual keys: seal", hashlib.sha256)
        self._pepper = hmac.digest(salt, b"unisono virtual keys: digest", hashlib.sha256)

    def new(self) -> str:
        """A key nobody can guess. It is known to whoever asked for it, and to nobody else."""
        entropy = secrets.token_bytes(ENTROPY_BYTES)
        return PREFIX + urlsafe_b64encode(entropy + self._seal(entropy)).decode()

    def digest(self, key: str) -> str:
        """What the store knows a key by, in hexadecimal."""
        return hmac.digest(self._pepper, key.encode(), hashlib.sha256).hex()

    def made(self, presented: str) -> bool:
        """Whether a key was made with this salt, whatever became of it; as long for any that has the right form."""
        if not has_form(presented):
            return False
        content = urlsafe_b64decode(presented[len(PREFIX) :])
        entropy, seal = content[:ENTROPY_BYTES], content[ENTROPY_BYTES:]
        return hmac.compare_digest(self._seal(entropy), seal)

    def _seal(self, entropy: bytes) -> bytes:
        return hmac.digest(self._seal_key, entropy, hashlib.sha256)[:SEAL_BYTES]


def has_form(presented: str) -> bool:
    """Whether it looks like a virtual key, of any gateway."""
    return FORM.fullmatch(presented) is not None
