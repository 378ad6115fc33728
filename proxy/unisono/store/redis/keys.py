"""Names of all keys in Redis. Each contains its tenant, and related keys share a hash slot.

    t:{<tenant>:<anchor>}:r:<response>     a response: head, input, output, terminal
    t:{<tenant>:<anchor>}:s:<response>     its events, a stream with the ids <sequence number>-1 (Redis refuses 0-0)
    t:{<tenant>:<anchor>}:k:<response>     its token ids, four bytes each
    t:{<tenant>:<anchor>}:lease, :fence    the writer, and the number of writers so far
    t:{<tenant>:<conversation>}:c, :i, :o  a conversation: head and sums, items by id, their order
    t:{<tenant>:<response>}:at             the anchor of a response, unless the anchor is the response itself
    t:{<tenant>:<item>}:in                 the location of an item
    t:{<tenant>:<key>}:once                an idempotency key
    t:{<tenant>:<name>}:n, :n:<once>       a counter, and marks that prevent counting twice
    t:{keys}:r, t:{keys}:d                 virtual keys by id, and their ids by digest
    t:{keys}:e:<kind>, t:{keys}:a          the directory: entries by id; audit records, newest first
    t:{<tenant>:<key>}:a:m, :a:o, :a:h     an account: usage of the last minute; reservations: ids by expiry, amounts
    t:{<tenant>:<key>}:a:b:<period>        an account: sums of a budget period
    t:{<tenant>:<key>}:a:l:<day>           an account: ledger of a day
    t:{<tenant>:<key>}:a:v:<day>           the part of this ledger that other models than the requested one answered
    t:{<tenant>:<key>}:a:s:<once>          the amounts of a settlement that are already counted
    t:{<tenant>:traces}:t:o, :t:e          recordings of answers: ids in order of writing, ids by expiry
    t:{<tenant>:traces}:t:a, :t:d          recordings of answers: summaries, documents
    t:{requests}:d, t:{requests}:f:<facet> records of requests by id, and their ids by facet, in order of their ends
    t:{requests}:x                         deleted virtual keys, whose requests are no longer recorded
    t:{requests}:c:<step>:<start>:<facet>  counts of requests in an interval
    t:ledgers                              all accounts and days that have a ledger
    t:secret:<name>, t:runs                secrets, and watched runs
    t:never                                a key that never exists, for trial writes

Tenants and ids are escaped, so that no name can be chosen that yields a key of another tenant or id.
"""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import quote

from unisono.core.quotas import Account

RUNS = "t:runs"
NEVER = "t:never"
LEDGERS = "t:ledgers"
VIRTUAL_KEYS = "t:{keys}:r"
KEY_DIGESTS = "t:{keys}:d"
AUDIT = "t:{keys}:a"
# Maximum number of cached names. Most occur often: tenants, keys, models and the facets of requests.
NAMES_CACHED = 4096

is_plain = re.compile(r"[A-Za-z0-9_.~-]*").fullmatch


def _escaped(name: str) -> str:
    return name if is_plain(name) else quote(name, safe="", errors="replace")


_quoted = lru_cache(maxsize=NAMES_CACHED)(_escaped)


def directory(kind: str) -> str:
    return f"t:{{keys}}:e:{kind}"


def tag(tenant: str, id: str) -> str:
    return f"t:{{{_quoted(tenant)}:{_quoted(id)}}}:"


def response(tenant: str, anchor: str, id: str) -> list[str]:
    """Return the Redis keys of a response: its record, event stream and tokens."""
    here, name = tag(tenant, anchor), _quoted(id)
    return [f"{here}{kind}:{name}" for kind in "rsk"]


def lease(tenant: str, anchor: str) -> list[str]:
    """Return the Redis keys of the lease and the fence of an anchor."""
    here = tag(tenant, anchor)
    return [here + "lease", here + "fence"]


def conversation(tenant: str, id: str) -> list[str]:
    """Return the Redis keys of a conversation: its head, its items and their order."""
    here = tag(tenant, id)
    return [here + kind for kind in "cio"]


def anchor(tenant: str, id: str) -> str:
    return tag(tenant, id) + "at"


def place(tenant: str, item: str) -> str:
    return tag(tenant, item) + "in"


def once(tenant: str, key: str) -> str:
    return tag(tenant, key) + "once"


def counter(tenant: str, name: str, once: str) -> list[str]:
    """Return the Redis keys of a counter, and of the mark that prevents counting `once` twice."""
    here = tag(tenant, name) + "n"
    return [here, f"{here}:{_quoted(once)}"]


def account(account: Account, period: str) -> list[str]:
    """Return the Redis keys of an account; only the last one depends on the budget period.

    They hold the use of the last minute, the expiry times of open reservations, the amounts of these reservations, and
    the sums of the period.
    """
    here = tag(account.tenant, account.key) + "a:"
    return [here + "m", here + "o", here + "h", f"{here}b:{_quoted(period)}"]


def ledger(account: Account, day: str) -> str:
    return f"{tag(account.tenant, account.key)}a:l:{_quoted(day)}"


def ledger_served(account: Account, day: str) -> str:
    return f"{tag(account.tenant, account.key)}a:v:{_quoted(day)}"


def settlement(account: Account, day: str, once: str) -> list[str]:
    """Return the Redis keys of a settlement.

    They hold the day's ledger, the amounts of this settlement that are already counted, and the part of the ledger by
    answering model.
    """
    here, escaped_day = tag(account.tenant, account.key) + "a:", _quoted(day)
    # Ids of settlements occur once, so their names are not cached.
    return [f"{here}l:{escaped_day}", f"{here}s:{_escaped(once)}", f"{here}v:{escaped_day}"]


def traces(tenant: str) -> list[str]:
    """Return the Redis keys of a tenant's recordings: order, expiry times, summaries, documents."""
    here = tag(tenant, "traces") + "t:"
    return [here + kind for kind in "oead"]


def requests() -> str:
    """Return the Redis key of the records of requests."""
    return "t:{requests}:d"


def deleted_request_keys() -> str:
    """Return the Redis key of the set of deleted virtual keys.

    Requests of deleted keys are no longer recorded. The members of the set are the Redis keys of the deleted keys'
    facets.
    """
    return "t:{requests}:x"


def request_facet(facet: str) -> str:
    """Return the Redis key of the ids of records with this facet; "" selects all records."""
    return f"t:{{requests}}:f:{_quoted(facet)}"


@lru_cache(maxsize=NAMES_CACHED)
def request_facets(facets: tuple[str, ...]) -> str:
    """Return the Redis keys of these facets, one per line."""
    return "\n".join(map(request_facet, facets))


def request_counts(step_s: int, start: int, facet: str) -> str:
    return f"t:{{requests}}:c:{step_s}:{start}:{_quoted(facet)}"


def secret(name: str) -> str:
    return f"t:secret:{quote(name, safe='')}"
