"""Virtual keys, the directory and audit records in Redis.

All of this data is in one hash slot, so that one script can change an object and add its audit record atomically.
"""

from __future__ import annotations

from dataclasses import replace

from unisono.core.access import KeyRecord
from unisono.core.directory import MAX_AUDIT_RECORDS, AuditRecord, DirectoryEntry, EntryKind
from unisono.store import codec
from unisono.store.redis.connection import Link
from unisono.store.redis.keys import AUDIT, KEY_DIGESTS, VIRTUAL_KEYS, directory
from unisono.store.redis.script import Args, Script

ADD_AUDIT = """
local function add_audit(list, data, most)
  if data == '' then return end
  redis.call('LPUSH', list, data)
  redis.call('LTRIM', list, 0, most - 1)
end
"""

PUT_KEY = Script(
    ADD_AUDIT
    + """
local records, digests, list = unpack(KEYS)
local id, revision, data, audit, most = arg(), tonumber(arg()), arg(), arg(), tonumber(arg())
local was = redis.call('HGET', records, id)
if was == data then return {'ok'} end
if not was and revision > 0 then return {'missing'} end
if was and revision == 0 then return {'exists'} end
if was and cjson.decode(was).revision ~= revision then return {'key changed'} end
local first = next_arg
for n = first, #ARGV do
  local owner = redis.call('HGET', digests, ARGV[n])
  if owner and owner ~= id then return {'exists'} end
end
if was then
  for _, one in ipairs(cjson.decode(was).digests) do redis.call('HDEL', digests, one.digest) end
end
redis.call('HSET', records, id, data)
for n = first, #ARGV do redis.call('HSET', digests, ARGV[n], id) end
add_audit(list, audit, most)
return {'ok'}
"""
)

PUT_ENTRY = Script(
    ADD_AUDIT
    + """
local entries, list = unpack(KEYS)
local id, revision, data, audit, most = arg(), tonumber(arg()), arg(), arg(), tonumber(arg())
local was = redis.call('HGET', entries, id)
if was and was == data then return {'ok'} end
if not was and revision > 0 then return {'missing'} end
if was and revision == 0 then return {'exists'} end
if was and cjson.decode(was).revision ~= revision then return {'entry changed'} end
if data == '' then redis.call('HDEL', entries, id) else redis.call('HSET', entries, id, data) end
add_audit(list, audit, most)
return {'ok'}
"""
)


class KeptKeys:
    """Part of the Redis store that implements `core.access.KeyStore`."""

    _link: Link

    async def put_key(self, record: KeyRecord, audit: AuditRecord | None = None) -> KeyRecord:
        changed = replace(record, revision=record.revision + 1)
        digests = (one.digest for one in record.digests)
        args: Args = [record.id, record.revision, codec.encode_key(changed), *_audit_args(audit), *digests]
        await self._link.act(PUT_KEY, [VIRTUAL_KEYS, KEY_DIGESTS, AUDIT], args)
        return changed

    async def key(self, key: str) -> KeyRecord | None:
        (data,) = await self._link.read(("HGET", VIRTUAL_KEYS, key.encode("utf-8", "surrogatepass")))
        return None if data is None else codec.decode_key(data)

    async def key_of(self, digest: str) -> KeyRecord | None:
        # The key may be changed between the two reads. The record must therefore still contain the digest.
        (key,) = await self._link.read(("HGET", KEY_DIGESTS, digest))
        if key is None:
            return None
        (data,) = await self._link.read(("HGET", VIRTUAL_KEYS, key))
        record = None if data is None else codec.decode_key(data)
        return record if record and any(one.digest == digest for one in record.digests) else None

    async def keys(self) -> tuple[KeyRecord, ...]:
        (found,) = await self._link.read(("HVALS", VIRTUAL_KEYS))
        return tuple(sorted(map(codec.decode_key, found), key=lambda record: (record.created_at, record.id)))

    async def put_entry(self, entry: DirectoryEntry, audit: AuditRecord | None = None) -> DirectoryEntry:
        changed = replace(entry, revision=entry.revision + 1)
        args: Args = [_field(entry.id), entry.revision, codec.encode_entry(changed), *_audit_args(audit)]
        await self._link.act(PUT_ENTRY, [directory(entry.kind), AUDIT], args)
        return changed

    async def delete_entry(self, entry: DirectoryEntry, audit: AuditRecord | None = None) -> None:
        args: Args = [_field(entry.id), entry.revision, "", *_audit_args(audit)]
        await self._link.act(PUT_ENTRY, [directory(entry.kind), AUDIT], args)

    async def entries(self, *ids: tuple[EntryKind, str]) -> tuple[DirectoryEntry | None, ...]:
        if not ids:
            return ()
        found = await self._link.read(*(("HGET", directory(kind), _field(id)) for kind, id in ids))
        return tuple(None if data is None else codec.decode_entry(data) for data in found)

    async def directory(self, kind: EntryKind) -> tuple[DirectoryEntry, ...]:
        (found,) = await self._link.read(("HVALS", directory(kind)))
        return tuple(sorted(map(codec.decode_entry, found), key=lambda entry: (entry.created_at, entry.id)))

    async def audit_records(self, offset: int, limit: int) -> tuple[int, tuple[AuditRecord, ...]]:
        total, found = await self._link.read(("LLEN", AUDIT), ("LRANGE", AUDIT, offset, offset + limit - 1))
        return int(total), tuple(map(codec.decode_audit, found if limit else ()))


def _audit_args(audit: AuditRecord | None) -> Args:
    return [b"" if audit is None else codec.encode_audit(audit), MAX_AUDIT_RECORDS]


def _field(id: str) -> bytes:
    return id.encode("utf-8", "surrogatepass")
