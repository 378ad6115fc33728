"""Sealed and signed reasoning: what a client without stored state carries for the gateway.

A seal holds items with their exact tokens, can be read and made only with the gateway's key, and only for the tenant it
was made for. Opening never raises: what is not ours, damaged, another tenant's or of another key is None, and a client
that sends it merely loses what was in it. A signature says of text in plain sight that this gateway made it, for that
tenant.
"""

from __future__ import annotations

import binascii
import hmac
import zlib
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from unisono.core.conversation import Item
from unisono.core.item_records import to_item, to_record
from unisono.errors import InternalError

PREFIX: Final = "uns1."
"""How a seal begins: the version of the cipher and of how the key is made."""
VERSION: Final = 1
"""Of the items inside."""
PURPOSE: Final = b"unisono sealed items 1"
"""Keeps this key apart from any other made from the same salt."""
SIGNED: Final = "uns1s."
"""How a signature begins."""
SIGNING: Final = b"unisono signed text 1"
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
LONGEST: Final = 1 << 20
"""Characters of a seal that is opened."""
LARGEST: Final = 16 << 20
"""Bytes inside of one."""


class Sealer:
    """Seals and opens with a key made from `salt`, the gateway's secret."""

    def __init__(self, salt: bytes) -> None:
        keys = HKDF(algorithm=SHA256(), length=2 * KEY_BYTES, salt=None, info=PURPOSE).derive(salt)
        self._cipher = AESGCM(keys[:KEY_BYTES])
        self._nonce_key = keys[KEY_BYTES:]
        self._signing_key = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=SIGNING).derive(salt)

    def seal(self, tenant: str, items: Sequence[Item], talk: str = "") -> str:
        """Plain ASCII, the same for the same items. `talk` is the one with a tool server that they come from. Raises
        InternalError for text that is not Unicode."""
        record = {"v": VERSION, "items": [to_record(item) for item in items], **({"talk": talk} if talk else {})}
        try:
            content = orjson.dumps(record)
        except orjson.JSONEncodeError as error:
            raise InternalError(f"items that cannot be sealed: {error}") from error
        # The nonce follows from what is sealed: whoever takes over a response seals its items to the same bytes, and
        # no nonce serves two contents.
        nonce = hmac.digest(self._nonce_key, _bound_to(tenant) + b"\0" + content, "sha256")[:NONCE_BYTES]
        sealed = nonce + self._cipher.encrypt(nonce, zlib.compress(content, 1), _bound_to(tenant))
        return PREFIX + _written(sealed)

    def open(self, tenant: str, text: str) -> tuple[Item, ...] | None:
        """What was sealed for `tenant`; None for anything else."""
        try:
            return tuple(map(to_item, self._record(tenant, text)["items"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def talk(self, tenant: str, text: str) -> str:
        """The talk that was sealed with it; "" for none, and for what does not open."""
        try:
            return str(self._record(tenant, text).get("talk", ""))
        except (KeyError, TypeError, ValueError, AttributeError):
            return ""

    def _record(self, tenant: str, text: str) -> Mapping[str, Any]:
        """Raises ValueError and, for what is none of ours, TypeError, KeyError and AttributeError."""
        if len(text) > LONGEST or not text.startswith(PREFIX):
            raise ValueError("no seal")
        try:
            sealed = _read(text.removeprefix(PREFIX))
            packed = self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _bound_to(tenant))
            record: Mapping[str, Any] = orjson.loads(_unpacked(packed))
        except (InvalidTag, zlib.error) as error:
            raise ValueError("damaged, or not for them") from error
        if record["v"] != VERSION:
            raise ValueError("of another version")
        return record

    def sign(self, tenant: str, text: str) -> str:
        """Plain ASCII, the same for the same text."""
        owner, said = _bound_to(tenant), text.encode("utf-8", "surrogatepass")
        whole = len(owner).to_bytes(8, "big") + owner + said
        return SIGNED + _written(hmac.digest(self._signing_key, whole, "sha256"))

    def signed(self, tenant: str, text: str, signature: str) -> bool:
        """Whether `signature` is this gateway's, made for `tenant` and this very text."""
        given = signature.encode("utf-8", "surrogatepass")
        return hmac.compare_digest(given, self.sign(tenant, text).encode())


def _bound_to(tenant: str) -> bytes:
    return tenant.encode("utf-8", "surrogatepass")


def _written(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _read(text: str) -> bytes:
    """Raises ValueError for anything but what `_written` writes: several texts would mean the same bytes otherwise."""
    try:
        data = b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error
    if _written(data) != text:
        raise ValueError("not canonical")
    return data


def _unpacked(packed: bytes) -> bytes:
    """Raises ValueError, zlib.error."""
    reading = zlib.decompressobj()
    content = reading.decompress(packed, LARGEST)
    if not reading.eof:
        raise ValueError("too large, or cut")
    return content
