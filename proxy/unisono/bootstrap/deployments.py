"""Construction of the pool of deployments from `model_list`, without contacting a backend.

Part of the composition root.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from unisono.bootstrap.waking import wake_rules
from unisono.config import KIND_ALIASES, KINDS, Config, ModelEntry, ModelRegistry, RouterSettings
from unisono.config.router_settings import HedgeSettings
from unisono.core.install_commands import install_command
from unisono.core.ports import BackendOptions, Endpoint
from unisono.errors import ConfigError, ConfigErrors
from unisono.routing.attempt_timeouts import MinTimeouts
from unisono.routing.circuit_breaker import BreakerConfig
from unisono.routing.deployment import LiveDeployment
from unisono.routing.deployment_choice import Strategy
from unisono.routing.deployment_config import DeploymentConfig
from unisono.routing.group import RoutingRules
from unisono.routing.hedge import HedgeRules
from unisono.routing.pool import CarriedDeployment, RoutingPool
from unisono.routing.queue import QueueConfig
from unisono.routing.tags import TagRules

# The adapters are found by the entry points of this and other packages. An entry without Harmony gets an adapter that
# passes requests through to the OpenAI API of the backend. An entry of a provider uses litellm, which is imported on
# the first request.

# Entry-point group of the adapters for Harmony.
BACKENDS = "unisono.backends"
# Entry-point group of the adapters for pass-through.
PASSTHROUGH_BACKENDS = "unisono.passing"

Factory = Callable[[BackendOptions], Endpoint]


class Factories:
    """Factories of backends.

    The adapter of a backend kind is imported when an entry first needs it.
    """

    def __init__(self, config: Config, *, is_reload: bool = False) -> None:
        if is_reload:
            # Adapters may have been installed since the last time.
            _installed.cache_clear()
        self._config = config
        self._found = _installed(BACKENDS)
        self._passthrough = _installed(PASSTHROUGH_BACKENDS)

    def factory_for(self, entry: ModelEntry, path: str) -> Factory:
        """Return the factory of the backend for an entry.

        Raises ConfigError, with the available kinds, if there is no adapter for the entry.
        """
        path = f"{path}.litellm_params.model"
        if entry.by_litellm:
            return self._provider(entry, path)
        kinds = ", ".join(sorted(self._found))
        model = entry.litellm_params.model
        if not entry.kind or not entry.backend_model:
            raise ConfigError(f"{path}: must be `<backend kind>/<model>`, not `{model}`; kinds: {kinds}")
        if entry.kind not in self._found:
            why = (
                f"no adapter is installed for the backend kind `{entry.kind}`"
                if entry.kind in KINDS
                else f"unknown backend kind `{entry.kind}`, so the model cannot be served as Harmony"
            )
            raise ConfigError(f"{path}: {why}; kinds: {kinds} (and {', '.join(KIND_ALIASES)})")
        if not entry.harmony and entry.kind not in self._passthrough:
            raise ConfigError(
                f"{path}: neither `{entry.model_name}` nor `{model}` contains gpt-oss, and `{entry.kind}` serves only "
                "Harmony models; if this is a Harmony model, set `model_info: {harmony: true}`"
            )
        try:
            factory: Factory = (self._found if entry.harmony else self._passthrough)[entry.kind].load()
        except ImportError as error:
            raise ConfigError(
                f"{path}: the adapter for `{entry.kind}` cannot be imported: {error}; an extra may be missing (for "
                f"`mlx`, run `{install_command('mlx')}`)"
            ) from error
        return factory

    def _provider(self, entry: ModelEntry, path: str) -> Factory:
        """Return the factory that uses litellm. Raises ConfigError if litellm is not installed."""
        model = entry.litellm_params.model
        # Importing litellm takes seconds, so this only checks whether it is installed.
        if find_spec("litellm") is None:
            hint = f" Or {entry.harmony_hint}." if entry.harmony_hint else ""
            kinds = ", ".join(sorted(self._found))
            raise ConfigError(
                f"{path}: `{entry.kind}` is not a backend kind of Unisono ({kinds}), and litellm, which serves other "
                f"providers, is not installed; run `{install_command('litellm')}`.{hint}"
            )
        from unisono.passthrough.litellm_backend import LitellmProvider

        settings = provider_settings(entry, self._config)
        return lambda options: LitellmProvider(replace(options, model=model), **settings)


def provider_settings(entry: ModelEntry, config: Config) -> dict[str, Any]:
    """Return the settings for litellm, except for the address.

    The settings are empty if the entry is not served through litellm.
    """
    if not entry.by_litellm:
        return {}
    return {
        "params": entry.litellm_params.provider,
        "drop_params": config.litellm_settings.drop_params,
        "environment": {name: value.get_secret_value() for name, value in config.environment_variables.items()},
    }


# Listing entry points does not import the adapters. So an adapter with missing libraries does no harm until a model
# needs it. The result is cached, because reading the metadata of all installed packages is most of the work of building
# a gateway.
@cache
def _installed(group: str) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


log = logging.getLogger(__name__)

# Path of the adapter's settings within an entry.
SETTINGS = "unisono.backend"


def build_pool(
    config: Config,
    catalogue: ModelRegistry,
    *,
    share: int = 1,
    keep: RoutingPool | None = None,
    drained: Collection[str] = (),
    on_trial: Collection[str] = (),
) -> RoutingPool:
    """Build the deployments of all models without contacting a backend. Raises ConfigError.

    Limits are divided by `share`, the number of processes. Unchanged deployments of the old pool `keep` are reused.
    Deployments in `drained` get no new requests; those in `on_trial` get none until they have passed a probe."""
    check_recoveries(config)
    factories, names = Factories(config, is_reload=keep is not None), deployment_names(config.model_list)
    identities = [_identity(entry, _options(entry), config) for entry in config.model_list]
    reused, errors = _reused(config.model_list, names, identities, keep), ConfigErrors()
    carried: list[CarriedDeployment] = []
    live: dict[int, LiveDeployment] = {}
    for index, (entry, name) in enumerate(zip(config.model_list, names, strict=True)):
        options, backend = _options(entry), None
        terms = replace(_terms(entry, name, config, share), is_drained=name in drained)
        context = entry.model_info.max_input_tokens
        # Build the backend even if the old one is reused, because only the adapter can tell whether settings are valid.
        with errors:
            backend = _backend(entry, options, f"model_list[{index}]", factories)
        if backend is None:
            continue
        if passes := not entry.harmony:
            # This message helps an operator whose gpt-oss model has a different name.
            log.info("not gpt-oss: requests pass through", extra={"model": entry.model_name, "backend": name})
        same, identity = reused.get(index), identities[index]
        if same is not None:
            carried.append(CarriedDeployment(same, terms))
            live[id(entry)] = same
        else:
            live[id(entry)] = LiveDeployment(
                terms, backend, passes=passes, context=context, identity=identity, awaits_probe=name in on_trial
            )
    errors.raise_all()
    return RoutingPool(
        {model.name: [live[id(entry)] for entry in model.entries] for model in catalogue.groups()},
        routing_rules(config, share),
        fallback_models=catalogue.fallback_models,
        carried=carried,
        replaced=keep,
        prefixes=keep.prefixes if keep is not None else None,
    )


def _identity(entry: ModelEntry, options: BackendOptions, config: Config) -> tuple[object, ...]:
    """Return the settings from which the backend of an entry is built.

    If one of these settings changes, the deployment needs a new backend.
    """
    return (
        entry.harmony,
        options.kind,
        options.model,
        options.api_base,
        options.api_key,
        dict(options.extra),
        dict(options.defaults),
        provider_settings(entry, config),
        entry.model_info.max_input_tokens,
    )


def routing_rules(config: Config, share: int = 1) -> RoutingRules:
    """Return the settings for routing.

    The limits of queues are divided by `share`, the number of processes.
    """
    router, gateway = config.router_settings, config.unisono
    per_key, is_by_quality = gateway.max_queue_per_key, router.routing_strategy == "quality-aware"
    return RoutingRules(
        strategy=Strategy.PREFIX_AWARE if is_by_quality else Strategy(router.routing_strategy),
        bounds=QueueConfig(
            # 0 means that no request waits. `_part` would return 1.
            length=_part(gateway.max_queue, share) if gateway.max_queue else 0,
            per_owner=_part(per_key, share) if per_key else per_key,
            timeout_s=gateway.queue_timeout_s,
        ),
        tolerance=BreakerConfig(router.allowed_fails, router.cooldown_time),
        num_retries=config.num_retries,
        tags=tag_rules(router),
        is_by_quality=is_by_quality,
        hedge=hedge_rules(gateway.hedge),
    )


def hedge_rules(settings: HedgeSettings | None) -> HedgeRules | None:
    """Return the rules for second requests to another backend, or None if they are off."""
    return None if settings is None else HedgeRules(None if settings.after == "p95" else settings.after)


def _part(limit: int, share: int) -> int:
    # Every process needs at least one slot, so a limit that is lower than the number of processes is exceeded.
    return max(1, limit // share)


def _reused(
    entries: Sequence[ModelEntry], names: Sequence[str], identities: Sequence[object], keep: RoutingPool | None
) -> Mapping[int, LiveDeployment]:
    """Return the deployments of the old pool that the entries reuse, by the index of the entry.

    Several entries may have the same backend and settings. An entry then reuses the deployment that has the most
    similar names, because the counts, limits and running requests of a deployment belong to its entry.
    """
    earlier = [(model, live) for model, lives in (keep.members() if keep else {}).items() for live in lives]
    pairs = [
        (_likeness(entries[index], names[index], model, live), index, live)
        for index, identity in enumerate(identities)
        for model, live in earlier
        if live.identity == identity
    ]
    reused: dict[int, LiveDeployment] = {}
    taken: set[int] = set()
    for _, index, live in sorted(pairs, key=lambda pair: pair[0], reverse=True):
        # Reuse each old deployment only once, because two equal entries are two deployments.
        if index not in reused and id(live) not in taken:
            reused[index] = live
            taken.add(id(live))
    return reused


def _likeness(entry: ModelEntry, name: str, model: str, live: LiveDeployment) -> int:
    """Return the similarity of an entry and an old deployment of `model`, from 0 to 4."""
    if entry.model_info.id == live.name:
        return 4
    # The name of an entry without an id contains a number, which changes if earlier entries are added or removed.
    return 2 * (entry.model_name == model) + (name == live.name)


def _terms(entry: ModelEntry, name: str, config: Config, share: int) -> DeploymentConfig:
    params = entry.litellm_params
    requests, tokens = params.max_parallel_requests, entry.unisono.max_tokens_in_flight
    return DeploymentConfig(
        name=name,
        timeouts=config.timeouts(entry),
        min_timeouts=MinTimeouts(entry.unisono.min_first_token_timeout_s, entry.unisono.min_silence_timeout_s),
        weight=params.weight,
        order=params.order,
        max_requests=None if requests is None else _part(requests, share),
        max_tokens=None if tokens is None else _part(tokens, share),
        requests_per_minute=None if params.rpm is None else _part(params.rpm, share),
        tokens_per_minute=None if params.tpm is None else _part(params.tpm, share),
        tags=frozenset(params.tags),
        canary_share=entry.unisono.canary / 100,
        shadow_of=entry.unisono.shadow or "",
        wake=wake_rules(entry.unisono.wake),
    )


def check_recoveries(config: Config) -> None:
    """Raise ConfigError if an entry names a recovery rule that cannot be switched off."""
    from unisono.core.recovery_rules import SWITCHABLE

    for index, entry in enumerate(config.model_list):
        for rule in entry.unisono.recoveries:
            if rule not in SWITCHABLE:
                known = ", ".join(sorted(SWITCHABLE))
                raise ConfigError(
                    f"model_list[{index}].unisono.recoveries.{rule}: `{rule}` is not a rule that can be switched off; "
                    f"use one of: {known}"
                )


def tag_rules(router: RouterSettings) -> TagRules | None:
    """Return the rules for routing by tags, or None if tags have no effect."""
    return TagRules(router.tag_filtering_match_any) if router.enable_tag_filtering else None


def deployment_names(entries: Iterable[ModelEntry]) -> list[str]:
    """Return the public name of each entry: its id, or its backend kind and a number.

    A name that the gateway makes contains no address or path. Raises ConfigError if two entries have the same name.
    """
    counts: dict[str, int] = {}
    names: list[str] = []
    for index, entry in enumerate(entries):
        kind = entry.kind or "litellm"
        # Entries with an id are counted too. So setting the id of an entry does not change the names of other entries.
        counts[kind] = counts.get(kind, 0) + 1
        name = entry.model_info.id or f"{kind}-{counts[kind]}"
        if name in names:
            raise ConfigError(
                f"model_list[{index}].model_info.id: the id `{name}` is already used by another entry; set a "
                "different id"
            )
        names.append(name)
    return names


def _options(entry: ModelEntry) -> BackendOptions:
    params = entry.litellm_params
    return BackendOptions(
        kind=entry.kind,
        model=entry.backend_model,
        api_base=params.api_base,
        api_key=params.api_key.get_secret_value() if params.api_key else None,
        extra=AdapterSettings(entry.unisono.backend),
        # For Harmony models, the API packages apply the defaults.
        defaults={} if entry.harmony else params.request_defaults,
    )


def _backend(entry: ModelEntry, options: BackendOptions, path: str, factories: Factories) -> Endpoint:
    extra = options.extra
    assert isinstance(extra, AdapterSettings)
    factory = factories.factory_for(entry, path)
    try:
        backend = factory(options)
    except ConfigError as error:
        raise ConfigError(f"{path}.{extra.with_full_path(str(error))}") from error
    if extra.unread:
        key = extra.unread[0]
        raise ConfigError(f"{path}.{SETTINGS}.{key}: the {entry.kind} adapter has no setting `{key}`; remove it")
    return backend


class AdapterSettings(Mapping[str, object]):
    """Settings of an adapter or options of a hook, with a record of the keys that were read.

    Only the adapter or the hook knows the valid keys. If it does not read a key while it is built, the key is unknown.
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        self._settings = settings
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self._read.add(key)
        return self._settings[key]

    def __iter__(self) -> Iterator[str]:
        self._read.update(self._settings)
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    @property
    def unread(self) -> list[str]:
        return [key for key in self._settings if key not in self._read]

    def with_full_path(self, message: str) -> str:
        """Replace the path in an adapter's error message with the path of the key within the entry.

        The adapter does not know where its settings are in the file.
        """
        key, colon, rest = message.removeprefix("litellm_params.").partition(":")
        return f"{SETTINGS}.{key}{colon}{rest}" if key in self._settings else message
