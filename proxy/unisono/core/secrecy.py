"""Detection of secrets among configured values, and their spellings in logs and errors.

Logs and errors must not contain secrets. Values that look like ordinary words are not treated as secrets.
"""

from __future__ import annotations

import html
import json
from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import quote, quote_plus

MIN_LENGTH: Final = 6
MIN_DISTINCT: Final = 4
# Minimum length of words that are treated as a passphrase; `sk-no-key-required` is not a secret.
MIN_WORDS_LENGTH: Final = 20
# Minimum length of a number that is treated as a secret; shorter numbers are counts and ports.
MIN_DIGITS_LENGTH: Final = 12


def is_plausible_secret(value: str) -> bool:
    """Return True if a value is long and random enough for a secret, unlike `none` or `dummy`."""
    if len(value) < MIN_LENGTH or len(set(value)) < MIN_DISTINCT:
        return False
    if value.isascii() and value.isdigit():
        return len(value) >= MIN_DIGITS_LENGTH
    letters = value.replace("-", "").replace("_", "")
    if letters.isascii() and letters.isalpha() and (letters.islower() or letters.isupper() or letters.istitle()):
        return len(value) >= MIN_WORDS_LENGTH
    return True


def secret_spellings(values: Iterable[str]) -> list[str]:
    """Return all spellings of the plausible secrets.

    The longest spelling comes first, because a spelling may be a prefix of a longer spelling.
    """
    found = {spelling for value in values if is_plausible_secret(value) for spelling in _spellings(value)}
    return sorted(found, key=len, reverse=True)


def _spellings(secret: str) -> Iterator[str]:
    """Yield the secret as written, escaped for URLs, JSON and HTML, and in base64.

    The base64 spellings also match the secret inside an encoded `user:secret`.
    """
    yield secret
    raw = secret.encode("utf-8", "surrogatepass")
    for escaped in (quote(raw, safe=""), quote(raw), quote_plus(raw)):
        yield from (escaped, _with_lower_escapes(escaped))
    yield from (json.dumps(secret, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))
    yield from (repr(secret)[1:-1], html.escape(secret))
    for bytes_before in range(3):
        encoded = b64encode(bytes(bytes_before) + raw).decode()
        # Omit base64 characters that also contain bits of neighbouring bytes.
        begin, end = -(-bytes_before * 8 // 6), (bytes_before + len(raw)) * 8 // 6
        yield encoded[begin:end]
        yield encoded[begin:end].replace("+", "-").replace("/", "_")


def _with_lower_escapes(text: str) -> str:
    first, *rest = text.split("%")
    return "%".join([first, *(part[:2].lower() + part[2:] for part in rest)])
