"""Records of requests in Redis: in one hash slot, so that writes can delete old records.

Each facet has a sorted set of record ids. They are ordered by the time at which the requests ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson

from unisono.core.request_counts import COUNTS_KEPT_S, MAX_POINTS, count_facet, counts_of
from unisono.core.request_filter import RequestFilter, facets_of
from unisono.core.request_record import RequestRecord
from unisono.core.request_store import DELETED_S, MAX_VISITED, RequestPage, ended_ms, of_cursor, to_cursor
from unisono.store.codec import decode_request, encode_request
from unisono.store.redis import keys
from unisono.store.redis.connection import Link
from unisono.store.redis.script import Script, milliseconds

# Maximum number of records in one write, which must meet the deadline of an operation.
RECORDS_PER_WRITE: Final = 100
# Maximum number of groups of counts in one write.
GROUPS_PER_WRITE: Final = 500
# Maximum number of intervals in one read of counts.
INTERVALS_PER_READ: Final = 200
# Facet of every record.
ALL: Final = ""

# In the hash, the value of a record consists of the Redis keys of its facets, one per line, an empty line, and its
# JSON.
KEEP_REQUESTS = Script(
    """
local records, all, deleted = unpack(KEYS)
local has_deleted = redis.call('EXISTS', deleted) == 1
local function is_deleted(value)
  for set in string.gmatch(string.match(value, '^(.-)\\n\\n'), '[^\\n]+') do
    if redis.call('SISMEMBER', deleted, set) == 1 then return true end
  end
  return false
end
local for_ms, most, new = tonumber(arg()), tonumber(arg()), cjson.decode(arg())
local now = clock()
local added, sets = {}, {}
for _, record in ipairs(new) do
  local id, ended, value = unpack(record)
  if has_deleted and is_deleted(value) then
    added[#added + 1] = 0
  elseif redis.call('HSETNX', records, id, value) == 1 then
    added[#added + 1] = 1
    for set in string.gmatch(string.match(value, '^(.-)\\n\\n'), '[^\\n]+') do
      local members = sets[set] or {}
      members[#members + 1], members[#members + 2] = ended, id
      sets[set] = members
    end
  else
    added[#added + 1] = 0
  end
end
-- One call adds all new ids of a set, because the calls take most of the time.
for set, members in pairs(sets) do
  redis.call('ZADD', set, unpack(members))
  redis.call('PEXPIRE', set, for_ms)
end
redis.call('PEXPIRE', records, for_ms)
local function delete(id)
  local value = redis.call('HGET', records, id)
  for set in string.gmatch(value and string.match(value, '^(.-)\\n\\n') or '', '[^\\n]+') do
    redis.call('ZREM', set, id)
  end
  redis.call('ZREM', all, id)
  redis.call('HDEL', records, id)
end
local limit = 2 * #new + 20
for _, id in ipairs(redis.call('ZRANGEBYSCORE', all, '-inf', now - for_ms, 'LIMIT', 0, limit)) do delete(id) end
local excess = math.min(redis.call('ZCARD', all) - most, limit)
if excess > 0 then
  for _, id in ipairs(redis.call('ZRANGE', all, 0, excess - 1)) do delete(id) end
end
return {'ok', added}
"""
)

DELETE_REQUESTS = Script(
    """
local records, of_key, deleted = unpack(KEYS)
local ids = redis.call('ZRANGE', of_key, 0, tonumber(arg()) - 1)
redis.call('SADD', deleted, of_key)
redis.call('PEXPIRE', deleted, arg())
for _, id in ipairs(ids) do
  local value = redis.call('HGET', records, id)
  for set in string.gmatch(value and string.match(value, '^(.-)\\n\\n') or '', '[^\\n]+') do
    redis.call('ZREM', set, id)
  end
  redis.call('ZREM', of_key, id)
  redis.call('HDEL', records, id)
end
return {'ok', #ids}
"""
)

# A query reads the ids in its smallest set in chunks, newest first, and looks up each chunk in its other sets.
PAGE_OF_REQUESTS = Script(
    """
local records = KEYS[1]
local from, after, since, limit, most = tonumber(arg()), arg(), arg(), tonumber(arg()), tonumber(arg())
local sets, sizes = {unpack(KEYS, 2)}, {}
for _, set in ipairs(sets) do sizes[set] = redis.call('ZCARD', set) end
table.sort(sets, function(one, other) return sizes[one] < sizes[other] end)
local found, visited, last_end, last_id = {}, 0, false, false
local chunk = 500
while visited < most do
  local part = redis.call('ZREVRANGEBYSCORE', sets[1], from, since, 'WITHSCORES', 'LIMIT', visited, chunk)
  local ids, scores = {}, {}
  for n = 1, #part, 2 do ids[#ids + 1] = part[n] end
  for k = 2, #ids > 0 and #sets or 0 do scores[#scores + 1] = redis.call('ZMSCORE', sets[k], unpack(ids)) end
  for n, id in ipairs(ids) do
    local ended = part[2 * n]
    visited = visited + 1
    if not (tonumber(ended) == from and after ~= '' and id >= after) then
      local fits = true
      for _, of_set in ipairs(scores) do fits = fits and of_set[n] end
      local value = fits and redis.call('HGET', records, id)
      if value then
        if #found >= 2 * limit then return {'ok', {found, last_end, last_id}} end
        found[#found + 1] = id
        found[#found + 1] = value
      end
      last_end, last_id = ended, id
    end
  end
  if #ids < chunk then return {'ok', {found, false, false}} end
end
return {'ok', {found, last_end, last_id}}
""",
    is_read=True,
)

ADD_COUNTS = Script(
    """
local k = 0
for for_ms, counts in string.gmatch(arg(), '(%d+) ([^\\n]*)') do
  k = k + 1
  for name, number in string.gmatch(counts, '(%S+) (%S+)') do redis.call('HINCRBY', KEYS[k], name, number) end
  redis.call('PEXPIRE', KEYS[k], for_ms)
end
return {'ok'}
"""
)

READ_COUNTS = Script(
    """
local found = {}
for k = 1, #KEYS do found[k] = redis.call('HGETALL', KEYS[k]) end
return {'ok', found}
""",
    is_read=True,
)


class RedisRequests:
    """Part of the Redis store for request records, limited in number."""

    _link: Link

    async def keep_requests(self, *records: RequestRecord, for_s: float, most: int) -> None:
        for start in range(0, len(records), RECORDS_PER_WRITE) or (0,):
            together = records[start : start + RECORDS_PER_WRITE]
            # All records form one argument: redis-py needs more time per argument than the script to decode a record.
            new = orjson.dumps([_encoded(record) for record in together])
            names = [keys.requests(), keys.request_facet(ALL), keys.deleted_request_keys()]
            added = await self._link.act(KEEP_REQUESTS, names, [milliseconds(for_s), most, new])
            await self._count([record for record, is_new in zip(together, added, strict=True) if is_new])

    async def _count(self, records: Sequence[RequestRecord]) -> None:
        counted = [*counts_of(records).items()]
        for start in range(0, len(counted), GROUPS_PER_WRITE):
            names: list[str] = []
            # One line for the counts of each group. All lines together are one argument.
            lines: list[str] = []
            known, text = None, ""
            for group, counts in counted[start : start + GROUPS_PER_WRITE]:
                names.append(keys.request_counts(group.step_s, group.start, group.facet))
                if counts is not known:
                    known, text = counts, " ".join([f"{name} {number}" for name, number in counts.items()])
                lines.append(f"{milliseconds(COUNTS_KEPT_S[group.step_s])} {text}")
            await self._link.act(ADD_COUNTS, names, ["\n".join(lines)])

    async def delete_requests(self, key: str, most: int) -> int:
        names = [keys.requests(), keys.request_facet(f"key:{key}"), keys.deleted_request_keys()]
        return int(await self._link.act(DELETE_REQUESTS, names, [most, milliseconds(DELETED_S)]))

    async def request(self, id: str) -> RequestRecord | None:
        (value,) = await self._link.read(("HGET", keys.requests(), _name(id)))
        return None if value is None else _record(value)

    async def requests(self, wanted: RequestFilter, limit: int, cursor: str = "") -> RequestPage:
        ended, after = of_cursor(cursor) if cursor else (None, "")
        if ended is None:
            ended = 2**53 if wanted.until is None else round(wanted.until * 1000)
        sets = [keys.request_facet(facet) for facet in wanted.facets or (ALL,)]
        found, last_end, last_id = await self._link.act(
            PAGE_OF_REQUESTS,
            [keys.requests(), *sets],
            [ended, _name(after), round(wanted.since * 1000), limit, MAX_VISITED],
        )
        records = tuple(_record(value) for value in found[1::2])
        if not last_id:
            return RequestPage(records)
        return RequestPage(records, to_cursor(int(float(last_end)), bytes(last_id).decode("utf-8", "replace")))

    async def request_counts(self, wanted: RequestFilter, step_s: int) -> dict[int, dict[str, int]]:
        until = wanted.until if wanted.until is not None else wanted.since + step_s * MAX_POINTS
        starts = range(int(wanted.since) // step_s * step_s, int(until) + 1, step_s)
        facet = count_facet(wanted)
        points: dict[int, dict[str, int]] = {}
        for first in range(0, len(starts), INTERVALS_PER_READ):
            together = starts[first : first + INTERVALS_PER_READ]
            names = [keys.request_counts(step_s, start, facet) for start in together]
            for start, counters in zip(together, await self._link.act(READ_COUNTS, names, []), strict=True):
                if counters:
                    pairs = zip(counters[::2], counters[1::2], strict=True)
                    points[start] = {bytes(name).decode(): int(number) for name, number in pairs}
        return points


def _encoded(record: RequestRecord) -> tuple[str, str, str]:
    """Return the id of a record, its end in milliseconds, and its value in the Redis hash."""
    sets = keys.request_facets((ALL, *facets_of(record)))
    return _name(record.id).decode(), str(ended_ms(record)), f"{sets}\n\n{encode_request(record).decode()}"


def _record(value: bytes) -> RequestRecord:
    return decode_request(bytes(value).partition(b"\n\n")[2])


def _name(id: str) -> bytes:
    return id.encode("utf-8", "replace")
