"""Sealed and signed reasoning, carried by clients instead of stored state.

A seal contains items with their exact tokens, encrypted with the gateway's key for one tenant. `open` never raises: it
returns None for a seal that is damaged, or was made with a different key or for a different tenant. The client then
loses only the content of the seal. A signature proves that this gateway generated a visible text for a tenant.
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

# Prefix of a seal: the version of the cipher and of the key derivation.
PREFIX: Final = "uns1."
# Version of the format of the items in a seal.
VERSION: Final = 1
# Key derivation label, which separates this key from other keys that are derived from the same salt.
PURPOSE: Final = b"unisono sealed items 1"
# Prefix of a signature.
SIGNED: Final = "uns1s."
# HKDF info of the signing key, which therefore differs from the key for encryption.
SIGNING: Final = b"unisono signed text 1"
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
# Maximum length of a seal that is opened, in characters.
MAX_SEAL_LENGTH: Final = 1 << 20
# Maximum size of a seal's content in bytes.
LARGEST: Final = 16 << 20


class Sealer:
    """Encryption and signing with keys that are derived from `salt`, the gateway's secret."""

    def __init__(self, salt: bytes) -> None:
        keys = HKDF(algorithm=SHA256(), length=2 * KEY_BYTES, salt=None, info=PURPOSE).derive(salt)
        self._cipher = AESGCM(keys[:KEY_BYTES])
        self._nonce_key = keys[KEY_BYTES:]
        self._signing_key = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=SIGNING).derive(salt)

    def seal(self, tenant: str, items: Sequence[Item], session: str = "") -> str:
        """Return the items as a seal in ASCII. Equal items of a tenant give equal seals.

        `session` is the tool server session of the items. Raises InternalError for text that is not valid Unicode.
        """
        record = {"v": VERSION, "items": [to_record(item) for item in items], **({"talk": session} if session else {})}
        try:
            content = orjson.dumps(record)
        except orjson.JSONEncodeError as error:
            raise InternalError(f"The items cannot be sealed: {error}") from error
        return self.encrypt(tenant, content)

    def encrypt(self, owner: str, content: bytes) -> str:
        """Return the content encrypted, as ASCII text that `decrypt` accepts only for this owner."""
        # The nonce is derived from the content: another process that seals the same items makes the same bytes, and no
        # nonce is used for two contents.
        nonce = hmac.digest(self._nonce_key, _bound_to(owner) + b"\0" + content, "sha256")[:NONCE_BYTES]
        # The owner is authenticated with the content, so the seal cannot be opened for a different owner.
        sealed = nonce + self._cipher.encrypt(nonce, zlib.compress(content, 1), _bound_to(owner))
        return PREFIX + _written(sealed)

    def decrypt(self, owner: str, text: str) -> bytes:
        """Return the content of a seal.

        Raises ValueError if the seal is damaged, too long, or was made with a different key or for a different owner.
        """
        if len(text) > MAX_SEAL_LENGTH or not text.startswith(PREFIX):
            raise ValueError("not a seal")
        try:
            sealed = _read(text.removeprefix(PREFIX))
            return _unpacked(self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _bound_to(owner)))
        except (InvalidTag, zlib.error) as error:
            raise ValueError("damaged, or sealed for another owner") from error

    def open(self, tenant: str, text: str) -> tuple[Item, ...] | None:
        """Return the items that were sealed for `tenant`; None if the seal cannot be opened."""
        try:
            return tuple(map(to_item, self._record(tenant, text)["items"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def session(self, tenant: str, text: str) -> str:
        """Return the tool server session in a seal; "" if there is none or the seal is invalid."""
        try:
            return str(self._record(tenant, text).get("talk", ""))
        except (KeyError, TypeError, ValueError, AttributeError):
            return ""

    def _record(self, tenant: str, text: str) -> Mapping[str, Any]:
        """Return the record in a seal.

        Raises ValueError if the seal cannot be opened or its version is unknown. If the content of the seal is not a
        record, may also raise TypeError, KeyError or AttributeError.
        """
        record: Mapping[str, Any] = orjson.loads(self.decrypt(tenant, text))
        if record["v"] != VERSION:
            raise ValueError("unknown version")
        return record

    def sign(self, tenant: str, text: str) -> str:
        """Return the signature of a text, in ASCII. Equal texts of a tenant get equal signatures."""
        owner, data = _bound_to(tenant), text.encode("utf-8", "surrogatepass")
        # The length separates tenant and text, so no two pairs have the same bytes.
        whole = len(owner).to_bytes(8, "big") + owner + data
        return SIGNED + _written(hmac.digest(self._signing_key, whole, "sha256"))

    def signed(self, tenant: str, text: str, signature: str) -> bool:
        """Return True if this gateway made `signature` for `tenant` and exactly this text."""
        presented = signature.encode("utf-8", "surrogatepass")
        return hmac.compare_digest(presented, self.sign(tenant, text).encode())


def _bound_to(tenant: str) -> bytes:
    return tenant.encode("utf-8", "surrogatepass")


def _written(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _read(text: str) -> bytes:
    """Decode the base64 text of a seal.

    Raises ValueError for a text that `_written` does not produce. So no two texts decode to the same bytes.
    """
    try:
        data = b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error
    if _written(data) != text:
        raise ValueError("not canonical")
    return data


def _unpacked(packed: bytes) -> bytes:
    """Decompress the content of a seal.

    Raises zlib.error for damaged data. Raises ValueError if the data is truncated, or longer than `LARGEST` bytes when
    decompressed.
    """
    reading = zlib.decompressobj()
    # A small seal could unpack to gigabytes.
    content = reading.decompress(packed, LARGEST)
    if not reading.eof:
        raise ValueError("too large or truncated")
    return content
