"""Calls that wake backends, as configured in `unisono.wake`. Part of the composition root."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Final

from unisono.config.model_settings import WakeSettings
from unisono.routing.deployment_config import WakeRules

# Environment variables that commands get. All others are left out, because they may be secrets of the gateway.
VARIABLES: Final = ("HOME", "LANG", "PATH", "TZ", "USER")


def wake_rules(settings: WakeSettings | None) -> WakeRules | None:
    """Return the rules for waking a backend, or None if it is not to be woken."""
    if settings is None:
        return None
    if settings.url is not None:
        url = settings.url.get_secret_value()
        return WakeRules(lambda: _post(url, settings.timeout_s), settings.timeout_s)
    return WakeRules(lambda: _run(settings.command), settings.timeout_s)


async def _post(url: str, timeout_s: float) -> None:
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.post(url, allow_redirects=False) as answer,
        ):
            if answer.status >= 400:
                raise OSError(f"status {answer.status}")
    except aiohttp.ClientError as error:
        # The message may contain the URL, which is secret.
        raise OSError(type(error).__name__) from None


async def _run(command: Sequence[str]) -> None:
    environment = {name: value for name in VARIABLES if (value := os.environ.get(name)) is not None}
    none = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdin=none, stdout=none, stderr=none, env=environment)
    try:
        status = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        raise
    if status:
        raise OSError(f"exit status {status}")
