"""Secrets that must never be logged or displayed, and their redaction."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from urllib.parse import unquote

from pydantic import BaseModel, JsonValue, SecretStr

from unisono.config import Config
from unisono.core.secrecy import secret_spellings

REDACTED = "[redacted]"
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"',;]+")
# Virtual keys issued by the gateway, complete or truncated. They are not in the configuration.
_VIRTUAL = re.compile(r"sk-uni-[A-Za-z0-9_%-]+")
# User and password in a URL. Errors of libraries may contain such URLs.
_USERINFO = re.compile(r"://[^/\s@\"']+@")
# Minimum length in characters of a value of unknown meaning that is treated as a secret.
MIN_GUESSED_SECRET_LENGTH = 8
# Fields with environment variables. Most of their values are not secrets; only long values are treated as secrets.
VARIABLES = frozenset({"env", "environment_variables"})


def secrets_of(config: Config) -> Iterator[str]:
    """Yield every secret of a configuration, for redaction in logs."""
    for server in config.mcp_servers.values():
        yield from filter(_looks_secret, (value.get_secret_value() for value in server.env.values()))
    yield from filter(_looks_secret, (value.get_secret_value() for value in config.environment_variables.values()))
    for secret in _secret_fields(config):
        yield secret
        if "://" in secret:
            yield from secrets_in(secret)
    for hook in config.unisono.hooks:
        yield from _secrets_of_options(hook.options)
    for entry in config.model_list:
        yield from _secrets_of_options(entry.litellm_params.provider)
        yield from secrets_in(entry.litellm_params.api_base or "")
    if config.store.url is not None:
        yield from passwords_of(config.store.url.get_secret_value())


def _secret_fields(value: object) -> Iterator[str]:
    """Yield the values of all secret fields in a section of the configuration.

    Environment variables are left out.
    """
    match value:
        case SecretStr():
            yield value.get_secret_value()
        case BaseModel():
            for name in type(value).model_fields.keys() - VARIABLES:
                yield from _secret_fields(getattr(value, name))
        case Mapping():
            yield from chain.from_iterable(map(_secret_fields, value.values()))
        case list() | tuple():
            yield from chain.from_iterable(map(_secret_fields, value))


def _secrets_of_options(value: JsonValue) -> Iterator[str]:
    """Yield possible secrets in the options of third-party code, whose meaning is unknown.

    Plain words are excluded. From a URL, only its secret parts are yielded.
    """
    match value:
        case dict():
            yield from chain.from_iterable(map(_secrets_of_options, value.values()))
        case list():
            yield from chain.from_iterable(map(_secrets_of_options, value))
        case str() if "://" in value:
            yield from secrets_in(value)
        case str() if _looks_secret(value) and not value.isalpha():
            yield value


def secrets_in(url: str) -> Iterator[str]:
    """Yield possible secrets of a URL, raw and decoded: the password and values of its query."""
    _, _, rest = url.partition("://")
    password = rest.partition("/")[0].rpartition("@")[0].partition(":")[2]
    values = (pair.partition("=")[2] for pair in rest.partition("#")[0].partition("?")[2].split("&"))
    for secret in filter(None, (password, *filter(_looks_secret, values))):
        yield from {secret, unquote(secret)}


def _looks_secret(value: str) -> bool:
    """Return True for long values. Shorter ones are words and numbers that are common in logs."""
    return len(value) >= MIN_GUESSED_SECRET_LENGTH


def passwords_of(url: str) -> Iterator[str]:
    """Yield the password in a store's address, raw and decoded."""
    credentials = url.partition("://")[2].rpartition("@")[0]
    written = [credentials.partition(":")[2]]
    written += [pair.partition("=")[2] for pair in url.partition("?")[2].split("&") if pair.startswith("password=")]
    for password in filter(None, written):
        yield from {password, unquote(password)}


class Secrets:
    """Redaction of known secrets and of text that looks like one."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = secret_spellings(secrets)
        self._known = re.compile(_any_of(known)) if known else None

    def redact(self, text: str) -> str:
        """Return `text` with secrets replaced."""
        if not self.may_occur(text):
            return text
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        text = _BEARER.sub(rf"\1 {REDACTED}", text)
        text = _VIRTUAL.sub(REDACTED, text)
        return _USERINFO.sub(f"://{REDACTED}@", text)

    def may_occur(self, text: str) -> bool:
        """Return False only if `text` contains no secret. Faster than a search with all patterns."""
        folded = text.lower()
        return (
            "bearer" in folded
            or "basic" in folded
            or "sk-uni-" in text
            or "://" in text
            # Some non-ASCII letters match letters of `bearer` when case is ignored.
            or not text.isascii()
            or (self._known is not None and self._known.search(text) is not None)
        )


def _any_of(texts: Sequence[str]) -> str:
    """Build a pattern that tries the texts in order, grouped by first letter for speed."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    return "|".join(f"{re.escape(first)}(?:{'|'.join(each)})" for first, each in rests.items())
