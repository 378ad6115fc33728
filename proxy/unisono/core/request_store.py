"""Store protocol for request records; their counts are in `request_counts`."""

from __future__ import annotations

from typing import Final, Protocol

from unisono.core.frozen import dataclass
from unisono.core.request_record import RequestRecord

# Time after the deletion of a key's records in which no further ones are stored: requests may still be running.
DELETED_S: Final = 86_400
# Maximum number of digits of a time in milliseconds since 1970: a database has integers of 64 bits.
MAX_CURSOR_DIGITS: Final = 15
# Maximum number of records that one query visits.
MAX_VISITED: Final = 20_000

# Facet of records that failed, and of records with any recovery.
FAILED: Final = "failed"
RECOVERED: Final = "recovered"


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Conditions on records. All must hold; empty ones do not count.

    `recovery` is the name of a rule, or `any`. `since` and `until` limit the end of a request, in seconds since 1970.
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
        """Return the facets that a record must have."""
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
    """Return the facets by which a record is found."""
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

    `cursor` continues after the last one; None at the end. A page may be short although more follow, because a query
    visits a limited number of records.
    """

    records: tuple[RequestRecord, ...]
    cursor: str | None = None


class RequestStore(Protocol):
    """Storage for request records. Every method may raise `StoreUnavailable`."""

    async def keep_requests(self, *records: RequestRecord, for_s: float, most: int) -> None:
        """Store records for `for_s` seconds, and add them to the counts.

        Of more than `most` records, the oldest are dropped. A record with the id of an earlier one is ignored.
        """
        ...

    async def delete_requests(self, key: str, most: int) -> int:
        """Delete at most `most` records of a key, the oldest first, and return their number.

        Counts stay. Records of requests that end within the next day (`DELETED_S`) are not stored.
        """
        ...

    async def request(self, id: str) -> RequestRecord | None: ...

    async def requests(self, wanted: RequestFilter, limit: int, cursor: str = "") -> RequestPage:
        """Return the latest records, or those after `cursor`. Raises ValueError for an invalid one."""
        ...

    async def request_counts(self, wanted: RequestFilter, step_s: int) -> dict[int, dict[str, int]]:
        """Return the counts by the start of each interval from `since` to `until`.

        Only `model` and `key` or `tenant` of the filter apply.
        """
        ...


def to_cursor(ended: int, id: str) -> str:
    return f"{ended}.{id}"


def of_cursor(cursor: str) -> tuple[int, str]:
    """Return the end and the id of the record at a cursor. Raises ValueError."""
    ended, _, id = cursor.partition(".")
    if not id or not ended.isdecimal() or len(ended) > MAX_CURSOR_DIGITS:
        raise ValueError("not a cursor")
    return int(ended), id
