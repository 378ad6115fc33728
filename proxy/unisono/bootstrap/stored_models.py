"""Deployments in the store, beside those of the configuration file.

Part of the composition root. Every process reads them, follows their changes and serves them as if they were in its
file. An entry that does not fit the file is not served; its error is shown instead.
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

from unisono.bootstrap.backends import deployment_names
from unisono.config import Config, ModelEntry
from unisono.config.stored_entry import entry_message, to_entry, with_entries
from unisono.core.directory import DirectoryEntry
from unisono.core.frozen import dataclass
from unisono.errors import ConfigError
from unisono.routing.pool import RoutingPool

if TYPE_CHECKING:
    from unisono.api.sealing import Sealer

# Key of `DirectoryEntry.metadata` with the sealed settings.
SEALED: Final = "sealed"
UNREADABLE: Final = (
    "litellm_params: the settings cannot be decrypted, because `unisono.salt_key` has changed; send them again"
)
# Maximum wait until the process uses a change, in seconds.
APPLY_TIMEOUT_S: Final = 5.0

Built = TypeVar("Built")
Settings = Mapping[str, Any]


def seal_settings(sealer: Sealer, id: str, settings: Settings) -> dict[str, Any]:
    """Return the settings of a deployment as metadata for the store, where they are encrypted."""
    return {SEALED: sealer.encrypt(_owner(id), orjson.dumps(dict(settings)))}


def open_settings(sealer: Sealer, entry: DirectoryEntry) -> Settings | None:
    """Return the settings of a stored deployment; None if they cannot be decrypted."""
    try:
        opened: Settings = orjson.loads(sealer.decrypt(_owner(entry.id), str(entry.metadata[SEALED])))
    except ValueError:
        return None
    return opened


def is_stored(entry: DirectoryEntry) -> bool:
    """Return False for an entry that only marks a deployment of the file as drained."""
    return SEALED in entry.metadata


def _owner(id: str) -> str:
    return f"model {id}"


@dataclass(frozen=True, slots=True)
class StoredModels:
    """Deployments of the store, as one process serves them.

    `sources` are the entries by id, `settings` the decrypted settings of those that can be read. `problems` are the
    reasons why others are not served, by id.
    """

    sources: Mapping[str, DirectoryEntry] = field(default_factory=lambda: MappingProxyType({}))
    settings: Mapping[str, Settings] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def drained(self) -> frozenset[str]:
        """Names of all drained deployments, also of those in the file."""
        return frozenset(id for id, entry in self.sources.items() if entry.is_blocked)

    def is_served(self, name: str) -> bool:
        """Return whether the deployment with this name is one of the store."""
        return name in self.settings and name not in self.problems


NO_MODELS: Final = StoredModels()
Build = Callable[[Config, StoredModels], Built]


def read_models(sealer: Sealer, entries: Sequence[DirectoryEntry]) -> StoredModels:
    """Return the stored deployments; those that cannot be decrypted are problems."""
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
    """Build something from the file's configuration and all stored deployments that fit.

    Those that do not fit become problems. Raises ConfigError if the file itself is wrong.
    """
    good: dict[str, ModelEntry] = {}
    # Another file may have other problems.
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
    # At least one entry contradicts the file or another entry: find it by adding them one by one.
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
    """Raise ConfigError, with paths within the entry, if a deployment would not be served."""
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
    """Return the message about the entry that follows those of the configuration."""
    names = deployment_names(config.model_list)
    return entry_message(error, len(names), lambda index: f"the deployment `{names[index]}`")


def file_config(config: Config, models: StoredModels) -> Config:
    """Return the configuration without the deployments of the store."""
    own = tuple(entry for entry in config.model_list if not models.is_served(entry.model_info.id or ""))
    return config if len(own) == len(config.model_list) else config.model_copy(update={"model_list": own})


class ModelFeed:
    """Link between the admin API and the task of this process that applies changes.

    Without such a task, `applied` returns at once.
    """

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        # What the process serves now, once the task runs.
        self.current: Callable[[], tuple[Config, RoutingPool, StoredModels]] | None = None
        self._waiting: set[asyncio.Event] = set()

    def report(self, current: Callable[[], tuple[Config, RoutingPool, StoredModels]]) -> None:
        """Report that the process serves something else from now on."""
        self.current = current
        for waiter in self._waiting:
            waiter.set()

    async def applied(self, id: str, entry: DirectoryEntry | None) -> None:
        """Wait until the process serves `entry` or a later version of it, at most `APPLY_TIMEOUT_S`.

        If `entry` is None, wait until the process no longer serves the deleted model `id`.
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
