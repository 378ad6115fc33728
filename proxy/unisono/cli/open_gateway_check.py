"""Check that a gateway that other machines can reach has a secret key."""

from __future__ import annotations

import logging
import re

from unisono.config import Config
from unisono.config.environment_and_credentials import MASTER_KEY_VARIABLE
from unisono.errors import ConfigError
from unisono.net.special_addresses import is_loopback

# Publicly known keys, from documentation and examples.
KNOWN_KEYS = frozenset(
    (
        "sk-1234",
        "sk-12345",
        "sk-123456",
        "sk-master",
        "sk-test",
        "sk-xxx",
        "changeme",
        "change-me",
        "secret",
        "password",
    )
)
# Matches the name of a variable, which was set as key instead of the variable's value.
_VARIABLE_NAME = re.compile(r"(os\.environ/|\$\{?)?[A-Z][A-Z0-9_]*\}?")


def is_known_key(key: str) -> bool:
    """Return True if a key is publicly known, or is the name of a variable instead of its value."""
    return key.lower() in KNOWN_KEYS or ("_" in key and _VARIABLE_NAME.fullmatch(key) is not None)


def refuse_to_be_open(config: Config, host: str) -> None:
    """Raise ConfigError if other machines can reach the address and there is no secret key.

    On a loopback address, a publicly known key causes only a warning.
    """
    key = config.general_settings.master_key
    if key is not None and is_known_key(key.get_secret_value()):
        fault = (
            "general_settings.master_key: the key is publicly known, or the name of a variable instead of its value; "
            f"set a secret key (`master_key: os.environ/{MASTER_KEY_VARIABLE}`)"
        )
        if not is_loopback(host):
            raise ConfigError(f"{fault}, or listen on 127.0.0.1")
        logging.getLogger("unisono.config").warning(fault)
    if config.general_settings.master_key is None and not is_loopback(host):
        raise ConfigError(
            f"general_settings.master_key: not set, so anyone who can reach {host} could use your models. Set a "
            f"key (`master_key: os.environ/{MASTER_KEY_VARIABLE}`), or listen on 127.0.0.1"
        )
