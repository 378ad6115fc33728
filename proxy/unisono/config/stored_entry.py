"""Validation of entries of `model_list` that are added at run time.

They are validated in the same way as the entries of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from unisono.config.environment_and_credentials import ENVIRONMENT_PREFIX
from unisono.config.load import parse
from unisono.config.model_settings import ModelEntry
from unisono.config.root_config import Config
from unisono.errors import ConfigError

# Keys of `model_info` that the admin API adds to its responses. Clients may send them back in updates.
ANSWER_KEYS: Final = frozenset(
    {"db_model", "created_at", "created_by", "updated_at", "updated_by", "state", "error", "drained", "running"}
)
# Backend kinds that read files or start processes on the machine of the gateway.
LOCAL_KINDS: Final = frozenset({"mlx", "replay"})
_ENTRY: Final = re.compile(r"model_list\[(\d+)\]")


def to_entry(settings: Mapping[str, Any], config: Config, environ: Mapping[str, str]) -> ModelEntry:
    """Return the validated entry with these settings.

    The entry may use the credentials of the configuration, and only the environment variables in
    `unisono.model_variables`. Raises ConfigError for invalid settings, with paths relative to the entry.
    """
    for path, name in _variables(settings, ""):
        if name not in config.unisono.model_variables:
            raise ConfigError(
                f"{path}: entries that are added at run time may not read the environment variable {name}; add the "
                "variable to `unisono.model_variables`, or send its value"
            )
    own = {name: value.get_secret_value() for name, value in config.environment_variables.items()}
    tree = {
        "model_list": [without_answer_keys(settings)],
        "credential_list": [
            {"credential_name": each.credential_name, "credential_values": each.credential_values}
            for each in config.credential_list
        ],
        "unisono": {"acknowledge": list(config.unisono.acknowledge)},
    }
    try:
        loaded = parse(tree, {**environ, **own})
    except ConfigError as error:
        raise ConfigError(entry_message(error, 0, lambda index: f"model_list[{index}]")) from None
    if not loaded.config.model_list:
        # The entry is blocked or has an unsupported mode. In a file, the loader skips such entries with a warning.
        raise ConfigError(entry_message(ConfigError(loaded.warnings[0]), 0, str))
    entry = loaded.config.model_list[0]
    if entry.kind in LOCAL_KINDS:
        raise ConfigError(
            f"litellm_params.model: the backend kind `{entry.kind}` runs on the machine of the gateway; add the entry "
            "to `model_list` in the file"
        )
    if entry.unisono.wake is not None:
        raise ConfigError(
            "unisono.wake: not allowed in entries that are added at run time, because the gateway's machine runs the "
            "command or sends the request; add the entry to `model_list` in the file"
        )
    return entry


def without_answer_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without the keys that the admin API adds to `model_info`."""
    info = settings.get("model_info")
    if not isinstance(info, Mapping):
        return dict(settings)
    return {**settings, "model_info": {key: value for key, value in info.items() if key not in ANSWER_KEYS}}


def with_entries(config: Config, entries: Sequence[ModelEntry]) -> Config:
    """Return the configuration with further entries, which follow those of the file."""
    return config.model_copy(update={"model_list": (*config.model_list, *entries)}) if entries else config


def entry_message(error: ConfigError, index: int, name_of: Callable[[int], str]) -> str:
    """Return the first message of an error about the entry `index`.

    Paths in the message are relative to the entry. If the message contains the path of a different entry, the path is
    replaced by the result of `name_of` for the index of that entry.
    """
    lines = str(error).splitlines()
    line = lines[1 if len(lines) > 1 else 0].strip().removeprefix(f"model_list[{index}]").lstrip(".")
    return _ENTRY.sub(lambda found: name_of(int(found[1])), line)


def _variables(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield every reference to an environment variable: its path, and the variable's name."""
    match value:
        case str() if value.startswith(ENVIRONMENT_PREFIX):
            yield path, value.removeprefix(ENVIRONMENT_PREFIX)
        case Mapping():
            for key, inner in value.items():
                yield from _variables(inner, f"{path}.{key}".lstrip("."))
        case list():
            for index, inner in enumerate(value):
                yield from _variables(inner, f"{path}[{index}]")
