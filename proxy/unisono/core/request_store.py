"""Store protocol for request records; `request_counts` computes counts of these records."""

from __future__ import annotations

from typing import Final, Protocol

from unisono.core.frozen import dataclass
from unisono.core.request_record import RequestRecord

# After the records of a key are deleted, no further records of the key are stored for this number of seconds, because
# requests may still be running.
DELETED_S: Final = 86_400
# Maximum number of digits of a time in milliseconds since 1970, because databases have integers of 64 bits.
MAX_CURSOR_DIGITS: Final = 15
# Maximum number of records that one query reads.
MAX_VISITED: Final = 20_000

# Facet of the records of failed requests, and facet of the records with any recovery.
FAILED: Final = "failed"
RECOVERED: Final = "recovered"


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Conditions that a record must meet; an empty value or None is not a condition.

    `recovery` is the name of a recovery rule, or `any`. The request must have ended between `since` and `until`, in
    seconds since 1970.
    """

    tenant: str | None = None
    key: str | None = None
    model: str = ""
    deployment: str = ""
    status: int = 0
    failed: bool = False
    recovery: str = ""
    since: float = 0.0
    until: float | None = None

    @property
    def facets(self) -> tuple[str, ...]:
        """Return the facets (see `facets_of`) that a record must have."""
        wanted = [
            *([RECOVERED] if self.recovery == "any" else [f"recovery:{self.recovery}"] if self.recovery else []),
            *([f"status:{self.status}"] if self.status else []),
            *([FAILED] if self.failed else []),
            *([] if self.key is None else [f"key:{self.key}"]),
            *([] if self.tenant is None else [f"tenant:{self.tenant}"]),
            *([f"deployment:{self.deployment}"] if self.deployment else []),
            *([f"model:{self.model}"] if self.model else []),
        ]
        return tuple(wanted)


def facets_of(record: RequestRecord) -> tuple[str, ...]:
    """Return the facets by which queries find a record, such as `status:200` or `model:NAME`."""
    facets = [f"tenant:{record.tenant}", f"key:{record.key}", f"status:{record.status}"]
    if record.model:
        facets.append(f"model:{record.model}")
    if record.deployment:
        facets.append(f"deployment:{record.deployment}")
    if has_failed(record):
        facets.append(FAILED)
    if record.recoveries:
        facets.append(RECOVERED)
        facets += [f"recovery:{rule}" for rule in record.recoveries]
    return tuple(facets)


def has_failed(record: RequestRecord) -> bool:
    return record.status >= 400 or bool(record.error)


def ended_ms(record: RequestRecord) -> int:
    """Return the end of a request in milliseconds since 1970."""
    return round((record.at + record.duration_s) * 1000)


@dataclass(frozen=True, slots=True)
class RequestPage:
    """Page of records, the latest first.

    `cursor` is the start of the next page; None if no more records follow. A page may contain fewer records than
    requested although more follow, because one query reads a limited number of records.
    """

    records: tuple[RequestRecord, ...]
    cursor: str | None = None


class RequestStore(Protocol):
    """Storage for request records. Every method may raise `StoreUnavailable`."""

    async def keep_requests(self, *records: RequestRecord, for_s: float, most: int) -> None:
        """Store records for `for_s` seconds, and add them to the counts.

        If the store has more than `most` records, the oldest are dropped. A record is ignored if a record with the same
        id is stored already.
        """
        ...

    async def delete_requests(self, key: str, most: int) -> int:
        """Delete at most `most` records of a key, the oldest first, and return the number deleted.

        The counts do not change. Records of the key's requests that end within the next day (`DELETED_S`) are not
        stored.
        """
        ...

    async def request(self, id: str) -> RequestRecord | None: ...

    async def requests(self, wanted: RequestFilter, limit: int, cursor: str = "") -> RequestPage:
        """Return at most `limit` records, the latest first, after `cursor` if it is not empty.

        Raises ValueError if `cursor` is invalid.
        """
        ...

    async def request_counts(self, wanted: RequestFilter, step_s: int) -> dict[int, dict[str, int]]:
        """Return the counts of each interval from `since` to `until`, by the interval's start.

        `step_s` is the length of the intervals in seconds. Of the other fields of the filter, only `model`, `key` and
        `tenant` apply; if `key` is set, `tenant` is ignored.
        """
        ...


def to_cursor(ended: int, id: str) -> str:
    return f"{ended}.{id}"


def of_cursor(cursor: str) -> tuple[int, str]:
    """Return the end in milliseconds and the id of the record at a cursor.

    Raises ValueError if the text is not a cursor.
    """
    ended, _, id = cursor.partition(".")
    if not id or not ended.isdecimal() or len(ended) > MAX_CURSOR_DIGITS:
        raise ValueError("not a cursor")
    return int(ended), id
