"""Webhook for alerts, with a bounded queue, retries and a signature.

Clients' requests never wait for the webhook. The operator configures its address, so private addresses are permitted,
but not those of cloud metadata services.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from hashlib import sha256
from time import time
from typing import Any, Final

import aiohttp
import orjson

from unisono.core.alerts import Alert
from unisono.core.frozen import dataclass
from unisono.errors import UnisonoError
from unisono.net.ssrf_guard import NotDialled, permitted_sockets

MAX_QUEUED: Final = 1000
# Pause before the first repetition, in seconds. The pause doubles with each repetition.
RETRY_PAUSE_S: Final = 1.0
# Maximum time in seconds for which identical alerts are suppressed.
MAX_REPEAT_S: Final = 366 * 86_400.0
# Maximum time for sending the queued alerts at shutdown, in seconds.
CLOSING_S: Final = 3.0
SIGNATURE_HEADER: Final = "x-unisono-signature"
TIMESTAMP_HEADER: Final = "x-unisono-timestamp"

# Function that reserves the alert with an id for this process, for a number of seconds. It returns False if the alert
# is already reserved.
Reserve = Callable[[str, float], Awaitable[bool]]

log = logging.getLogger("unisono.alerts")


@dataclass(frozen=True, slots=True)
class WebhookOptions:
    """Address and limits of a webhook.

    Identical alerts are sent at most once every `repeat_s` seconds, or until `Alert.once_until` if that time is longer.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret: str = field(default="", repr=False)
    timeout_s: float = 10.0
    retries: int = 3
    repeat_s: float = 3600.0


class AlertWebhook:
    """Sender that posts each alert to the webhook.

    `count` is called with an outcome (`sent`, `failed` or `dropped`) and the number of alerts with this outcome.
    """

    def __init__(self, options: WebhookOptions, reserve: Reserve, count: Callable[[str, int], None]) -> None:
        self._options = options
        self._reserve = reserve
        self._count = count
        self._waiting: deque[Alert] = deque()
        self._task: asyncio.Task[None] | None = None

    def __call__(self, alert: Alert) -> None:
        if len(self._waiting) >= MAX_QUEUED:
            self._count("dropped", 1)
            return
        self._waiting.append(alert)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_all(), name="sending alerts")

    async def aclose(self) -> None:
        """Send the queued alerts within `CLOSING_S` seconds. Count the remaining alerts as dropped."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSING_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._waiting:
            self._count("dropped", len(self._waiting))

    async def _send_all(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._options.timeout_s)
        sockets = permitted_sockets("the address belongs to a metadata service", private=True)
        connector = aiohttp.TCPConnector(limit=1, use_dns_cache=False, force_close=True, socket_factory=sockets)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            while self._waiting:
                alert = self._waiting.popleft()
                try:
                    if await self._is_first(alert):
                        await self._send(session, alert)
                except Exception as error:
                    log.exception("an alert could not be sent", exc_info=error)
                    self._count("failed", 1)

    async def _is_first(self, alert: Alert) -> bool:
        until, repeat_s = alert.once_until, self._options.repeat_s
        for_s = repeat_s if until is None else min(max(until - time(), repeat_s), MAX_REPEAT_S)
        try:
            return await self._reserve(alert.id, for_s)
        except UnisonoError:
            # The store is down, so other processes may send this alert too.
            return True

    async def _send(self, session: aiohttp.ClientSession, alert: Alert) -> None:
        body = orjson.dumps(to_message(alert))
        for attempt in range(self._options.retries + 1):
            if attempt:
                await asyncio.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))
            problem, can_retry = await self._post(session, body)
            if not problem:
                self._count("sent", 1)
                return
            if not can_retry:
                break
        log.error("an alert could not be sent", extra={"reason": problem, "alert": alert.message})
        self._count("failed", 1)

    async def _post(self, session: aiohttp.ClientSession, body: bytes) -> tuple[str, bool]:
        """Return the problem (empty if there is none), and whether a retry may solve the problem."""
        options = self._options
        headers = {**options.headers, "content-type": "application/json", **signature(options.secret, body, time())}
        try:
            async with session.post(options.url, data=body, headers=headers, allow_redirects=False) as answer:
                if answer.status < 300:
                    return "", False
                return f"status {answer.status}", answer.status >= 500 or answer.status == 429
        except aiohttp.ClientConnectorError as error:
            is_refused = isinstance(error.os_error, NotDialled)
            return (str(error.os_error), False) if is_refused else (type(error).__name__, True)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__, True


def to_message(alert: Alert) -> dict[str, Any]:
    """Return the body of the request, with the field names of LiteLLM's webhook."""
    names = {"id": alert.id, "event": alert.event, "event_group": alert.group, "event_message": alert.message}
    return {**names, **alert.facts}


def signature(secret: str, body: bytes, now: float) -> dict[str, str]:
    """Return the headers that prove the origin of a body.

    The headers contain the time, and an HMAC of time and body. If `secret` is empty, there are no headers.
    """
    if not secret:
        return {}
    stamp = str(int(now))
    digest = hmac.new(secret.encode(), f"{stamp}.".encode() + body, sha256).hexdigest()
    return {TIMESTAMP_HEADER: stamp, SIGNATURE_HEADER: f"sha256={digest}"}
