"""Deployments that are added at run time and stored in the store.

Part of the composition root. Every process reads these deployments, follows their changes, and serves them like those
in its configuration file. A stored deployment that contradicts the file is not served; its error is reported instead.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson

from unisono.bootstrap.deployments import deployment_names
from unisono.config import Config, ModelEntry
from unisono.config.stored_entry import entry_message, to_entry, with_entries
from unisono.core.directory import DirectoryEntry
from unisono.core.frozen import dataclass
from unisono.errors import ConfigError
from unisono.routing.pool import RoutingPool

if TYPE_CHECKING:
    from unisono.api.sealing import Sealer

# Key of `DirectoryEntry.metadata` that contains the encrypted settings.
SEALED: Final = "sealed"
UNREADABLE: Final = (
    "litellm_params: the settings cannot be decrypted, because `unisono.salt_key` has changed; send them again"
)
# Maximum time to wait until the process has applied a change, in seconds.
APPLY_TIMEOUT_S: Final = 5.0

Built = TypeVar("Built")
Settings = Mapping[str, Any]


def seal_settings(sealer: Sealer, id: str, settings: Settings) -> dict[str, Any]:
    """Return the encrypted settings of a deployment, as metadata of its entry in the store."""
    return {SEALED: sealer.encrypt(_owner(id), orjson.dumps(dict(settings)))}


def open_settings(sealer: Sealer, entry: DirectoryEntry) -> Settings | None:
    """Return the decrypted settings of a stored deployment, or None if they cannot be decrypted."""
    try:
        opened: Settings = orjson.loads(sealer.decrypt(_owner(entry.id), str(entry.metadata[SEALED])))
    except ValueError:
        return None
    return opened


def is_stored(entry: DirectoryEntry) -> bool:
    """Return whether an entry is a stored deployment.

    Returns False if the entry only marks a deployment in the configuration file as drained.
    """
    return SEALED in entry.metadata


def _owner(id: str) -> str:
    return f"model {id}"


@dataclass(frozen=True, slots=True)
class StoredModels:
    """Stored deployments, as one process serves them.

    All mappings have the id of the deployment as key. `sources` are all entries in the store, and `settings` the
    decrypted settings of those that can be decrypted. `problems` are the reasons why some deployments are not served.
    """

    sources: Mapping[str, DirectoryEntry] = field(default_factory=lambda: MappingProxyType({}))
    settings: Mapping[str, Settings] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def drained(self) -> frozenset[str]:
        """Names of all drained deployments: stored ones, and those of the configuration file."""
        return frozenset(id for id, entry in self.sources.items() if entry.is_blocked)

    def is_served(self, name: str) -> bool:
        """Return whether a stored deployment with this name is served."""
        return name in self.settings and name not in self.problems


NO_MODELS: Final = StoredModels()
Build = Callable[[Config, StoredModels], Built]


def read_models(sealer: Sealer, entries: Sequence[DirectoryEntry]) -> StoredModels:
    """Decrypt the stored deployments.

    For each one that cannot be decrypted, add an entry to `problems`.
    """
    settings: dict[str, Settings] = {}
    problems: dict[str, str] = {}
    for entry in filter(is_stored, entries):
        opened = open_settings(sealer, entry)
        if opened is None:
            problems[entry.id] = UNREADABLE
        else:
            settings[entry.id] = opened
    return StoredModels({entry.id: entry for entry in entries}, settings, problems)


def build_with(config: Config, models: StoredModels, build: Build[Built]) -> Built:
    """Call `build` with the configuration and all stored deployments that are valid in it.

    Returns the result of `build`. For each stored deployment that is not valid, an entry is added to `problems`. Raises
    ConfigError if the configuration file itself is invalid.
    """
    good: dict[str, ModelEntry] = {}
    # Drop earlier problems with valid settings, because the configuration file may have changed since then.
    problems = {id: problem for id, problem in models.problems.items() if id not in models.settings}
    for id, settings in models.settings.items():
        try:
            good[id] = to_entry(_named(id, settings), config, os.environ)
        except ConfigError as error:
            problems[id] = str(error)
    models = replace(models, problems=problems)
    try:
        return build(with_entries(config, [*good.values()]), models)
    except ConfigError:
        if not good:
            raise
    # At least one entry contradicts the file or another entry. Find such entries by adding the entries one by one.
    fitting: dict[str, ModelEntry] = {}
    for id, entry in good.items():
        try:
            build(with_entries(config, [*fitting.values(), entry]), models)
        except ConfigError as error:
            problems[id] = _message(error, with_entries(config, [*fitting.values()]))
        else:
            fitting[id] = entry
    return build(with_entries(config, [*fitting.values()]), replace(models, problems=problems))


def check_settings(config: Config, models: StoredModels, id: str, settings: Settings, build: Build[object]) -> None:
    """Raise ConfigError if a deployment with these settings would not be served.

    Paths in the message are relative to the entry. The deployment `id` may be new, or it may already be stored.
    """
    entry = to_entry(_named(id, settings), config, os.environ)
    others = replace(models, settings={other: known for other, known in models.settings.items() if other != id})

    def built(whole: Config, models: StoredModels) -> Config:
        build(whole, models)
        return whole

    whole = build_with(config, others, built)
    try:
        build(with_entries(whole, [entry]), models)
    except ConfigError as error:
        raise ConfigError(_message(error, whole)) from None


def _named(id: str, settings: Settings) -> Settings:
    info = settings.get("model_info") or {}
    return {**settings, "model_info": {**info, "id": id} if isinstance(info, Mapping) else info}


def _message(error: ConfigError, config: Config) -> str:
    """Return the message of an error about a new entry, which follows those in `config`."""
    names = deployment_names(config.model_list)
    return entry_message(error, len(names), lambda index: f"the deployment `{names[index]}`")


def file_config(config: Config, models: StoredModels) -> Config:
    """Return the configuration without the stored deployments."""
    own = tuple(entry for entry in config.model_list if not models.is_served(entry.model_info.id or ""))
    return config if len(own) == len(config.model_list) else config.model_copy(update={"model_list": own})


class ModelFeed:
    """Connection between the admin API and the task that applies changes of deployments.

    If no such task runs, `applied` returns at once.
    """

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        # Returns what the process serves now; None until the task has run for the first time.
        self.current: Callable[[], tuple[Config, RoutingPool, StoredModels]] | None = None
        self._waiting: set[asyncio.Event] = set()

    def report(self, current: Callable[[], tuple[Config, RoutingPool, StoredModels]]) -> None:
        """Report that the process has applied changes; `current` returns what it serves from now on."""
        self.current = current
        for waiter in self._waiting:
            waiter.set()

    async def applied(self, id: str, entry: DirectoryEntry | None) -> None:
        """Wait until the process serves the version `entry` of the deployment `id`, or a later one.

        If `entry` is None, wait until the process no longer serves the deployment. Returns in any case after
        `APPLY_TIMEOUT_S` seconds.
        """
        if self.current is None:
            return
        news = asyncio.Event()
        self._waiting.add(news)
        self.changed.set()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(APPLY_TIMEOUT_S):
                    while not self._has(id, entry):
                        await news.wait()
                        news.clear()
        finally:
            self._waiting.discard(news)

    def _has(self, id: str, entry: DirectoryEntry | None) -> bool:
        served = None if self.current is None else self.current()[2].sources.get(id)
        if entry is None or served is None:
            return served is entry
        return (served.created_at, served.revision) >= (entry.created_at, entry.revision)
