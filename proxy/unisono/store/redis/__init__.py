"""Shared store: Redis 6.2+ or Valkey, standalone, with Sentinel, or as a cluster.

Replicas of the gateway need to share nothing but this store. Each operation has a short deadline. The store does not
repeat operations. Callers may repeat them, because each write of a record is one idempotent script on one hash slot.
Pointers (the location of an item, the conversation of a response) are written after their targets, and before the write
is acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

import orjson

from unisono.core.conversation import Json, Tokens
from unisono.core.state_store import (
    NOTHING_LOGGED,
    BackgroundRun,
    EventPage,
    Lease,
    LogWrite,
    Retention,
    StoredConversation,
    StoredItem,
    StoredResponse,
    WriteOptions,
)
from unisono.errors import NotFound, StoreConflict, StoreUnavailable
from unisono.store import codec
from unisono.store.codec import UNLIMITED, StateLimits
from unisono.store.event_wait import Waiting, until_some
from unisono.store.redis import conversation_scripts, keys, lease_scripts, response_scripts
from unisono.store.redis.access import KeptKeys
from unisono.store.redis.accounts import RedisAccounts
from unisono.store.redis.command_client import Command
from unisono.store.redis.connection import Link
from unisono.store.redis.history import WriteHistory
from unisono.store.redis.pubsub import Listener
from unisono.store.redis.request_records import RedisRequests
from unisono.store.redis.script import Args, fence, milliseconds, of_items, of_log
from unisono.store.redis.server_checks import check_servers
from unisono.store.redis.traces import RedisTraces
from unisono.store.renewal import MIN_LEFT
from unisono.store.write_errors import refusal

METADATA_TRIES = 5
# A response with at least this number of items is encoded in a thread, so that it does not block the event loop.
OFF_LOOP_ITEMS = 1000


class RedisStore(KeptKeys, RedisAccounts, RedisTraces, RedisRequests):
    """Store on a Redis or Valkey server.

    `url` is redis://, rediss://, unix://, redis+sentinel://h1,h2/name[/db] or redis+cluster://h1,h2; `valkey` may
    replace `redis` in the scheme. `deadline_s` limits each operation, in seconds. `replicas` is the number of Redis
    replicas that must acknowledge a write. None means one if the primary has replicas, otherwise zero. Raises
    `ConfigError` for an invalid address.
    """

    def __init__(
        self,
        url: str,
        retention: Retention | None = None,
        bounds: StateLimits | None = None,
        deadline_s: float = 0.25,
        replicas: int | None = None,
    ) -> None:
        self._link = Link(url, deadline_s, replicas)
        self._replicas = replicas
        self._retention = retention or Retention()
        self._bounds = bounds or StateLimits()
        self._waiting = Waiting()
        self._known_accounts = set()
        self._listener = Listener(self._link.pubsub, self._waiting)

    async def start(self) -> tuple[str, ...]:
        await self.check()
        return await check_servers(self._link, self._replicas)

    async def aclose(self) -> None:
        await self._listener.aclose()
        await self._link.aclose()

    async def check(self, beginning: StoredResponse | None = None, tenant: str = "") -> None:
        if beginning is not None:
            _, input, _ = await self._encoded(beginning, self._bounds)
            await self._check_room(tenant, beginning.conversation, len(input))
        else:
            await self._link.check_replicas()
        # A server that is full, read-only or unable to persist refuses this write like any other. The write is a
        # script, like the other writes, because an access control list may deny scripts.
        await self._link.act(lease_scripts.TRY, [keys.NEVER], [])

    async def _check_room(self, tenant: str, conversation: str | None, size: int) -> None:
        if conversation is not None:
            (used,) = await self._link.read(("HGET", keys.conversation(tenant, conversation)[0], "bytes"))
            if int(used or 0) + size > self._bounds.conversation:
                raise refusal("large")

    async def create(self, tenant: str, response: StoredResponse, **options: Unpack[WriteOptions]) -> None:
        await self._save(tenant, response, True, **options)

    async def update(self, tenant: str, response: StoredResponse, **options: Unpack[WriteOptions]) -> None:
        await self._save(tenant, response, False, **options)

    async def _save(
        self,
        tenant: str,
        response: StoredResponse,
        new: bool,
        lease: Lease | None = None,
        log: LogWrite = NOTHING_LOGGED,
        revision: int | None = None,
    ) -> None:
        # The script reads its arguments in this order.
        bounds = self._bounds if new and not response.status.terminal else UNLIMITED
        head, input, output = await self._encoded(response, bounds)
        anchor, retention = response.anchor, self._retention
        named = [*keys.response(tenant, anchor, response.id), *keys.lease(tenant, anchor)]
        appended = response.input + response.output if revision is not None else ()
        args: Args = [
            int(new),
            fence(tenant, anchor, lease),
            head,
            input,
            output,
            int(response.status.terminal),
            milliseconds(retention.response_s),
            milliseconds(retention.log_s),
            named[1],
            "" if revision is None or response.conversation is None else revision,
            self._link.epoch,
            *of_items(appended, retention, UNLIMITED),
            *of_log(log),
        ]
        await self._link.act(response_scripts.SAVE, [*named, *keys.conversation(tenant, anchor)], args)
        # Readers know only the id of an item or response, but the keys of a response contain its anchor: the id of its
        # conversation, or its own id without one. Pointers map the ids to those keys. A pointer may exist without its
        # target, but a write is acknowledged only after its pointers are written.
        ttl = milliseconds(retention.response_s)
        pointers = self._index_commands(tenant, response.input + response.output, ["r", anchor, response.id], ttl)
        if anchor != response.id:
            pointers.append(("SET", keys.anchor(tenant, response.id), anchor, "PX", ttl))
        if new and response.ancestors:
            pointers += await self._renewals(tenant, response.ancestors)
        if pointers:
            await self._link.write(*pointers)

    async def _renewals(self, tenant: str, ancestors: Sequence[str]) -> list[Command]:
        """Return the commands that renew `ancestors`, except recently renewed responses."""
        ttl, conversation_ttl = milliseconds(self._retention.response_s), milliseconds(self._retention.conversation_s)
        named = [keys.response(tenant, ancestor, ancestor)[0] for ancestor in ancestors]
        # Only the first response of a chain may belong to a conversation. Its pointer expires at the same time.
        pointer_left, *left = await self._link.read(
            ("PTTL", keys.anchor(tenant, ancestors[0])), *(("PTTL", name) for name in named)
        )
        left[0] = max(left[0], pointer_left)
        due = [ancestor for ancestor, left_ms in zip(ancestors, left, strict=True) if left_ms < MIN_LEFT * ttl]
        commands: list[Command] = []
        for response in await self.responses(tenant, due):
            if response is None:
                continue
            items = response.input + response.output
            kept = [keys.response(tenant, response.anchor, response.id)[0], keys.anchor(tenant, response.id)]
            commands += [("PEXPIRE", name, ttl) for name in (*kept, *(keys.place(tenant, item.id) for item in items))]
            if response.conversation is not None:
                talk = keys.conversation(tenant, response.conversation)
                commands += [("PEXPIRE", name, conversation_ttl) for name in talk]
        return commands

    async def _encoded(self, response: StoredResponse, bounds: StateLimits) -> tuple[bytes, bytes, bytes]:
        if len(response.input) + len(response.output) < OFF_LOOP_ITEMS:
            return codec.encode_response(response, bounds)
        return await asyncio.to_thread(codec.encode_response, response, bounds)

    def _index_commands(self, tenant: str, items: Sequence[StoredItem], place: list[str], ttl: int) -> list[Command]:
        where = orjson.dumps(place)
        return [("SET", keys.place(tenant, item.id), where, "PX", ttl) for item in items]

    async def responses(self, tenant: str, ids: Sequence[str]) -> tuple[StoredResponse | None, ...]:
        if not ids:
            return ()
        # Most responses are stored under their own id. One round trip reads these, and the anchors of the others.
        commands: list[Command] = [_record(tenant, id, id) for id in ids]
        commands += [("GET", keys.anchor(tenant, id)) for id in ids]
        answers = await self._link.read(*commands)
        records, anchors = answers[: len(ids)], answers[len(ids) :]
        elsewhere = [n for n, anchor in enumerate(anchors) if anchor is not None]
        if elsewhere:
            moved = await self._link.read(*(_record(tenant, anchors[n].decode(), ids[n]) for n in elsewhere))
            for n, record in zip(elsewhere, moved, strict=True):
                records[n] = record
        return tuple(None if None in record else codec.decode_response(*record) for record in records)

    async def _anchor(self, tenant: str, response: str) -> str:
        (anchor,) = await self._link.read(("GET", keys.anchor(tenant, response)))
        return response if anchor is None else anchor.decode()

    async def delete_response(self, tenant: str, response: str) -> bool:
        named = keys.response(tenant, await self._anchor(tenant, response), response)
        return bool(await self._link.act(response_scripts.FORGET, named, [named[1]]))

    async def item(self, tenant: str, item: str) -> StoredItem | None:
        (place,) = await self._link.read(("GET", keys.place(tenant, item)))
        if place is None:
            return None
        kind, *where = orjson.loads(place)
        # A pointer is ["c", conversation id] or ["r", anchor, response id].
        if kind == "c":
            return await self.conversation_item(tenant, where[0], item)
        (record,) = await self._link.read(_record(tenant, *where))
        if None in record:
            return None
        home = codec.decode_response(*record)
        return next((one for one in home.input + home.output if one.id == item), None)

    async def log(self, lease: Lease, response: str, write: LogWrite) -> None:
        named = [*keys.response(lease.tenant, lease.anchor, response), *keys.lease(lease.tenant, lease.anchor)]
        args: Args = [str(lease.fence), milliseconds(self._retention.response_s), named[1], self._link.epoch]
        await self._link.act(response_scripts.LOG, named, [*args, *of_log(write)])

    async def is_log_complete(self, lease: Lease, response: str) -> bool:
        named = [*keys.response(lease.tenant, lease.anchor, response), *keys.lease(lease.tenant, lease.anchor)]
        epoch = (await self._link.current_history(named[0])).epoch
        is_complete, id = await self._link.act(response_scripts.INHERIT, named, [str(lease.fence), epoch])
        # A pooled connection may lead to a former primary, which lacks the last writes of the lease's previous owner.
        if WriteHistory(bytes(id).decode(), epoch) != await self._link.current_history(named[0]):
            raise StoreUnavailable("a failover of the store is in progress; try again")
        return bool(is_complete)

    async def events(
        self, tenant: str, response: str, first: int, *, limit: int = 512, wait_s: float = 0.0
    ) -> EventPage | None:
        stream = keys.response(tenant, await self._anchor(tenant, response), response)[1]

        async def read() -> EventPage | None:
            entries, there = await self._link.read(
                ("XRANGE", stream, f"{first}-0", "+", "COUNT", limit + 1), ("EXISTS", stream)
            )
            if not there:
                return None
            events = tuple(fields[b"d"] for _, fields in entries if b"d" in fields)
            end = bool(entries) and b"end" in entries[-1][1]
            return EventPage(first, events[:limit], end)

        if wait_s <= 0:
            return await read()
        with self._waiting.on(stream) as woken:
            self._listener.subscribe(stream)
            return await until_some(read, woken, wait_s)

    async def tokens(self, tenant: str, response: str) -> Tokens:
        key = keys.response(tenant, await self._anchor(tenant, response), response)[2]
        (data,) = await self._link.read(("GET", key))
        return codec.decode_tokens(data or b"")

    async def create_conversation(
        self, tenant: str, conversation: StoredConversation, items: Sequence[StoredItem] = ()
    ) -> None:
        args: Args = [codec.encode_conversation(conversation), *of_items(items, self._retention, self._bounds, "items")]
        await self._link.act(conversation_scripts.CREATE_CONVERSATION, keys.conversation(tenant, conversation.id), args)
        await self._point_into(tenant, conversation.id, items)

    async def _point_into(self, tenant: str, conversation: str, items: Sequence[StoredItem]) -> None:
        ttl = milliseconds(self._retention.conversation_s)
        if items:
            await self._link.write(*self._index_commands(tenant, items, ["c", conversation], ttl))

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

    async def acquire(self, tenant: str, anchor: str, owner: str, for_s: float, *, force: bool = False) -> Lease | None:
        args: Args = [owner, milliseconds(for_s), int(force), milliseconds(for_s + self._retention.response_s)]
        number = await self._link.act(lease_scripts.ACQUIRE, keys.lease(tenant, anchor), args)
        return Lease(tenant, anchor, owner, number) if number else None

    async def renew(self, lease: Lease, for_s: float) -> bool:
        return await self._extend(lease, milliseconds(for_s))

    async def release(self, lease: Lease) -> None:
        await self._extend(lease, 0)

    async def _extend(self, lease: Lease, for_ms: int) -> bool:
        ttl = for_ms + milliseconds(self._retention.response_s)
        args: Args = [lease.owner, str(lease.fence), for_ms, ttl]
        return bool(await self._link.act(lease_scripts.EXTEND, keys.lease(lease.tenant, lease.anchor), args))

    async def watch(self, run: BackgroundRun, for_s: float) -> None:
        await self._link.act(lease_scripts.WATCH, [keys.RUNS], [milliseconds(for_s), _member(run)])

    async def unwatch(self, run: BackgroundRun) -> None:
        await self._link.write(("ZREM", keys.RUNS, _member(run)))

    async def lapsed(self, limit: int = 16) -> tuple[BackgroundRun, ...]:
        found = await self._link.act(lease_scripts.LAPSED, [keys.RUNS], [limit])
        return tuple(BackgroundRun(*orjson.loads(member)) for member in found)

    async def claim(self, tenant: str, key: str, digest: str, response: str, *, for_s: float | None = None) -> str:
        kept_s = self._retention.key_s if for_s is None else for_s
        args: Args = [digest, response, milliseconds(kept_s), "" if for_s is None else "more"]
        owner: bytes = await self._link.act(lease_scripts.CLAIM, [keys.once(tenant, key)], args)
        return owner.decode()

    async def unclaim(self, tenant: str, key: str, response: str) -> None:
        await self._link.act(lease_scripts.UNCLAIM, [keys.once(tenant, key)], [response])

    async def secret(self, name: str, candidate: bytes) -> bytes:
        await self._link.write(("SET", keys.secret(name), candidate, "NX"))
        (made,) = await self._link.read(("GET", keys.secret(name)))
        return bytes(made)

    async def count(self, tenant: str, name: str, amount: int, *, once: str, for_s: float) -> int:
        named = keys.counter(tenant, name, once)
        return int(await self._link.act(lease_scripts.COUNT, named, [amount, milliseconds(for_s)]))


def _record(tenant: str, anchor: str, response: str) -> Command:
    return ("HMGET", keys.response(tenant, anchor, response)[0], "head", "input", "output")


def _member(run: BackgroundRun) -> bytes:
    return orjson.dumps([run.tenant, run.response])
