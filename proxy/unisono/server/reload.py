"""A configuration that is read again while requests are under way: what changes at once, and what waits for a restart.

One that cannot be served changes nothing: the log says which key is wrong, and the last one stays.
"""

from __future__ import annotations

import logging

from unisono.app import build
from unisono.config import Config
from unisono.errors import ConfigError
from unisono.observe.logs import start_logging
from unisono.observe.redaction import secrets_of
from unisono.server.app_switch import AppSwitch

AT_START = ("header_timeout_s", "max_connections", "shutdown_grace_s")
"""Settings under `unisono:` that belong to the listener and to the process."""
PATIENCE_S = 3.0
"""How long the last configuration goes on while the backends of the new one are looked at, in seconds."""

log = logging.getLogger("unisono.serve")


class NothingToRead(ConfigError):
    """There is no file that could have changed."""


async def apply(switch: AppSwitch, new: Config, share: int = 1) -> None:
    """Serve what comes from now on by the new configuration. Raises ConfigError, and then nothing has changed."""
    old = switch.gateway.config
    await switch.replace(lambda gateway: build(new, keep=gateway, share=share), PATIENCE_S)
    # What began before may still speak of the old one's secrets.
    start_logging(new.unisono.log_level, {*secrets_of(old), *secrets_of(new)})
    for key in waiting(old, new):
        log.warning("%s: a change is in force after a restart", key)
    log.info("the configuration was read again")


def waiting(old: Config, new: Config) -> list[str]:
    """The settings that differ and are not in force before the process starts again."""
    return [f"unisono.{key}" for key in AT_START if getattr(old.unisono, key) != getattr(new.unisono, key)]


def tell_kept(error: ConfigError) -> None:
    log.error("the configuration was not changed: %s", error)
