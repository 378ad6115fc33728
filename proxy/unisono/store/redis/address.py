"""Parser for addresses of a Redis server, of sentinels or of a cluster."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from unisono.errors import ConfigError

UNREADABLE = "not a Redis address; use redis://user:password@host:6379/0 and percent-encode / # @ : in the password"


def addresses(rest: str, port: int) -> tuple[list[tuple[str, int]], str, int]:
    """Return the hosts with ports, the first part of the path, and the database number after it.

    `rest` is the address after `//`. Raises `ConfigError` for an invalid host, port or database number.
    """
    netloc, _, path = rest.partition("/")
    nodes = []
    for address in netloc.rpartition("@")[2].split(","):
        try:
            parsed = urlsplit(f"//{address}")
            host, number = parsed.hostname, parsed.port or port
        except ValueError:
            raise ConfigError(f"store.url: {UNREADABLE}") from None
        if not host:
            raise ConfigError("store.url: the host is missing; add it, as in redis://host:6379/0")
        nodes.append((host, number))
    service, _, db = path.partition("/")
    if db and not db.isdigit():
        raise ConfigError("store.url: the part after the service name must be a database number, as in /name/0")
    return nodes, unquote(service), int(db or 0)


def credentials(rest: str) -> dict[str, str]:
    user, _, password = rest.partition("/")[0].rpartition("@")[0].partition(":")
    return {key: unquote(value) for key, value in (("username", user), ("password", password)) if value}
