"""Tables of the SQLite store. Missing tables are added when an existing file is opened."""

from __future__ import annotations

import sqlite3

from unisono.errors import StoreUnreadable

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

# Tables that later versions added. They are created if they are missing. Older gateways on the same file ignore them.
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
CREATE TABLE IF NOT EXISTS clock (one INTEGER PRIMARY KEY, latest REAL);
CREATE TABLE IF NOT EXISTS audit (number INTEGER PRIMARY KEY AUTOINCREMENT, data BLOB);
"""


def create_tables(db: sqlite3.Connection) -> None:
    """Create the missing tables. Raises `StoreUnreadable` if a newer version wrote the file."""
    # Two processes may open a new file at once. The process that gets the lock second finds the tables created.
    db.execute("BEGIN IMMEDIATE")
    with db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise StoreUnreadable(
                "this store was written by a newer version of the gateway; update this gateway, or change store.url"
            )
        if version == 0:
            for statement in filter(str.strip, TABLES.split(";")):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {VERSION}")
        for statement in filter(str.strip, ADDED.split(";")):
            db.execute(statement)
