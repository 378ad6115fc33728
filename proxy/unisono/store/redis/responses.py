"""Responses on Redis: records, items, event logs, and renewal of a chain of responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Unpack

import orjson

from unisono.core.conversation import Tokens
from unisono.core.state_store import (
    NOTHING_LOGGED,
    EventPage,
    Lease,
    LogWrite,
    Retention,
    StoredItem,
    StoredResponse,
    WriteOptions,
)
from unisono.errors import StoreUnavailable
from unisono.store import codec
from unisono.store.codec import UNLIMITED, StateLimits
from unisono.store.event_wait import Waiting, until_some
from unisono.store.redis import keys, response_scripts
from unisono.store.redis.clients import Command
from unisono.store.redis.connection import Link
from unisono.store.redis.pubsub import Listener
from unisono.store.redis.script import Args, fence, milliseconds, of_items, of_log
from unisono.store.redis.write_history import WriteHistory
from unisono.store.response_renewal import MIN_LEFT

# A response with at least this number of items is encoded in a thread, so that it does not block the event loop.
OFF_LOOP_ITEMS = 1000


class RedisResponses:
    """Part of the Redis store for responses and their event logs."""

    _link: Link
    _listener: Listener
    _waiting: Waiting
    _retention: Retention
    _bounds: StateLimits

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
        head, input, output = await encoded(response, bounds)
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
        pointers = index_commands(tenant, response.input + response.output, ["r", anchor, response.id], ttl)
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

    async def responses(self, tenant: str, ids: Sequence[str]) -> tuple[StoredResponse | None, ...]:
        if not ids:
            return ()
        # Most responses are stored under their own id. One round trip reads these, and the anchors of the others.
        commands: list[Command] = [record_command(tenant, id, id) for id in ids]
        commands += [("GET", keys.anchor(tenant, id)) for id in ids]
        answers = await self._link.read(*commands)
        records, anchors = answers[: len(ids)], answers[len(ids) :]
        elsewhere = [n for n, anchor in enumerate(anchors) if anchor is not None]
        if elsewhere:
            moved = await self._link.read(*(record_command(tenant, anchors[n].decode(), ids[n]) for n in elsewhere))
            for n, record in zip(elsewhere, moved, strict=True):
                records[n] = record
        return tuple(None if None in record else codec.decode_response(*record) for record in records)

    async def _anchor(self, tenant: str, response: str) -> str:
        (anchor,) = await self._link.read(("GET", keys.anchor(tenant, response)))
        return response if anchor is None else anchor.decode()

    async def delete_response(self, tenant: str, response: str) -> bool:
        named = keys.response(tenant, await self._anchor(tenant, response), response)
        return bool(await self._link.act(response_scripts.FORGET, named, [named[1]]))

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


async def encoded(response: StoredResponse, bounds: StateLimits) -> tuple[bytes, bytes, bytes]:
    """Encode the head, input and output of a response; use a thread for a long response."""
    if len(response.input) + len(response.output) < OFF_LOOP_ITEMS:
        return codec.encode_response(response, bounds)
    return await asyncio.to_thread(codec.encode_response, response, bounds)


def index_commands(tenant: str, items: Sequence[StoredItem], place: list[str], ttl: int) -> list[Command]:
    """Return the commands that store the location `place` of each item for `ttl` milliseconds."""
    where = orjson.dumps(place)
    return [("SET", keys.place(tenant, item.id), where, "PX", ttl) for item in items]


def record_command(tenant: str, anchor: str, response: str) -> Command:
    """Return the command that reads the head, input and output of a stored response."""
    return ("HMGET", keys.response(tenant, anchor, response)[0], "head", "input", "output")
