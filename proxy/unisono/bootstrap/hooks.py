"""Hooks of a configuration, found by entry point, in configured order.

Part of the composition root. Installed hooks that the configuration does not name never run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from unisono.bootstrap.backends import AdapterSettings
from unisono.config import HookSettings
from unisono.core.hooks import Hook, HookFactory
from unisono.errors import ConfigError
from unisono.middleware.hooks import FAULTS, Failed, Hooking, NamedHook

# Entry-point group of hooks, and the configuration key that names the active ones.
HOOKS = "unisono.hooks"
# A hook needs all of them; a missing method is reported at start.
METHODS = ("before", "after", "aclose")

log = logging.getLogger("unisono.hooks")


@dataclass(frozen=True, slots=True)
class Hookset:
    """Hooks of one gateway."""

    hooks: tuple[NamedHook, ...] = ()

    @property
    def gates(self) -> Hooking:
        return Hooking(self.hooks)

    async def aclose(self) -> None:
        # A hook that fails to close must not prevent the others from closing.
        for named in self.hooks:
            try:
                await named.hook.aclose()
            except FAULTS as error:
                log.exception("cannot close a hook", extra={"hook": named.name}, exc_info=error)


def build_hooks(settings: Sequence[HookSettings], failed: Failed | None = None) -> Hookset:
    """Build the hooks without calling them; `failed` is called on each failure.

    Raises ConfigError.
    """
    if not settings:
        return Hookset()
    installed = {point.name: point for point in entry_points(group=HOOKS)}
    counts: Counter[str] = Counter()
    hooks: list[NamedHook] = []
    for index, entry in enumerate(settings):
        hook = _hook(entry, f"{HOOKS}[{index}]", installed)
        counts[entry.name] += 1
        # A hook that is configured twice has two annotations.
        name = entry.name if counts[entry.name] == 1 else f"{entry.name}-{counts[entry.name]}"
        hooks.append(NamedHook(name, hook, entry.timeout_s, entry.fail == "open", failed))
    return Hookset(tuple(hooks))


def _hook(entry: HookSettings, path: str, installed: dict[str, EntryPoint]) -> Hook:
    if entry.name not in installed:
        known = ", ".join(sorted(installed)) or "none"
        raise ConfigError(f"{path}: unknown hook `{entry.name}`; installed hooks: {known}")
    # Hooks are foreign code, so any exception is possible. `SystemExit` would end the process.
    try:
        factory: HookFactory = installed[entry.name].load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path}: the hook `{entry.name}` cannot be imported: {error}") from error
    options = AdapterSettings(entry.options)
    try:
        hook = factory(options)
    except ConfigError as error:
        raise ConfigError(f"{path}.{entry.name}.{error}") from error
    except (Exception, SystemExit) as error:
        # A process that reloads its configuration continues with the last valid one.
        raise ConfigError(
            f"{path}: the hook `{entry.name}` failed to start: {type(error).__name__}: {error}"
        ) from error
    if options.unread:
        key = options.unread[0]
        raise ConfigError(f"{path}.{entry.name}.{key}: unknown key `{key}` for this hook")
    if missing := [method for method in METHODS if not callable(getattr(hook, method, None))]:
        raise ConfigError(f"{path}: the hook `{entry.name}` has no method `{missing[0]}`")
    return hook
