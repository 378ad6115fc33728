"""Store protocol for request records; `request_counts` computes counts of these records."""

from __future__ import annotations

from typing import Final, Protocol

from unisono.core.frozen import dataclass
from unisono.core.request_filter import RequestFilter
from unisono.core.request_record import RequestRecord

# After the records of a key are deleted, no further records of the key are stored for this number of seconds, because
# requests may still be running.
DELETED_S: Final = 86_400
# Maximum number of digits of a time in milliseconds since 1970, because databases have integers of 64 bits.
MAX_CURSOR_DIGITS: Final = 15
# Maximum number of records that one query reads.
MAX_VISITED: Final = 20_000


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
