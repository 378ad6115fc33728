"""Conversations on Redis, with their scripts: ordered items, metadata, locations of items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import orjson

from unisono.core.conversation import Json
from unisono.core.state_store import Lease, Retention, StoredConversation, StoredItem
from unisono.errors import NotFound, StoreConflict
from unisono.store import codec
from unisono.store.codec import UNLIMITED, StateLimits
from unisono.store.redis import keys
from unisono.store.redis.connection import Link
from unisono.store.redis.responses import index_commands, record_command
from unisono.store.redis.script import ITEM_FUNCTIONS, LEASE_CHECK, Args, Script, fence, milliseconds, of_items

# Creates a conversation with its first items. Items of an expired conversation with the same id may remain, because
# its keys expire one by one. They are deleted.
CREATE_CONVERSATION = Script(
    ITEM_FUNCTIONS
    + """
local key, items, order = unpack(KEYS)
local head, add = arg(), read_items()
local was = conversation(key)
if was then
  if was.head == head and was.revision == 0 and was.last == add.digest then return {'ok'} end
  return {'exists'}
end
was = {revision = 0, upto = 0, bytes = 0}
local no = check_items(add, was, items)
if no then return {no} end
redis.call('HSET', key, 'head', head)
redis.call('DEL', items, order)
write_items(add, was, key, items, order)
return {'ok'}
"""
)

# Appends items to a conversation. The caller needs the current lease, or there must be no lease. With a revision, the
# conversation must still have this revision. A repetition of the last write is recognised by the digest of its items,
# and changes nothing.
APPEND = Script(
    LEASE_CHECK
    + ITEM_FUNCTIONS
    + """
local key, items, order, lease, fence = unpack(KEYS)
local given, revision, add = arg(), arg(), read_items()
local was = conversation(key)
if not was then return {'missing'} end
if revision ~= '' and was.revision == revision + 1 and was.last == add.digest then return {'ok', was.revision} end
local no = held(lease, fence, given)
if no then return {no} end
if revision ~= '' and was.revision ~= tonumber(revision) then return {'changed'} end
no = check_items(add, was, items)
if no then return {no} end
was.revision = was.revision + 1
write_items(add, was, key, items, order)
return {'ok', was.revision}
"""
)

# Reads items in the order of their positions. `after` is empty, or `=` followed by the id of the item that precedes the
# first result. `upto` is empty, or the position of the first item that is not read. Lua limits the number of values
# that `unpack` returns, so the items are read in groups of 1,000.
READ_ITEMS = Script(
    """
local key, items, order = unpack(KEYS)
local after, limit, newest_first, upto = arg(), tonumber(arg()), arg() == '1', arg()
if redis.call('EXISTS', key) == 0 then return {'missing'} end
local end_rank = redis.call('ZCARD', order)
local hidden = upto == '' and 0 or redis.call('ZCOUNT', order, upto, '+inf')
local first = 0
if newest_first then first = hidden else end_rank = end_rank - hidden end
if after ~= '' then
  local rank = redis.call(newest_first and 'ZREVRANK' or 'ZRANK', order, string.sub(after, 2))
  if not rank then return {'missing'} end
  first = math.max(first, rank + 1)
end
local last = limit < 0 and end_rank - 1 or math.min(first + limit, end_rank) - 1
if last < first then return {'ok', {}} end
local ids = redis.call(newest_first and 'ZREVRANGE' or 'ZRANGE', order, first, last)
local found = {}
for from = 1, #ids, 1000 do
  for _, data in ipairs(redis.call('HMGET', items, unpack(ids, from, math.min(from + 999, #ids)))) do
    found[#found + 1] = data
  end
end
return {'ok', found}
""",
    is_read=True,
)

# Replaces the metadata of a conversation, unless the metadata have changed since the caller read them. Like every
# write, it renews the lifetime of all keys of the conversation.
SET_HEAD = Script(
    """
local key, items, order = unpack(KEYS)
local before, head, ttl = arg(), arg(), arg()
local was = redis.call('HGET', key, 'head')
if not was then return {'missing'} end
if was ~= before and was ~= head then return {'changed'} end
redis.call('HSET', key, 'head', head)
redis.call('PEXPIRE', key, ttl)
redis.call('PEXPIRE', items, ttl)
redis.call('PEXPIRE', order, ttl)
return {'ok'}
"""
)

# Deletes one item. Refuses while a response is in progress, because this response is generated from the items of the
# conversation. `last` is emptied, so that no later write is mistaken for a repetition of the last one.
DELETE_ITEM = Script(
    LEASE_CHECK
    + """
local key, items, order, lease, fence = unpack(KEYS)
local id = arg()
if redis.call('EXISTS', key) == 0 then return {'ok', 0} end
local no = held(lease, fence, '')
if no then return {no} end
local size = redis.call('HSTRLEN', items, id)
if redis.call('HDEL', items, id) == 0 then return {'ok', 0} end
redis.call('ZREM', order, id)
redis.call('HINCRBY', key, 'bytes', -size)
redis.call('HINCRBY', key, 'revision', 1)
redis.call('HSET', key, 'last', '')
return {'ok', 1}
"""
)

DELETE_CONVERSATION = Script(
    LEASE_CHECK
    + """
local key, items, order, lease, fence = unpack(KEYS)
if redis.call('EXISTS', key) == 0 then return {'ok', 0} end
local no = held(lease, fence, '')
if no then return {no} end
redis.call('DEL', key, items, order)
return {'ok', 1}
"""
)


METADATA_TRIES = 5


class RedisConversations:
    """Part of the Redis store that stores conversations and finds single items by their ids."""

    _link: Link
    _retention: Retention
    _bounds: StateLimits

    async def create_conversation(
        self, tenant: str, conversation: StoredConversation, items: Sequence[StoredItem] = ()
    ) -> None:
        args: Args = [codec.encode_conversation(conversation), *of_items(items, self._retention, self._bounds)]
        await self._link.act(CREATE_CONVERSATION, keys.conversation(tenant, conversation.id), args)
        await self._point_into(tenant, conversation.id, items)

    async def _point_into(self, tenant: str, conversation: str, items: Sequence[StoredItem]) -> None:
        ttl = milliseconds(self._retention.conversation_s)
        if items:
            await self._link.write(*index_commands(tenant, items, ["c", conversation], ttl))

    async def conversation(self, tenant: str, conversation: str) -> StoredConversation | None:
        ((head, revision, added),) = await self._link.read(
            ("HMGET", keys.conversation(tenant, conversation)[0], "head", "revision", "upto")
        )
        return None if head is None else codec.decode_conversation(head, int(revision), int(added))

    async def conversation_items(
        self,
        tenant: str,
        conversation: str,
        *,
        after: str | None = None,
        limit: int | None = None,
        newest_first: bool = False,
        upto: int | None = None,
    ) -> tuple[StoredItem, ...] | None:
        first = "" if after is None else f"={after}"
        args: Args = [first, -1 if limit is None else limit, int(newest_first), "" if upto is None else upto]
        try:
            found = await self._link.act(READ_ITEMS, keys.conversation(tenant, conversation), args)
        except NotFound:
            return None
        return tuple(map(codec.decode_item, found))

    async def conversation_item(self, tenant: str, conversation: str, item: str) -> StoredItem | None:
        (data,) = await self._link.read(("HGET", keys.conversation(tenant, conversation)[1], item))
        return None if data is None else codec.decode_item(data)

    async def item(self, tenant: str, item: str) -> StoredItem | None:
        (place,) = await self._link.read(("GET", keys.place(tenant, item)))
        if place is None:
            return None
        kind, *where = orjson.loads(place)
        # A pointer is ["c", conversation id] or ["r", anchor, response id].
        if kind == "c":
            return await self.conversation_item(tenant, where[0], item)
        (record,) = await self._link.read(record_command(tenant, *where))
        if None in record:
            return None
        home = codec.decode_response(*record)
        return next((one for one in home.input + home.output if one.id == item), None)

    async def append(
        self,
        tenant: str,
        conversation: str,
        items: Sequence[StoredItem],
        *,
        revision: int | None = None,
        lease: Lease | None = None,
    ) -> int:
        args: Args = [
            fence(tenant, conversation, lease),
            "" if revision is None else revision,
            *of_items(items, self._retention, self._bounds if lease is None else UNLIMITED),
        ]
        now = await self._link.act(APPEND, self._conversation_keys(tenant, conversation), args)
        await self._point_into(tenant, conversation, items)
        return int(now)

    def _conversation_keys(self, tenant: str, conversation: str) -> list[str]:
        return [*keys.conversation(tenant, conversation), *keys.lease(tenant, conversation)]

    async def set_metadata(
        self, tenant: str, conversation: str, metadata: Mapping[str, Json]
    ) -> StoredConversation | None:
        ttl = milliseconds(self._retention.conversation_s)
        for tried in range(METADATA_TRIES):
            was = await self.conversation(tenant, conversation)
            if was is None:
                return None
            changed = replace(was, metadata=dict(metadata))
            args: Args = [codec.encode_conversation(was), codec.encode_conversation(changed), ttl]
            try:
                await self._link.act(SET_HEAD, keys.conversation(tenant, conversation), args)
            except NotFound:
                return None
            except StoreConflict:
                if tried == METADATA_TRIES - 1:
                    raise
            else:
                return changed
        return None

    async def delete_item(self, tenant: str, conversation: str, item: str) -> bool:
        named = self._conversation_keys(tenant, conversation)
        return bool(await self._link.act(DELETE_ITEM, named, [item]))

    async def delete_conversation(self, tenant: str, conversation: str) -> bool:
        named = self._conversation_keys(tenant, conversation)
        return bool(await self._link.act(DELETE_CONVERSATION, named, []))
