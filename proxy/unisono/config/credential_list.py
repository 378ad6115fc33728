"""Section `credential_list`, whose values are added to the entries that name a credential."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.config.environment import ENVIRONMENT_PREFIX, EnvironmentReferences
from unisono.config.unvalidated_values import entries_of
from unisono.core.frozen import dataclass


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
