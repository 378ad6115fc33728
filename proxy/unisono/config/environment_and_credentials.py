"""References in a configuration file to environment variables and to named credentials.

A reference to an environment variable is `os.environ/NAME`. The section `environment_variables` takes precedence over
the environment. The values in `credential_list` are added to the entries that name a credential.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from datetime import date
from typing import Any

from unisono.config.section_base import described, entries_of
from unisono.core.frozen import dataclass
from unisono.errors import ConfigError

ENVIRONMENT_PREFIX = "os.environ/"
MASTER_KEY_VARIABLE = "UNISONO_MASTER_KEY"


def own_environment(raw: Mapping[Any, Any]) -> dict[str, str]:
    """Return the section `environment_variables`, which takes precedence over the environment.

    Raises ConfigError if the section is not a mapping.
    """
    own = raw.get("environment_variables") or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"environment_variables: must be a mapping of names to values, not {described(own)}")
    return {str(name): str(value) for name, value in own.items()}


def master_key_variable(raw: Mapping[Any, Any]) -> str:
    """Return the name of the environment variable that contains the master key.

    It is the variable that `general_settings.master_key` refers to, or `UNISONO_MASTER_KEY`.
    """
    general = raw.get("general_settings")
    key = general.get("master_key") if isinstance(general, Mapping) else None
    is_reference = isinstance(key, str) and key.startswith(ENVIRONMENT_PREFIX)
    return key.removeprefix(ENVIRONMENT_PREFIX) if is_reference and isinstance(key, str) else MASTER_KEY_VARIABLE


@dataclass(frozen=True, slots=True)
class EnvironmentReferences:
    """Resolver of references to environment variables.

    If `resolves` is False, references stay as they are. `errors` collects all errors of the file, including one for
    each reference to a variable that is not set.
    """

    environ: Mapping[str, str]
    resolves: bool = True
    errors: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, raw: Mapping[Any, Any], environ: Mapping[str, str]) -> EnvironmentReferences:
        """Return the resolver for a parsed file. Raises ConfigError as `own_environment` does."""
        # As in LiteLLM, references may also name a variable from the section `environment_variables`. This section
        # takes precedence.
        return cls({**environ, **own_environment(raw)})

    def peeked(self, value: object) -> object:
        """Return the value of the variable that `value` refers to.

        If `value` is not a reference, returns it unchanged. If the variable is not set, returns the reference and adds
        no error.
        """
        is_reference = isinstance(value, str) and value.startswith(ENVIRONMENT_PREFIX) and self.resolves
        return self.environ.get(str(value).removeprefix(ENVIRONMENT_PREFIX), value) if is_reference else value

    def resolved(self, value: object, path: str) -> object:
        """Return `value` with all `os.environ/NAME` in it replaced by the variables' values.

        References are replaced at any depth. If a variable is not set, its reference stays and an error with the `path`
        is added to `errors`.
        """
        match value:
            case str() if value.startswith(ENVIRONMENT_PREFIX) and self.resolves:
                name = value.removeprefix(ENVIRONMENT_PREFIX)
                if name not in self.environ:
                    self.errors.append(f"{path}: the environment variable {name} is not set")
                    return value
                return self.environ[name]
            case Mapping():
                return {key: self.resolved(inner, f"{path}.{key}") for key, inner in value.items()}
            case list():
                return [self.resolved(inner, f"{path}[{index}]") for index, inner in enumerate(value)]
            case date():
                # YAML parses `api_version: 2024-02-01` as a date.
                return value.isoformat()
            case _:
                return value


def credentials_of(raw: object, errors: list[str]) -> dict[str, Mapping[str, Any]]:
    """Return the values of each credential, by its name.

    Adds an error to `errors` if two credentials have the same name.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for index, entry in entries_of(raw, "credential_list"):
        name, values = entry.get("credential_name"), entry.get("credential_values")
        if not isinstance(name, str) or not isinstance(values, Mapping):
            continue
        if name in found:
            errors.append(f"credential_list[{index}].credential_name: another credential has the same name; rename one")
        found.setdefault(name, values)
    return found


@dataclass(frozen=True, slots=True)
class Credentials:
    """Values of the credentials in a file, keyed by name.

    If an entry names an unknown credential, an error is added to `references.errors`.
    """

    values: Mapping[str, Mapping[str, Any]]
    references: EnvironmentReferences

    def added_to(self, params: Mapping[Any, Any], path: str) -> Mapping[Any, Any]:
        """Return the section `params` with the values of the credential that it names.

        Keys that the section sets itself take precedence. A section that names no credential is returned unchanged.
        """
        name = self.references.peeked(params.get("litellm_credential_name"))
        if not isinstance(name, str) or name.startswith(ENVIRONMENT_PREFIX):
            return params
        if name not in self.values:
            self.references.errors.append(
                f"{path}.litellm_credential_name: unknown credential `{name}`; add it to `credential_list`"
            )
        # In the file that `import-litellm` writes, the entry still names the credential, so no values are added.
        values = self.values.get(name, {}) if self.references.resolves else {}
        own = {"api_base", "base_url"} if {"api_base", "base_url"} & params.keys() else set()
        return {**{key: value for key, value in values.items() if key not in own}, **params}
