"""Virtual keys in Redis: records by id and ids by digest, in one hash slot.

One script therefore changes both atomically.
"""

from __future__ import annotations

from dataclasses import replace

from unisono.core.access import KeyRecord
from unisono.store import codec
from unisono.store.redis.connection import Link
from unisono.store.redis.keys import KEY_DIGESTS, VIRTUAL_KEYS
from unisono.store.redis.script_args import Args
from unisono.store.redis.scripts import Script

PUT_KEY = Script(
    """
local records, digests = unpack(KEYS)
local id, revision, data = arg(), tonumber(arg()), arg()
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
return {'ok'}
"""
)


class KeptKeys:
    """Part of the Redis store that implements `core.access.KeyStore`: virtual keys."""

    _link: Link

    async def put_key(self, record: KeyRecord) -> KeyRecord:
        changed = replace(record, revision=record.revision + 1)
        args: Args = [record.id, record.revision, codec.encode_key(changed), *(one.digest for one in record.digests)]
        await self._link.act(PUT_KEY, [VIRTUAL_KEYS, KEY_DIGESTS], args)
        return changed

    async def key(self, key: str) -> KeyRecord | None:
        (data,) = await self._link.read(("HGET", VIRTUAL_KEYS, key.encode("utf-8", "surrogatepass")))
        return None if data is None else codec.decode_key(data)

    async def key_of(self, digest: str) -> KeyRecord | None:
        # A change may occur between the two reads: compare the digest with those of the record.
        (key,) = await self._link.read(("HGET", KEY_DIGESTS, digest))
        if key is None:
            return None
        (data,) = await self._link.read(("HGET", VIRTUAL_KEYS, key))
        record = None if data is None else codec.decode_key(data)
        return record if record and any(one.digest == digest for one in record.digests) else None

    async def keys(self) -> tuple[KeyRecord, ...]:
        (found,) = await self._link.read(("HVALS", VIRTUAL_KEYS))
        return tuple(sorted(map(codec.decode_key, found), key=lambda record: (record.created_at, record.id)))
