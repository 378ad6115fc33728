"""Loader of the configuration, the only reader of the environment.

Every error is a ConfigError that begins with the path of the key. It contains no value, because values may be secret.
Known keys without effect are returned as warnings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from unisono.config.addresses import SUPPORTED_STORES, without_route
from unisono.config.config_file import ConfigFile, read
from unisono.config.credentials import Credentials, credentials_of
from unisono.config.environment import MASTER_KEY_VARIABLE, EnvironmentReferences, master_key_variable, own_environment
from unisono.config.guardrail_settings import GUARDRAIL_KINDS, guardrails_of
from unisono.config.litellm_keys import (
    LITELLM,
    UNSERVED,
    KeyClass,
    class_of,
    default_reason,
    is_passed_to_litellm,
    keys_of,
    other_reason,
)
from unisono.config.mcp_settings import McpServerSettings
from unisono.config.model_settings import LitellmParams, ModelEntry, RequestDefaults, is_of_litellm
from unisono.config.protective_settings import acknowledged_of, check_protective
from unisono.config.sections import Config, StoreSettings
from unisono.config.unvalidated_values import described
from unisono.config.validation import PROVIDER, FilePositions, refuse_lone_surrogates, validated
from unisono.core.close_matches import close_matches
from unisono.core.frozen import dataclass
from unisono.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Loaded:
    """Loaded configuration, with warnings for the operator in the order of the file."""

    config: Config
    warnings: tuple[str, ...] = ()
    # Environment variable that the file names for the master key.
    master_key_variable: str = MASTER_KEY_VARIABLE
    positions: FilePositions = field(default_factory=FilePositions)
    file: ConfigFile = field(default_factory=lambda: ConfigFile({}))

    def explained(self, error: ConfigError) -> ConfigError:
        """Return an error of building the gateway with its positions in the files."""
        return self.file.with_origins(ConfigError(*map(self.positions.in_file, error.messages)))


def load(path: Path, environ: Mapping[str, str] | None = None) -> Loaded:
    """Load the configuration file at `path`. Raises ConfigError.

    `environ` is the environment of the process by default.
    """
    file = read(path)
    try:
        return replace(parse(file.tree, os.environ if environ is None else environ), file=file)
    except ConfigError as error:
        raise file.with_origins(error) from None


def parse(raw: object, environ: Mapping[str, str], *, keeps_protective: bool = False) -> Loaded:
    """Validate a parsed file. Raises ConfigError with all errors, one per line.

    With `keeps_protective`, protective settings that are not acknowledged are warnings.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"the configuration must be a mapping of sections, not {described(raw)}")
    # As in LiteLLM, references in all other sections may name a variable of this section.
    reading = _Reading(EnvironmentReferences({**environ, **own_environment(raw)}))
    tree = reading.all_of(raw)
    refuse_lone_surrogates(tree, "")
    remarks, errors = check_protective(reading.protective, acknowledged_of(tree), keeps=keeps_protective)
    reading.warnings += remarks
    reading.errors.extend(errors)
    positions = FilePositions(reading.left_out)
    config = validated(tree, reading.errors, positions)
    if reading.errors:
        raise ConfigError(*reading.errors)
    hints = (
        positions.in_file(f"model_list[{index}].{hint}")
        for index, entry in enumerate(config.model_list)
        for hint in entry.hints()
    )
    return Loaded(config, (*reading.warnings, *reading.summary, *hints), master_key_variable(raw), positions)


def effective_part(raw: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the part of a parsed file that has an effect, and warnings about all other keys.

    References to the environment are not resolved. Unsupported protective settings stay, so that the result does not
    start without a decision about them. Raises ConfigError.
    """
    reading = _Reading(EnvironmentReferences({}, resolves=False))
    tree = reading.all_of(raw)
    refuse_lone_surrogates(tree, "")
    if reading.errors:
        raise ConfigError(*reading.errors)
    assert isinstance(tree, dict)
    return tree, (*reading.warnings, *(f"{path}: {LITELLM}" for path in reading.cosmetic))


@dataclass(slots=True)
class _Reading:
    """Pass over the parsed file, guided by the models.

    It removes keys without effect, resolves references to the environment, and rejects unknown keys.
    """

    references: EnvironmentReferences
    warnings: list[str] = field(default_factory=list)
    cosmetic: list[str] = field(default_factory=list)  # paths of cosmetic keys, which one warning lists
    protective: list[tuple[str, str]] = field(default_factory=list)  # paths of such keys, and without list indices
    guardrails: Mapping[str, bool] = field(default_factory=dict)  # whether each one is supported
    left_out: dict[str, set[int]] = field(default_factory=dict)  # positions of entries without effect, by list
    credentials: Credentials = field(init=False)

    @property
    def errors(self) -> list[str]:
        """Return the errors so far, among them those of references."""
        return self.references.errors

    @property
    def summary(self) -> tuple[str, ...]:
        """Return the line about cosmetic keys, if there are any."""
        names = sorted({path.rpartition(".")[2] for path in self.cosmetic})
        return (f"LiteLLM settings without effect in Unisono: {', '.join(names)}",) if names else ()

    def all_of(self, raw: object) -> object:
        """Return the part of the file that has an effect, and add errors to `errors`.

        Raises ConfigError for a file that contains itself.
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
        # litellm has options for every provider, so unknown keys of such entries are passed on.
        raw = self._with_canonical_keys(raw, model, path)
        handed = model is LitellmParams and is_of_litellm(raw.get("model"))
        for key, value in raw.items():
            key_path = f"{path}.{key}" if path else str(key)
            # The keys of this section are names of variables, so none is unknown. Its values are plain text, in which
            # references are not resolved.
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
            elif (why := default_reason(_general(path), str(key), value)) is not None:
                self.warnings.append(f"{key_path}: `{value}` {why}")
            # YAML parses a key without a value as null. It then counts as missing, unless null is a valid value of the
            # key.
            elif value is not None or _may_be_empty(model, str(key)):
                effective[str(key)] = self._value(value, model, str(key), key_path)
        if model is LitellmParams and not handed and isinstance(address := effective.get("api_base"), str):
            effective["api_base"], route = without_route(address)
            if route:
                self.warnings.append(f"{path}.api_base: ends in `{route}`, which is a route and was ignored; remove it")
        return {**effective, PROVIDER: more} if more else effective

    def _with_canonical_keys(self, raw: Mapping[Any, Any], model: type[BaseModel], path: str) -> Mapping[Any, Any]:
        """Replace synonyms of keys. Both names of a key are an error."""
        if model is ModelEntry:
            return self._with_limits(raw, path)
        if model is not LitellmParams:
            return raw
        raw = self.credentials.added_to(raw, path)
        if "base_url" not in raw:
            return raw
        # LiteLLM accepts both names. Two addresses would leave open which one is used.
        if raw.get("api_base") is not None:
            self.errors.append(f"{path}.base_url: same setting as `api_base`; remove one of them")
            return {key: value for key, value in raw.items() if key != "base_url"}
        return {("api_base" if key == "base_url" else key): value for key, value in raw.items()}

    def _with_limits(self, entry: Mapping[Any, Any], path: str) -> Mapping[Any, Any]:
        """Move `rpm` and `tpm` of an entry and of its `model_info` to `litellm_params`.

        LiteLLM reads them in all three places.
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
            entries = self._effective(value, path, self._is_supported)
            return [self.references.resolved(entry, f"{path}[{index}]") for index, entry in entries]
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
        """Return the elements of a list that have an effect, with their positions."""
        kept = [(index, value) for index, value in enumerate(values) if has_effect(value, f"{path}[{index}]")]
        if missing := {*range(len(values))} - {index for index, _ in kept}:
            self.left_out[path] = missing
        return kept

    def _is_applied(self, name: object, path: str) -> bool:
        """Return whether a guardrail of a model stays in the tree; add an error for an unknown one."""
        if not isinstance(name, str):
            return True
        if name not in self.guardrails:
            self.errors.append(f"{path}: unknown guardrail `{name}`; add it to `guardrails`")
        # The entry of an unsupported guardrail decides whether the gateway starts without it.
        return self.guardrails.get(name, True) or not self.references.resolves

    def _is_supported(self, guardrail: object, path: str) -> bool:
        """Return whether a guardrail stays in the tree. Record an unsupported one as protective."""
        params = guardrail.get("litellm_params") if isinstance(guardrail, Mapping) else None
        kind = params.get("guardrail") if isinstance(params, Mapping) else None
        if not isinstance(guardrail, Mapping) or not isinstance(kind, str) or kind in GUARDRAIL_KINDS:
            return True
        name = guardrail.get("guardrail_name")
        self.protective.append((f"{path} ({kind})", f"guardrails.{name}"))
        return not self.references.resolves

    def _has_effect(self, entry: object, path: str) -> bool:
        """Return whether an entry is neither blocked nor of an unsupported type, else warn about it."""
        info = entry.get("model_info") if isinstance(entry, Mapping) else None
        if not isinstance(info, Mapping):
            return True
        if self._is_true(info.get("blocked")):
            self.warnings.append(f"{path}.model_info.blocked: the entry is blocked and gets no requests")
            return False
        if (mode := info.get("mode")) not in UNSERVED:
            return True
        self.warnings.append(f"{path}.model_info.mode: `{mode}` is not supported; the entry is skipped")
        return False

    def _is_true(self, value: object) -> bool:
        """Return whether a value means true, in any form that the validation accepts."""
        try:
            return TypeAdapter(bool).validate_python(self.references.peeked(value))
        except ValidationError:
            return False  # the validation reports it

    def _is_protective(self, section: str, key: str, path: str, value: object, fields: Sequence[str]) -> bool:
        """Record a key without effect, or an error for an unknown key.

        Return whether the file that `import-litellm` writes has to keep the key.
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
    """Return whether null is a valid value of a key. Otherwise null counts as a missing key."""
    # Types such as `int | None` name None among their arguments.
    return type(None) in get_args(model.model_fields[key].annotation)


def _general(path: str) -> str:
    """Return a path without indices and names, such as `model_list[].unisono`."""
    if path.startswith("mcp_servers."):
        return "mcp_servers[]"
    head, bracket, rest = path.partition("[")
    return f"{head}[]{rest.partition(']')[2]}" if bracket else path
