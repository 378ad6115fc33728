"""Notification of waiting readers: one subscription per process, with a channel per log.

A message contains no data; it only signals that there are new events. A lost message causes a short delay, because
readers also poll. A channel without readers is unsubscribed after `LINGER_S` seconds, because readers usually return.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio.client import PubSub

from unisono.store.event_wait import Waiting

log = logging.getLogger("unisono.store")

# Delay before a lost connection is opened again, in seconds.
RECONNECT_DELAY_S = 0.25
# Minimum time for which a channel without readers stays subscribed, in seconds.
LINGER_S = 2.0


class Listener:
    """Listener that wakes readers in `waiting` whose channel received a message."""

    def __init__(self, connect: Callable[[], Awaitable[PubSub]], waiting: Waiting) -> None:
        self._connect = connect
        self._waiting = waiting
        self._subscriptions: set[str] = set()
        self._subscribed: set[str] = set()
        self._has_changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False

    def subscribe(self, channel: str) -> None:
        """Subscribe to a channel.

        Its readers are woken when the subscription becomes active, because they may have missed earlier messages.
        """
        if channel not in self._subscriptions:
            self._subscriptions.add(channel)
            self._has_changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="store-listener")

    async def aclose(self) -> None:
        self._is_closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        # A task group drops its own cancellation if one of its tasks fails, for example for a broken connection. The
        # loop therefore also ends by `_is_closing`.
        while not self._is_closing:
            subscription = asyncio.create_task(self._start())
            try:
                # Without `shield`, a cancellation would make the library lose the connection that it is opening.
                pubsub = await asyncio.shield(subscription)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._update_subscriptions(pubsub))
                    both.create_task(self._listen(pubsub))
            except* Exception as errors:
                # A broken connection raises errors of many kinds: open a new one.
                log.debug("the subscription connection was lost", extra={"cause": repr(errors.exceptions[0])})
                self._waiting.wake_all()
            finally:
                await asyncio.wait([subscription])
                if subscription.exception() is None:
                    await _close(subscription.result())
            await asyncio.sleep(RECONNECT_DELAY_S)

    async def _start(self) -> Any:
        pubsub: Any = await self._connect()
        self._subscribed = set(self._subscriptions)
        try:
            await pubsub.subscribe(*self._subscribed)
        except Exception:
            await _close(pubsub)
            raise
        return pubsub

    async def _update_subscriptions(self, pubsub: PubSub) -> None:
        """Subscribe to requested channels, and end subscriptions without readers for `LINGER_S`."""
        loop = asyncio.get_running_loop()
        tidy_at = loop.time() + LINGER_S
        idle: set[str] = set()
        while True:
            self._has_changed.clear()
            if fresh := self._subscriptions - self._subscribed:
                await pubsub.subscribe(*fresh)
                self._subscribed |= fresh
            if loop.time() >= tidy_at:
                tidy_at = loop.time() + LINGER_S
                alone = {channel for channel in self._subscribed if channel not in self._waiting}
                await self._unsubscribe(pubsub, alone & idle)
                idle = alone
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(tidy_at):
                    await self._has_changed.wait()

    async def _unsubscribe(self, pubsub: PubSub, channels: set[str]) -> None:
        # Keep one channel: a connection without subscriptions cannot be read.
        channels = channels if channels != self._subscribed else set(list(channels)[1:])
        if channels:
            self._subscriptions -= channels
            self._subscribed -= channels
            await pubsub.unsubscribe(*channels)

    async def _listen(self, pubsub: PubSub) -> None:
        while True:
            message = await pubsub.get_message(timeout=1.0)
            if message is not None and message["type"] in ("message", "subscribe"):
                self._waiting.wake(message["channel"].decode())


async def _close(pubsub: Any) -> None:
    """Close a subscription connection, ignoring errors: it may be broken already."""
    with contextlib.suppress(Exception):
        await pubsub.aclose()
