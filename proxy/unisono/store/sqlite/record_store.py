"""Part of the SQLite store for recordings and request records."""

from __future__ import annotations

import asyncio

from unisono.core.recordings import StoredTrace
from unisono.core.request_filter import RequestFilter
from unisono.core.request_record import RequestRecord
from unisono.core.request_store import RequestPage
from unisono.store.sqlite import request_records, traces
from unisono.store.sqlite.connection import Transactions

# Request records per write to a store in memory. Such a write blocks the event loop for about a millisecond.
RECORDS_PER_MEMORY_WRITE = 16


class SqliteRecords:
    """Part of the SQLite store that implements `TraceStore` and `RequestStore`."""

    async def keep_traces(self: Transactions, *new_traces: StoredTrace, for_s: float, most: int) -> None:
        await self._run(traces.write_traces, new_traces, for_s, most)

    async def trace(self: Transactions, tenant: str, id: str) -> StoredTrace | None:
        return await self._read(traces.get, tenant, id)

    async def traces(self: Transactions, tenant: str, limit: int = 20) -> tuple[StoredTrace, ...]:
        return await self._read(traces.latest, tenant, limit)

    async def keep_requests(self: Transactions, *records: RequestRecord, for_s: float, most: int) -> None:
        size = RECORDS_PER_MEMORY_WRITE if self._is_in_memory else max(1, len(records))
        # A write without records still deletes expired records, so the loop runs at least once.
        for begin in range(0, max(1, len(records)), size):
            await self._run(request_records.write_requests, records[begin : begin + size], for_s, most)
            if self._is_in_memory:
                await asyncio.sleep(0)

    async def delete_requests(self: Transactions, key: str, most: int) -> int:
        return await self._run(request_records.delete_of_key, key, most)

    async def request(self: Transactions, id: str) -> RequestRecord | None:
        return await self._read(request_records.get, id)

    async def requests(self: Transactions, wanted: RequestFilter, limit: int, cursor: str = "") -> RequestPage:
        return await self._read(request_records.page, wanted, limit, cursor)

    async def request_counts(self: Transactions, wanted: RequestFilter, step_s: int) -> dict[int, dict[str, int]]:
        return await self._read(request_records.counts, wanted, step_s)
