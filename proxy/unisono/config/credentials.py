"""Credentials of `credential_list`, and their values in the entries that name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.config.environment import ENVIRONMENT_PREFIX, EnvironmentReferences
from unisono.config.unvalidated_values import entries_of
from unisono.core.frozen import dataclass


def credentials_of(raw: object, errors: list[str]) -> dict[str, Mapping[str, Any]]:
    """Return the values of each credential by its name; a repeated name adds an error."""
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
    """Values of the credentials of a file, by name.

    Each unknown name adds an error to `references.errors`.
    """

    values: Mapping[str, Mapping[str, Any]]
    references: EnvironmentReferences

    def added_to(self, params: Mapping[Any, Any], path: str) -> Mapping[Any, Any]:
        """Return a section with the values of the credential that it names.

        The section's own keys win.
        """
        name = self.references.peeked(params.get("litellm_credential_name"))
        if not isinstance(name, str) or name.startswith(ENVIRONMENT_PREFIX):
            return params
        if name not in self.values:
            self.references.errors.append(
                f"{path}.litellm_credential_name: unknown credential `{name}`; add it to `credential_list`"
            )
        # The file that `import-litellm` writes keeps the reference.
        values = self.values.get(name, {}) if self.references.resolves else {}
        own = {"api_base", "base_url"} if {"api_base", "base_url"} & params.keys() else set()
        return {**{key: value for key, value in values.items() if key not in own}, **params}
