"""Conversations on Redis: ordered items, metadata, and the location of each item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import orjson

from unisono.core.conversation import Json
from unisono.core.state_store import Lease, Retention, StoredConversation, StoredItem
from unisono.errors import NotFound, StoreConflict
from unisono.store import codec
from unisono.store.codec import UNLIMITED, StateLimits
from unisono.store.redis import conversation_scripts, keys
from unisono.store.redis.connection import Link
from unisono.store.redis.responses import index_commands, record_command
from unisono.store.redis.script import Args, fence, milliseconds, of_items

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
        await self._link.act(conversation_scripts.CREATE_CONVERSATION, keys.conversation(tenant, conversation.id), args)
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
            found = await self._link.act(conversation_scripts.READ_ITEMS, keys.conversation(tenant, conversation), args)
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
        now = await self._link.act(conversation_scripts.APPEND, self._conversation_keys(tenant, conversation), args)
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
                await self._link.act(conversation_scripts.SET_HEAD, keys.conversation(tenant, conversation), args)
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
        return bool(await self._link.act(conversation_scripts.DELETE_ITEM, named, [item]))

    async def delete_conversation(self, tenant: str, conversation: str) -> bool:
        named = self._conversation_keys(tenant, conversation)
        return bool(await self._link.act(conversation_scripts.DELETE_CONVERSATION, named, []))
