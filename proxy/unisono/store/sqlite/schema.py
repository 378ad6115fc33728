"""Tables of the SQLite store, opening of its file, and deletion of expired rows.

The write-ahead log is synced at every commit, so acknowledged writes survive a killed process and a power failure.
Expired rows are invisible to readers immediately; the sweep only reclaims their space.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from unisono.core.frozen import statically_frozen
from unisono.core.state_store import Retention
from unisono.errors import StoreUnavailable, StoreUnreadable
from unisono.store.codec import StateLimits

VERSION = 1

TABLES = """
CREATE TABLE responses (
    tenant TEXT, id TEXT, anchor TEXT, head BLOB, input BLOB, output BLOB, terminal INTEGER, expires REAL,
    log_expires REAL, PRIMARY KEY (tenant, id));
CREATE TABLE events (
    tenant TEXT, response TEXT, seq INTEGER, data BLOB, PRIMARY KEY (tenant, response, seq)) WITHOUT ROWID;
CREATE TABLE tokens (
    tenant TEXT, response TEXT, first INTEGER, upto INTEGER, data BLOB,
    PRIMARY KEY (tenant, response, first)) WITHOUT ROWID;
CREATE TABLE conversations (
    tenant TEXT, id TEXT, head BLOB, revision INTEGER, upto INTEGER, bytes INTEGER, last BLOB, expires REAL,
    PRIMARY KEY (tenant, id));
CREATE TABLE conversation_items (
    tenant TEXT, conversation TEXT, position INTEGER, id TEXT, data BLOB,
    PRIMARY KEY (tenant, conversation, position), UNIQUE (tenant, conversation, id));
CREATE TABLE places (
    tenant TEXT, item TEXT, response TEXT, conversation TEXT, expires REAL, PRIMARY KEY (tenant, item)) WITHOUT ROWID;
CREATE TABLE leases (
    tenant TEXT, anchor TEXT, owner TEXT, fence INTEGER, until REAL, expires REAL,
    PRIMARY KEY (tenant, anchor)) WITHOUT ROWID;
CREATE TABLE runs (tenant TEXT, response TEXT, until REAL, PRIMARY KEY (tenant, response)) WITHOUT ROWID;
CREATE TABLE keys (
    tenant TEXT, key TEXT, digest TEXT, response TEXT, expires REAL, PRIMARY KEY (tenant, key)) WITHOUT ROWID;
CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE counters (
    tenant TEXT, name TEXT, value INTEGER, expires REAL, PRIMARY KEY (tenant, name)) WITHOUT ROWID;
CREATE TABLE counted (
    tenant TEXT, name TEXT, once TEXT, expires REAL, PRIMARY KEY (tenant, name, once)) WITHOUT ROWID;
CREATE INDEX responses_expire ON responses (expires);
CREATE INDEX conversations_expire ON conversations (expires);
CREATE INDEX places_expire ON places (expires);
CREATE INDEX keys_expire ON keys (expires);
CREATE INDEX runs_lapse ON runs (until);
"""

# Later tables, which older gateways on the same file ignore. Created wherever they are missing.
ADDED = """
CREATE TABLE IF NOT EXISTS virtual_keys (id TEXT PRIMARY KEY, revision INTEGER, data BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS key_digests (digest TEXT PRIMARY KEY, key TEXT) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS digests_of_keys ON key_digests (key);
CREATE TABLE IF NOT EXISTS account_seconds (
    tenant TEXT, key TEXT, second INTEGER, requests INTEGER, tokens INTEGER, expires REAL,
    PRIMARY KEY (tenant, key, second)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS account_claims (
    tenant TEXT, key TEXT, once TEXT, second INTEGER, tokens INTEGER, budget_tokens INTEGER, budget_cost INTEGER,
    output INTEGER, expires REAL, PRIMARY KEY (tenant, key, once)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS account_spent (
    tenant TEXT, key TEXT, period TEXT, tokens INTEGER, cost INTEGER, expires REAL,
    PRIMARY KEY (tenant, key, period)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS account_settled (
    tenant TEXT, key TEXT, once TEXT, expires REAL, PRIMARY KEY (tenant, key, once)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS account_counted (
    tenant TEXT, key TEXT, once TEXT, requests INTEGER, errors INTEGER, input INTEGER, cached INTEGER, output INTEGER,
    reasoning INTEGER, cost INTEGER, expires REAL, PRIMARY KEY (tenant, key, once)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledger (
    day TEXT, tenant TEXT, key TEXT, model TEXT, requests INTEGER, errors INTEGER, input INTEGER, cached INTEGER,
    output INTEGER, reasoning INTEGER, cost INTEGER, PRIMARY KEY (day, tenant, key, model)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledger_served (
    day TEXT, tenant TEXT, key TEXT, model TEXT, served TEXT, requests INTEGER, errors INTEGER, input INTEGER,
    cached INTEGER, output INTEGER, reasoning INTEGER, cost INTEGER,
    PRIMARY KEY (day, tenant, key, model, served)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS traces (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT, id TEXT, at REAL, about BLOB, document BLOB, expires REAL,
    UNIQUE (tenant, id));
CREATE INDEX IF NOT EXISTS traces_in_order ON traces (tenant, number);
CREATE INDEX IF NOT EXISTS traces_expire ON traces (expires);
CREATE TABLE IF NOT EXISTS requests (id TEXT PRIMARY KEY, ended INTEGER, data BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS request_facets (
    facet TEXT, ended INTEGER, id TEXT, PRIMARY KEY (facet, ended, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS request_total (one INTEGER PRIMARY KEY, n INTEGER);
CREATE TABLE IF NOT EXISTS request_counts (
    step INTEGER, facet TEXT, start INTEGER, name TEXT, n INTEGER,
    PRIMARY KEY (step, facet, start, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS request_deleted_keys (key TEXT PRIMARY KEY, expires REAL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS request_counts_in_order ON request_counts (step, start);
CREATE TABLE IF NOT EXISTS directory (
    kind TEXT, id TEXT, revision INTEGER, data BLOB, PRIMARY KEY (kind, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS audit (number INTEGER PRIMARY KEY AUTOINCREMENT, data BLOB);
"""

SWEEP = (
    "DELETE FROM events WHERE (tenant, response) IN "
    "(SELECT tenant, id FROM responses WHERE min(expires, log_expires) <= :now)",
    "DELETE FROM tokens WHERE (tenant, response) IN "
    "(SELECT tenant, id FROM responses WHERE min(expires, log_expires) <= :now)",
    "DELETE FROM responses WHERE expires <= :now",
    "DELETE FROM conversation_items WHERE (tenant, conversation) IN "
    "(SELECT tenant, id FROM conversations WHERE expires <= :now)",
    *(
        f"DELETE FROM {table} WHERE expires <= :now"  # noqa: S608 - names of our own
        for table in (
            "conversations",
            "places",
            "leases",
            "keys",
            "counters",
            "counted",
            "traces",
            "request_deleted_keys",
        )
    ),
    *(
        f"DELETE FROM account_{table} WHERE expires <= :now"  # noqa: S608 - names of our own
        for table in ("seconds", "claims", "spent", "settled", "counted")
    ),
)


# SQLite's primary codes for a path where no file can be written.
UNWRITABLE = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM})


@statically_frozen
@dataclass(frozen=True, slots=True)
class Transaction:
    """Connection inside a transaction, and its time in seconds since 1970."""

    db: sqlite3.Connection
    now: float
    retention: Retention
    bounds: StateLimits


# Time that an operation waits while another process writes to the file.
LOCK_TIMEOUT_S = 5.0


def connect(path: Path | None) -> sqlite3.Connection:
    """Open the file, created if necessary and readable only by its owner; None is in memory.

    Raises `StoreUnavailable` if the file cannot be opened or written, `StoreUnreadable` if a newer version wrote it.
    """
    try:
        if path is not None:
            path = path.expanduser()
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600, exist_ok=True)
        db = _opened(":memory:" if path is None else path)
    except (OSError, RuntimeError, sqlite3.Error) as error:
        # A RuntimeError means that there is no home directory for ~.
        raise StoreUnavailable(f"the store cannot be opened: {error}") from error
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        # On macOS an ordinary sync leaves data in the drive's own cache. Elsewhere this has no effect.
        db.execute("PRAGMA fullfsync = ON")
        _make(db)
    except sqlite3.Error as error:
        db.close()
        raise StoreUnavailable(f"the store cannot be opened: {error}") from error
    except StoreUnreadable:
        db.close()
        raise
    return db


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open an existing file of `connect` for reading. Raises `StoreUnavailable`."""
    try:
        db = _opened(path.expanduser())
        db.execute("PRAGMA query_only = ON")
    except (OSError, RuntimeError, sqlite3.Error) as error:
        raise StoreUnavailable(f"the store cannot be opened: {error}") from error
    return db


def _opened(path: Path | str) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, timeout=LOCK_TIMEOUT_S, check_same_thread=False)


def is_unwritable(error: StoreUnavailable) -> bool:
    """Return True if `connect` failed because the path is not writable.

    False if it failed because of the file's content.
    """
    cause = error.__cause__
    if isinstance(cause, sqlite3.Error):
        return (getattr(cause, "sqlite_errorcode", 0) & 0xFF) in UNWRITABLE
    return isinstance(cause, OSError | RuntimeError)


def _make(db: sqlite3.Connection) -> None:
    # Two processes may open a new file at once: the second to get the lock finds the tables.
    db.execute("BEGIN IMMEDIATE")
    with db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise StoreUnreadable(
                "this store was written by a newer version of the gateway; update this gateway or set another store.url"
            )
        if version == 0:
            for statement in filter(str.strip, TABLES.split(";")):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {VERSION}")
        for statement in filter(str.strip, ADDED.split(";")):
            db.execute(statement)


def sweep(act: Transaction) -> None:
    for statement in SWEEP:
        act.db.execute(statement, {"now": act.now})
