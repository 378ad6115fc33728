"""Construction of the configured hooks and guardrails.

Hooks are found by their entry points. Part of the composition root. A hook that is installed but not configured never
runs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from pydantic import JsonValue

from unisono.bootstrap.deployments import AdapterSettings
from unisono.config import Config, HookSettings
from unisono.config.guardrail_settings import CONTENT_FILTER, PRESIDIO, GuardrailParams
from unisono.core.frozen import dataclass
from unisono.core.hooks import Hook, HookFactory
from unisono.errors import ConfigError, ConfigErrors
from unisono.middleware.hook_gates import FAULTS, Failed, NamedHook, Restore
from unisono.middleware.hooks import Hooking

# Entry-point group of hooks. The configuration key that lists the active hooks has the same name.
HOOKS = "unisono.hooks"
# Names of the entry points of the hooks that implement the supported guardrails.
GUARDRAIL_HOOKS = {CONTENT_FILTER: "content_filter", PRESIDIO: "presidio"}
# Values of the option `where` of these hooks. They are repeated here, because hooks are not imported as modules.
INPUT, OUTPUT = "input", "output"
# Methods that every hook must have. A missing method is an error at startup.
METHODS = ("before", "after", "aclose")

log = logging.getLogger("unisono.hooks")


@dataclass(frozen=True, slots=True)
class Hookset:
    """Hooks and guardrails of one gateway, in the order in which they run."""

    hooks: tuple[NamedHook, ...] = ()

    def gates(self, restore: Restore) -> Hooking:
        return Hooking(self.hooks, restore)

    async def aclose(self) -> None:
        # If closing a hook fails, the other hooks must be closed nevertheless.
        for named in self.hooks:
            try:
                await named.hook.aclose()
            except FAULTS as error:
                log.exception("cannot close a hook", extra={"hook": named.name}, exc_info=error)


def build_hooks(config: Config, failed: Failed | None = None) -> Hookset:
    """Build the guardrails and then the hooks, without calling their methods.

    `failed` is called each time a hook fails at run time. Raises ConfigError if a hook cannot be built.
    """
    is_guarded = config.guardrails or any(entry.litellm_params.guardrails for entry in config.model_list)
    if not config.unisono.hooks and not is_guarded:
        return Hookset()
    installed = {point.name: point for point in entry_points(group=HOOKS)}
    counts: Counter[str] = Counter()
    errors = ConfigErrors()
    hooks = [*_guardrails(config, installed, failed, errors)]
    for index, entry in enumerate(config.unisono.hooks):
        path = f"{HOOKS}[{index}]"
        counts[entry.name] += 1
        # A hook that is configured twice gets two different names, because its annotations are stored by name.
        name = entry.name if counts[entry.name] == 1 else f"{entry.name}-{counts[entry.name]}"
        with errors:
            hook = _hook(entry, path, installed, f"{path}.{entry.name}")
            hooks.append(NamedHook(name, hook, entry.timeout_s, entry.fail == "open", failed))
    errors.raise_all()
    return Hookset(tuple(hooks))


def _guardrails(
    config: Config, installed: dict[str, EntryPoint], failed: Failed | None, errors: ConfigErrors
) -> Iterator[NamedHook]:
    """Yield a hook for each valid guardrail. Add the errors of invalid guardrails to `errors`."""
    names = [guardrail.guardrail_name for guardrail in config.guardrails]
    for index, guardrail in enumerate(config.guardrails):
        path, params = f"guardrails[{index}]", guardrail.litellm_params
        name = guardrail.guardrail_name
        settings = HookSettings(name=GUARDRAIL_HOOKS[params.guardrail], options=_options(params))
        hook = None
        with errors:
            if name in names[:index]:
                raise ConfigError(f"{path}.guardrail_name: another guardrail has the same name; rename one guardrail")
            hook = _hook(settings, path, installed, f"{path}.litellm_params")
        if hook is None:
            continue
        models = frozenset(entry.model_name for entry in config.model_list if name in entry.litellm_params.guardrails)
        yield NamedHook(name, hook, settings.timeout_s, failed=failed, is_default=params.default_on, models=models)


def _options(params: GuardrailParams) -> dict[str, JsonValue]:
    """Return the options of the hook that implements a guardrail."""
    where: list[JsonValue] = [
        *([INPUT] if {"pre_call", "during_call"} & {*params.mode} else []),
        *([OUTPUT] if "post_call" in params.mode else []),
    ]
    if params.guardrail == PRESIDIO:
        options: dict[str, JsonValue] = {
            "analyzer": params.presidio_analyzer_api_base,
            "anonymizer": params.presidio_anonymizer_api_base,
            "language": params.presidio_language,
            "score_threshold": params.presidio_score_threshold,
            "entities": {**params.pii_entities_config},
        }
    else:
        options = {
            "patterns": [pattern.model_dump() for pattern in params.patterns],
            "blocked_words": [word.model_dump() for word in params.blocked_words],
            "keyword_redaction_tag": params.keyword_redaction_tag,
            "pattern_redaction_format": params.pattern_redaction_format,
        }
    return {"where": where, **options}


def _hook(entry: HookSettings, path: str, installed: dict[str, EntryPoint], options_path: str) -> Hook:
    if entry.name not in installed:
        known = ", ".join(sorted(installed)) or "none"
        raise ConfigError(f"{path}: unknown hook `{entry.name}`; installed hooks: {known}")
    # Hooks are code of third parties, so they may raise any exception. `SystemExit` would end the process.
    try:
        factory: HookFactory = installed[entry.name].load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path}: the hook `{entry.name}` cannot be imported: {error}") from error
    options = AdapterSettings(entry.options)
    try:
        hook = factory(options)
    except ConfigError as error:
        raise ConfigError(f"{options_path}.{error}") from error
    except (Exception, SystemExit) as error:
        # ConfigError lets a process that reloads its configuration continue with the last valid configuration.
        raise ConfigError(
            f"{path}: the hook `{entry.name}` failed to start: {type(error).__name__}: {error}"
        ) from error
    if options.unread:
        key = options.unread[0]
        raise ConfigError(f"{options_path}.{key}: the hook has no option `{key}`; remove it")
    if missing := [method for method in METHODS if not callable(getattr(hook, method, None))]:
        raise ConfigError(f"{path}: the hook `{entry.name}` has no method `{missing[0]}`; add the method to the hook")
    return hook
