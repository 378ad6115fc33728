"""Configuration reload while requests are in progress.

Settings of the listener and the process take effect only after a restart. An invalid configuration changes nothing: the
log names the wrong key.
"""

from __future__ import annotations

import logging

from unisono.app import build
from unisono.config import Config
from unisono.errors import ConfigError
from unisono.observe.logs import start_logging
from unisono.observe.redaction import secrets_of
from unisono.server.app_switch import AppSwitch

# Settings under `unisono:` that belong to the listener and to the process.
AT_START = ("header_timeout_s", "max_connections", "shutdown_grace_s")
# Maximum wait for the first probes of new backends, in seconds. The old configuration serves meanwhile.
PATIENCE_S = 3.0

log = logging.getLogger("unisono.serve")


async def apply(switch: AppSwitch, new: Config, share: int = 1) -> None:
    """Serve new requests with another configuration.

    Raises ConfigError, and then nothing has changed.
    """
    old = switch.gateway.config
    await switch.replace(lambda gateway: build(new, keep=gateway, share=share), PATIENCE_S)
    # Requests that started before may still log secrets of the old configuration.
    start_logging(new.unisono.log_level, {*secrets_of(old), *secrets_of(new)})
    for key in waiting(old, new):
        log.warning("%s: the change takes effect after a restart", key)
    log.info("the configuration was reloaded")


def waiting(old: Config, new: Config) -> list[str]:
    """Return the changed settings that take effect only after a restart."""
    return [f"unisono.{key}" for key in AT_START if getattr(old.unisono, key) != getattr(new.unisono, key)]


def log_rejected_reload(error: ConfigError) -> None:
    log.error("the configuration was not reloaded: %s", error)
