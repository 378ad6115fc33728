"""Content of a store, saved to and restored from files of `tests/golden/state`."""

from __future__ import annotations

import gzip
import json
import sqlite3
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import redis

FOLDER = Path(__file__).parents[1] / "golden" / "state"
KINDS = ("sqlite", "redis")
DATABASE = FOLDER / "sqlite.db.gz"
REDIS_KEYS = FOLDER / "redis.json"


def documents_of(kind: str) -> Mapping[str, Any]:
    """Return the documents that the earlier version sent to clients."""
    found: Mapping[str, Any] = json.loads((FOLDER / f"{kind}.documents.json").read_text())
    return found


# -- SQLite


def save_database(path: Path) -> None:
    """Save a file of the SQLite store, with the content of its write-ahead log."""
    copy = path.with_suffix(".copy")
    db = sqlite3.connect(path)
    db.execute("VACUUM INTO ?", (str(copy),))
    db.close()
    DATABASE.write_bytes(gzip.compress(copy.read_bytes(), mtime=0))


def restore_database(path: Path) -> None:
    path.write_bytes(gzip.decompress(DATABASE.read_bytes()))


# -- Redis: plain values by type, because the format of DUMP depends on the version of the server


def save_keys(client: redis.Redis) -> None:
    """Save all keys of a Redis database. They are restored without an expiry."""
    rows = {_text(name): _read(client, name) for name in sorted(client.scan_iter(count=1000))}
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
    REDIS_KEYS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def restore_keys(client: redis.Redis) -> None:
    for name, (kind, value) in json.loads(REDIS_KEYS.read_text()).items():
        _write(client, _bytes(name), kind, value)


def _read(client: Any, name: bytes) -> list[Any]:
    kind = client.type(name).decode()
    match kind:
        case "string":
            return [kind, _text(client.get(name))]
        case "hash":
            return [kind, [[_text(field), _text(value)] for field, value in sorted(client.hgetall(name).items())]]
        case "list":
            return [kind, [_text(value) for value in client.lrange(name, 0, -1)]]
        case "set":
            return [kind, sorted(_text(value) for value in client.smembers(name))]
        case "zset":
            return [kind, [[_text(value), score] for value, score in client.zrange(name, 0, -1, withscores=True)]]
        case "stream":
            return [kind, [[_text(number), list(_pairs(fields))] for number, fields in client.xrange(name)]]
    raise TypeError(f"{kind} is not a known type of Redis")


def _write(client: Any, name: bytes, kind: str, value: Any) -> None:
    match kind:
        case "string":
            client.set(name, _bytes(value))
        case "hash":
            client.hset(name, mapping={_bytes(field): _bytes(item) for field, item in value})
        case "list":
            client.rpush(name, *map(_bytes, value))
        case "set":
            client.sadd(name, *map(_bytes, value))
        case "zset":
            client.zadd(name, {_bytes(item): score for item, score in value})
        case "stream":
            for number, fields in value:
                client.xadd(name, {_bytes(field): _bytes(item) for field, item in fields}, id=_bytes(number))
        case _:
            raise TypeError(f"{kind} is not a known type of Redis")


def _pairs(fields: Mapping[bytes, bytes]) -> Iterator[list[str]]:
    yield from ([_text(field), _text(value)] for field, value in fields.items())


# Prefix of bytes that are not UTF-8. No text of the store begins with it.
BINARY = "base64:"


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return BINARY + b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return b64decode(text.removeprefix(BINARY)) if text.startswith(BINARY) else text.encode()
