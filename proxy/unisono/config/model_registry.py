"""Registry of the configured models, which finds the model for the name in a request."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from unisono.config.fallbacks import fallback_models
from unisono.config.model_settings import ModelEntry, ModelSettings
from unisono.config.root_config import Config
from unisono.config.router_settings import AliasTarget
from unisono.core.fallback_models import NO_FALLBACK_MODELS, FallbackModels
from unisono.core.frozen import dataclass
from unisono.core.passthrough_request import AnswerMode, ModelMode
from unisono.core.route_protocol import NO_ROUTING, RequestedRouting
from unisono.errors import ConfigError, ConfigErrors, InvalidRequest, UnknownModel

CLIENT_VISIBLE = (
    *("reasoning_field", "stream_tool_arguments", "mcp_servers", "run_tools"),
    *("reasoning_budget", "recoveries", "forbidden_tools", "media", "media_model"),
)
"""Settings whose effect clients can observe.

They must be equal in all entries of a `model_name`.
"""


AUXILIARY_NAMES = frozenset({"codex-auto-review"})
"""Model names that client programs request in addition to the model that their user selects."""

STATEFUL_PROVIDERS = ("openai", "azure")
"""Providers whose Responses API stores responses, so that later requests can refer to them."""

MAX_NAME_LENGTH = 256
"""Maximum number of characters of an unknown model name that an error message repeats."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Model with all its entries in `model_list`. `name` is their common `model_name`."""

    name: str
    entries: tuple[ModelEntry, ...]
    settings: ModelSettings
    mode: ModelMode = ModelMode.CHAT

    @property
    def access_groups(self) -> frozenset[str]:
        """Access groups of the model. A key with permission for one of them may use the model."""
        return frozenset(group for entry in self.entries for group in entry.model_info.access_groups)

    @property
    def max_input_tokens(self) -> int | None:
        """Smallest context window, in tokens, that an entry configures; None if no entry does.

        It is the smallest one because any entry may answer a request.
        """
        return min((e.model_info.max_input_tokens for e in self.entries if e.model_info.max_input_tokens), default=None)


class ModelRegistry:
    """Models of a configuration, keyed by name.

    Raises ConfigError for an unknown name, or for entries that contradict each other.
    """

    def __init__(self, config: Config) -> None:
        errors = ConfigErrors()
        self._groups = {model.name: model for model in _groups(config.model_list, errors)}
        for index, entry in enumerate(config.model_list):
            for position, label in enumerate(entry.unisono.mcp_servers or ()):
                with errors:
                    if label not in config.mcp_servers:
                        path = f"model_list[{index}].unisono.mcp_servers[{position}]"
                        raise ConfigError(f"{path}: unknown tool server `{label}`; add it to `mcp_servers`")
        self._aliases: dict[str, str] = {}
        self._hidden: set[str] = set()
        for alias, target in config.router_settings.model_group_alias.items():
            path = f"router_settings.model_group_alias.{alias}"
            name = target.model if isinstance(target, AliasTarget) else target
            with errors:
                self._aliases[alias] = self._existing(name, path).name
            if isinstance(target, AliasTarget) and target.hidden:
                self._hidden.add(alias)
        for index, entry in enumerate(config.model_list):
            with errors:
                self._check_media(entry, f"model_list[{index}].unisono")
        self.fallback_models: dict[str, FallbackModels] = {}
        """Fallback models of each model that has any, by the name of the model."""
        with errors:
            self.fallback_models = fallback_models(config, tuple(self._groups), self._aliases)
        default = config.general_settings.completion_model
        with errors:
            default = default and self.resolve_alias(default, "general_settings.completion_model")
        errors.raise_all()
        self._default = default
        harmony = [model for model in self._groups.values() if True in _kinds(model)]
        self._only_harmony = harmony[0] if len(harmony) == 1 else None
        # Most specific pattern first: the one with the most characters besides `*`.
        patterns = [name for name in self._groups if "*" in name]
        self._patterns = sorted(patterns, key=lambda pattern: len(pattern.replace("*", "")), reverse=True)

    def resolve_alias(self, name: str, path: str) -> str:
        return self._aliases.get(name) or self._existing(name, path).name

    def _existing(self, name: str, path: str) -> ServedModel:
        model = self._groups.get(name)
        if model is None:
            raise ConfigError(f"{path}: unknown model `{name}`; use a `model_name` from `model_list`")
        return model

    def _check_media(self, entry: ModelEntry, path: str) -> None:
        """Check the vision model of an entry. Raises ConfigError."""
        name, describes = entry.unisono.media_model, entry.unisono.media == "describe"
        if describes and name is None:
            raise ConfigError(f"{path}.media: `describe` requires a vision model; set `media_model`")
        if name is None:
            return
        if not describes:
            raise ConfigError(f"{path}.media_model: has no effect; set `media: describe` or remove it")
        model = self._groups[self.resolve_alias(name, f"{path}.media_model")]
        if _kinds(model) != {False} or "*" in model.name or model.mode is not ModelMode.CHAT:
            raise ConfigError(
                f"{path}.media_model: `{name}` cannot be used here; name a pass-through chat model that can read "
                "images and has no `*` in its name"
            )

    def resolve(self, requested: str | None) -> ServedModel:
        """Return the model for the name in a request.

        Raises UnknownModel if no model has the name. Raises InvalidRequest if `requested` is None or empty, and no
        default model exists.

        The name is looked up as an alias, as an exact name, and with the wildcards, in this order. If nothing matches,
        the default model is used. If there is no default model, a name in `AUXILIARY_NAMES` means the gpt-oss model,
        provided that exactly one is configured.
        """
        if requested:
            # The name of an alias is matched exactly, as in LiteLLM, also if it contains `*`.
            if target := self._aliases.get(requested):
                return self._groups[target]
            if requested in self._groups and "*" not in requested:
                return self._groups[requested]
            for pattern in self._patterns:
                if fnmatchcase(requested, pattern):
                    return self._groups[pattern]
        if self._default:
            return self._groups[self._default]
        # Codex rejects every action for which the review fails, so its review model must exist. With several gpt-oss
        # models, the operator has to choose one by an alias.
        if requested in AUXILIARY_NAMES and self._only_harmony:
            return self._only_harmony
        if not requested:
            # The text and the status are OpenAI's.
            raise InvalidRequest("you must provide a model parameter", param="model")
        known = ", ".join(name for name, _ in self.listed())
        name = requested[:MAX_NAME_LENGTH]
        raise UnknownModel(f"The model `{name}` does not exist here. Models: {known}.", param="model")

    def answer_mode(self, model: ServedModel, requested: RequestedRouting = NO_ROUTING) -> AnswerMode:
        """Return whether the engine or pass-through answers requests, and which is tried first.

        Harmony entries of the model are tried before its pass-through entries, and both before the fallback models. If
        the request names fallback models, they replace the configured ones.
        """
        kinds = _kinds(model)
        others = self._fallback_models_for(model, requested)
        other_kinds = set().union(*(_kinds(self._groups[name]) for name in (*others.fallbacks, *others.larger)))
        if True in kinds:
            return AnswerMode.ENGINE_THEN_PASSTHROUGH if False in kinds | other_kinds else AnswerMode.ENGINE
        return AnswerMode.PASSTHROUGH_THEN_ENGINE if True in other_kinds else AnswerMode.PASSTHROUGH

    def stores_responses(self, model: ServedModel, requested: RequestedRouting = NO_ROUTING) -> bool:
        """Return whether all requests for the model reach one provider that stores responses.

        Only then can a request refer to a response that is stored at the provider.
        """
        return (
            len(model.entries) == 1
            and model.entries[0].kind in STATEFUL_PROVIDERS
            and not model.entries[0].harmony
            and self._fallback_models_for(model, requested) == NO_FALLBACK_MODELS
        )

    def _fallback_models_for(self, model: ServedModel, requested: RequestedRouting) -> FallbackModels:
        return self.fallback_models.get(model.name, NO_FALLBACK_MODELS).for_request(model.name, requested)

    @property
    def passes(self) -> bool:
        """True if at least one entry passes requests through."""
        return any(False in _kinds(model) for model in self._groups.values())

    def groups(self) -> Iterator[ServedModel]:
        yield from self._groups.values()

    def listed(self) -> Iterator[tuple[str, ServedModel]]:
        """Yield each public name with its model: models without wildcards first, then aliases."""
        for name, model in self._groups.items():
            if "*" not in name:
                yield name, model
        for alias, name in self._aliases.items():
            # If a model and an alias have the same name, the name is already listed. Requests with this name reach the
            # target of the alias.
            if alias not in self._hidden and alias not in self._groups:
                yield alias, self._groups[name]


def _kinds(model: ServedModel) -> set[bool]:
    """Return which values `harmony` has in the entries of a model: True, False or both."""
    return {entry.harmony for entry in model.entries}


def _groups(entries: tuple[ModelEntry, ...], errors: ConfigErrors) -> Iterator[ServedModel]:
    """Yield the models. If entries of a model contradict each other, add this to `errors`."""
    names = dict.fromkeys(entry.model_name for entry in entries)
    for name in names:
        indexed = [(index, entry) for index, entry in enumerate(entries) if entry.model_name == name]
        # A client cannot choose the entry that answers. So the settings whose effect it can observe must be the same in
        # all entries.
        settings = indexed[0][1].unisono
        for index, entry in indexed[1:]:
            for field in CLIENT_VISIBLE:
                with errors:
                    if getattr(entry.unisono, field) != getattr(settings, field):
                        raise ConfigError(
                            f"model_list[{index}].unisono.{field}: differs from model_list[{indexed[0][0]}], which has "
                            f"the same model_name `{name}`; set the same value in both"
                        )
            with errors:
                if entry.mode is not indexed[0][1].mode:
                    raise ConfigError(
                        f"model_list[{index}].model_info.mode: differs from model_list[{indexed[0][0]}], which has the "
                        f"same model_name `{name}`; use different names"
                    )
        with errors:
            _check_defaults(name, indexed)
        yield ServedModel(name, tuple(entry for _, entry in indexed), settings, indexed[0][1].mode)


def _check_defaults(name: str, indexed: list[tuple[int, ModelEntry]]) -> None:
    """Raise ConfigError if the Harmony entries of a model have different defaults for requests."""
    harmony = [(index, entry.litellm_params.request_defaults) for index, entry in indexed if entry.harmony]
    for index, defaults in harmony[1:]:
        first, expected = harmony[0]
        if defaults != expected:
            raise ConfigError(
                f"model_list[{index}].litellm_params: the defaults for requests differ from model_list[{first}], "
                f"which has the same model_name `{name}`; set the same values in both"
            )
