"""Loader of the configuration. No other code reads the environment variables of settings.

Every error is a ConfigError whose message begins with the path of a key. The message contains no value, because values
may be secret. Known keys without effect cause warnings, which are returned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from unisono.config.addresses import SUPPORTED_STORES, without_route
from unisono.config.config_file import ConfigFile, read
from unisono.config.environment_and_credentials import (
    MASTER_KEY_VARIABLE,
    Credentials,
    EnvironmentReferences,
    credentials_of,
    master_key_variable,
    own_environment,
)
from unisono.config.guardrail_settings import GuardrailSettings, guardrails_of, unsupported_kind
from unisono.config.ineffective_settings import (
    LITELLM,
    UNSERVED,
    KeyClass,
    acknowledged_of,
    check_protective,
    class_of,
    default_reason,
    is_passed_to_litellm,
    keys_of,
    other_reason,
)
from unisono.config.mcp_settings import McpServerSettings
from unisono.config.model_settings import LitellmParams, ModelEntry, RequestDefaults, is_of_litellm
from unisono.config.root_config import Config
from unisono.config.section_base import described
from unisono.config.store_settings import StoreSettings
from unisono.config.validation import PROVIDER, FilePositions, refuse_lone_surrogates, validated
from unisono.core.error_texts import close_matches
from unisono.core.frozen import dataclass
from unisono.errors import ConfigError

# LiteLLM's synonym for a key, and the key itself, by section.
SYNONYMS: Final[Mapping[type[BaseModel], tuple[str, str]]] = {
    LitellmParams: ("base_url", "api_base"),
    McpServerSettings: ("auth_value", "authentication_token"),
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """Loaded configuration, with warnings for the operator."""

    config: Config
    warnings: tuple[str, ...] = ()
    # Environment variable that the file names for the master key.
    master_key_variable: str = MASTER_KEY_VARIABLE
    positions: FilePositions = field(default_factory=FilePositions)
    file: ConfigFile = field(default_factory=lambda: ConfigFile({}))

    def explained(self, error: ConfigError) -> ConfigError:
        """Return an error from building the gateway, with the list indices that the file has.

        The name of the included file is appended to messages about keys in an included file.
        """
        return self.file.with_origins(ConfigError(*map(self.positions.in_file, error.messages)))


def load(path: Path, environ: Mapping[str, str] | None = None) -> Loaded:
    """Load a configuration file. Raises ConfigError if the file is missing or invalid.

    `environ` replaces the environment of the process.
    """
    file = read(path)
    try:
        return replace(parse(file.tree, os.environ if environ is None else environ), file=file)
    except ConfigError as error:
        raise file.with_origins(error) from None


def parse(raw: object, environ: Mapping[str, str], *, keeps_protective: bool = False) -> Loaded:
    """Validate a parsed file. Raises ConfigError with all errors, one per line.

    If `keeps_protective` is True, protective settings that are not acknowledged cause warnings instead of errors.
    """
    sections = require_sections(raw)
    reading = _Reading(EnvironmentReferences.of(sections, environ))
    tree = reading.all_of(sections)
    refuse_lone_surrogates(tree, "")
    remarks, errors = check_protective(reading.protective, acknowledged_of(tree), keeps=keeps_protective)
    reading.warnings += remarks
    reading.errors.extend(errors)
    positions = FilePositions(reading.left_out)
    config = validated(tree, reading.errors, positions)
    hints = (
        positions.in_file(f"model_list[{index}].{hint}")
        for index, entry in enumerate(config.model_list)
        for hint in entry.hints()
    )
    general = (f"general_settings.{hint}" for hint in config.general_settings.hints())
    return Loaded(
        config, (*reading.warnings, *reading.summary, *general, *hints), master_key_variable(sections), positions
    )


def require_sections(raw: object) -> Mapping[Any, Any]:
    """Return a parsed file. Raises ConfigError if it is not a mapping."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"the configuration must be a mapping of sections, not {described(raw)}")
    return raw


def effective_part(raw: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the part of a parsed file that has an effect, and warnings about all other keys.

    References to environment variables are not resolved. Unsupported protective settings are kept, so that the gateway
    does not start with the result until the operator decides about them. Raises ConfigError for invalid keys.
    """
    reading = _Reading(EnvironmentReferences({}, resolves=False))
    tree = reading.all_of(require_sections(raw))
    refuse_lone_surrogates(tree, "")
    if reading.errors:
        raise ConfigError(*reading.errors)
    assert isinstance(tree, dict)
    return tree, (*reading.warnings, *(f"{path}: {LITELLM}" for path in reading.cosmetic))


@dataclass(slots=True)
class _Reading:
    """Reading of a parsed file, section by section. Each section has a pydantic model.

    The reading removes keys without effect, resolves references to environment variables, and records unknown keys as
    errors.
    """

    references: EnvironmentReferences
    warnings: list[str] = field(default_factory=list)
    cosmetic: list[str] = field(default_factory=list)  # paths of cosmetic keys
    protective: list[tuple[str, str]] = field(default_factory=list)  # paths of protective keys, and without indices
    guardrails: Mapping[str, bool] = field(default_factory=dict)  # names, with True for supported guardrails
    left_out: dict[str, set[int]] = field(default_factory=dict)  # indices of entries without effect, by list
    credentials: Credentials = field(init=False)

    @property
    def errors(self) -> list[str]:
        """All errors so far, including those of references."""
        return self.references.errors

    @property
    def summary(self) -> tuple[str, ...]:
        """Warning that lists all cosmetic keys; empty if there are none."""
        names = sorted({path.rpartition(".")[2] for path in self.cosmetic})
        return (f"LiteLLM settings without effect in Unisono: {', '.join(names)}",) if names else ()

    def all_of(self, raw: object) -> object:
        """Return the part of the file that has an effect, and add errors to `errors`.

        Raises ConfigError if a YAML alias makes a value contain itself.
        """
        self.credentials = Credentials(credentials_of(raw, self.errors), self.references)
        self.guardrails = guardrails_of(raw)
        try:
            return self.section(raw, Config, "")
        except RecursionError:
            raise ConfigError(
                "the configuration refers to itself: a YAML alias (`*name`) is inside the value of its own anchor "
                "(`&name`); remove it"
            ) from None

    def section(self, raw: object, model: type[BaseModel], path: str) -> object:
        if not isinstance(raw, Mapping):
            is_address = model is StoreSettings and isinstance(raw, str)
            hint = f"; write `store: {{url: ADDRESS}}` with one of {SUPPORTED_STORES}" if is_address else ""
            self.errors.append(f"{path}: must be a mapping, not {described(raw)}{hint}")
            return raw
        effective: dict[str, object] = {}
        more: dict[str, object] = {}
        # litellm has options for each provider, so unknown keys of an entry that litellm serves are passed to litellm.
        raw = self._with_canonical_keys(raw, model, path)
        handed = model is LitellmParams and is_of_litellm(self.references.peeked(raw.get("model")))
        for key, value in raw.items():
            key_path = f"{path}.{key}" if path else str(key)
            # In this section, any key is valid, because keys are names of variables. References in its values are not
            # resolved.
            if not path and key == "environment_variables":
                effective[str(key)] = dict(own_environment(raw))
                continue
            is_own = key in model.model_fields and key not in RequestDefaults.model_fields
            if handed and not is_own and is_passed_to_litellm(str(key)):
                known = {*keys_of(_general(path)), *RequestDefaults.model_fields}
                own_and_known = [*model.model_fields, *known]
                if key not in known and (close := close_matches(str(key), own_and_known, min_similarity=0.9)):
                    self.errors.append(f"{key_path}: unknown key `{key}` (did you mean `{close[0]}`?)")
                    continue
                more[str(key)] = self.references.resolved(value, key_path)
                if key not in known:
                    self.warnings.append(f"{key_path}: unknown key `{key}`; it is passed to litellm unchanged")
            elif key not in model.model_fields:
                if self._is_protective(_general(path), str(key), key_path, value, tuple(model.model_fields)):
                    effective[str(key)] = value
            elif (why := default_reason(_general(path), str(key), self.references.peeked(value))) is not None:
                self.warnings.append(f"{key_path}: `{value}` {why}")
            # YAML parses a key without a value as null. Such a key is treated as missing, unless null is a valid value.
            elif value is not None or _may_be_empty(model, str(key)):
                effective[str(key)] = self._value(value, model, str(key), key_path)
        if model is LitellmParams and not handed and isinstance(address := effective.get("api_base"), str):
            effective["api_base"], route = without_route(address)
            if route:
                self.warnings.append(f"{path}.api_base: the API route `{route}` at the end was ignored; remove it")
        return {**effective, PROVIDER: more} if more else effective

    def _with_canonical_keys(self, raw: Mapping[Any, Any], model: type[BaseModel], path: str) -> Mapping[Any, Any]:
        """Replace synonyms of keys. Add an error if a section has both names of the same key."""
        if model is ModelEntry:
            return self._with_limits(raw, path)
        if model not in SYNONYMS:
            return raw
        if model is LitellmParams:
            raw = self.credentials.added_to(raw, path)
        synonym, name = SYNONYMS[model]
        if synonym not in raw:
            return raw
        # LiteLLM accepts both names. With two values, it would not be clear which one is used.
        if raw.get(name) is not None:
            self.errors.append(f"{path}.{synonym}: same setting as `{name}`; remove one of them")
            return {key: value for key, value in raw.items() if key != synonym}
        return {(name if key == synonym else key): value for key, value in raw.items() if key != name}

    def _with_limits(self, entry: Mapping[Any, Any], path: str) -> Mapping[Any, Any]:
        """Move `rpm` and `tpm` of an entry and of its `model_info` to `litellm_params`.

        LiteLLM accepts these keys in all three places.
        """
        params, info = entry.get("litellm_params"), entry.get("model_info")
        if not isinstance(params, Mapping):
            return entry
        moved = dict(entry)
        for part, where in ((entry, path), (info, f"{path}.model_info")):
            for name in ("rpm", "tpm"):
                if not isinstance(part, Mapping) or name not in part:
                    continue
                self.warnings.append(f"{where}.{name}: read as `litellm_params.{name}`")
                moved["litellm_params"] = {name: part[name], **moved["litellm_params"]}
                if part is entry:
                    del moved[name]
                else:
                    moved["model_info"] = {key: value for key, value in moved["model_info"].items() if key != name}
        return moved

    def _value(self, value: object, model: type[BaseModel], key: str, path: str) -> object:
        inner = model.model_fields[key].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return self.section(value, inner, path)
        if (model, key) == (Config, "model_list"):
            if not isinstance(value, Sequence) or isinstance(value, str):
                self.errors.append(f"{path}: must be a list of models, not {described(value)}")
                return []
            entries = self._effective(value, path, self._has_effect)
            return [self.section(entry, ModelEntry, f"{path}[{index}]") for index, entry in entries]
        if (model, key) == (Config, "guardrails") and isinstance(value, list):
            entries = self._effective(value, path, self._is_kept)
            return [self._guardrail(entry, f"{path}[{index}]") for index, entry in entries]
        if (model, key) == (LitellmParams, "guardrails") and isinstance(value, list):
            value = [name for name in value if self._is_applied(name, path)]
        if (model, key) == (Config, "mcp_servers"):
            if not isinstance(value, Mapping):
                self.errors.append(f"{path}: must be a mapping of labels to servers, not {described(value)}")
                return {}
            return {label: self.section(entry, McpServerSettings, f"{path}.{label}") for label, entry in value.items()}
        return self.references.resolved(value, path)

    def _effective(
        self, values: Sequence[object], path: str, has_effect: Callable[[object, str], bool]
    ) -> list[tuple[int, object]]:
        """Return the elements of a list that have an effect, each with its index in the file."""
        kept = [(index, value) for index, value in enumerate(values) if has_effect(value, f"{path}[{index}]")]
        if missing := {*range(len(values))} - {index for index, _ in kept}:
            self.left_out[path] = missing
        return kept

    def _is_applied(self, name: object, path: str) -> bool:
        """Return whether to keep the name of a guardrail in an entry.

        Adds an error if the name is unknown.
        """
        if not isinstance(name, str):
            return True
        if name not in self.guardrails:
            self.errors.append(f"{path}: unknown guardrail `{name}`; add it to `guardrails`")
        # An unsupported guardrail needs no error here: its entry in `guardrails` causes one unless it is acknowledged.
        return self.guardrails.get(name, True) or not self.references.resolves

    def _is_kept(self, guardrail: object, path: str) -> bool:
        """Return whether to keep an entry of `guardrails`.

        An unsupported guardrail is kept only when `import-litellm` converts the file. It is recorded as a protective
        setting without effect; if it has no name, an error is recorded instead.
        """
        kind = unsupported_kind(guardrail)
        if kind is None or not isinstance(guardrail, Mapping):
            return True
        name = guardrail.get("guardrail_name")
        if isinstance(name, str) and name:
            self.protective.append((f"{path} ({kind})", f"guardrails.{name}"))
        else:
            self.errors.append(f"{path}.guardrail_name: must be the name of the guardrail, not {described(name)}")
        return not self.references.resolves

    def _guardrail(self, guardrail: object, path: str) -> object:
        # Every kind of guardrail has its own keys. The keys of unsupported kinds are unknown, so none is validated.
        if unsupported_kind(guardrail) is not None:
            return self.references.resolved(guardrail, path)
        return self.section(guardrail, GuardrailSettings, path)

    def _has_effect(self, entry: object, path: str) -> bool:
        """Return whether an entry has an effect.

        Adds a warning if the entry is blocked or has an unsupported mode.
        """
        info = entry.get("model_info") if isinstance(entry, Mapping) else None
        if not isinstance(info, Mapping):
            return True
        if self._is_true(info.get("blocked")):
            self.warnings.append(f"{path}.model_info.blocked: the entry is blocked and gets no requests")
            return False
        if (mode := self.references.peeked(info.get("mode"))) not in UNSERVED:
            return True
        self.warnings.append(f"{path}.model_info.mode: `{mode}` is not supported; the entry is skipped")
        return False

    def _is_true(self, value: object) -> bool:
        """Return whether a value is true in any notation that the validation accepts, such as `yes`."""
        try:
            return TypeAdapter(bool).validate_python(self.references.peeked(value))
        except ValidationError:
            return False  # the validation reports the invalid value

    def _is_protective(self, section: str, key: str, path: str, value: object, fields: Sequence[str]) -> bool:
        """Record a key that is not a field of its section: as a key without effect, or as an error.

        Returns True if the key is protective and must be kept in the file that `import-litellm` writes.
        """
        match class_of(section, key, value):
            case KeyClass.PROTECTIVE:
                self.protective.append((path, f"{section}.{key}".lstrip(".")))
                return not self.references.resolves
            case KeyClass.NOTED:
                self.warnings.append(f"{path}: {LITELLM}")
            case KeyClass.COSMETIC:
                self.cosmetic.append(path)
            case None if (reason := other_reason(section, key)) is not None:
                self.warnings.append(f"{path}: {reason}")
            case None:
                close = close_matches(key, [*fields, *keys_of(section)])
                meant = f" (did you mean `{close[0]}`?)" if close else ""
                self.errors.append(f"{path}: unknown key `{key}`{meant}")
        return False


def _may_be_empty(model: type[BaseModel], key: str) -> bool:
    """Return whether null is a valid value of a key.

    Otherwise a key with the value null is treated as missing.
    """
    # A type such as `int | None` has NoneType among its arguments.
    return type(None) in get_args(model.model_fields[key].annotation)


def _general(path: str) -> str:
    """Return a path without list indices and labels, such as `model_list[].unisono`."""
    if path.startswith("mcp_servers."):
        return "mcp_servers[]"
    head, bracket, rest = path.partition("[")
    return f"{head}[]{rest.partition(']')[2]}" if bracket else path
