"""Lookups in a parsed file that is not validated yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unisono.config.guardrail_settings import GUARDRAIL_KINDS
from unisono.errors import ConfigError


def credentials_of(raw: object, errors: list[str]) -> dict[str, Mapping[str, Any]]:
    """Return the values of each credential; a second one of the same name adds an error."""
    found: dict[str, Mapping[str, Any]] = {}
    for index, entry in _entries(raw, "credential_list"):
        name, values = entry.get("credential_name"), entry.get("credential_values")
        if not isinstance(name, str) or not isinstance(values, Mapping):
            continue
        if name in found:
            errors.append(f"credential_list[{index}].credential_name: another credential has the same name; rename one")
        found.setdefault(name, values)
    return found


def guardrails_of(raw: object) -> dict[str, bool]:
    """Return the names of the guardrails of a file, and whether Unisono supports each of them."""
    found: dict[str, bool] = {}
    for _, entry in _entries(raw, "guardrails"):
        name, params = entry.get("guardrail_name"), entry.get("litellm_params")
        if isinstance(name, str) and isinstance(params, Mapping):
            found[name] = params.get("guardrail") in GUARDRAIL_KINDS
    return found


def acknowledged_of(tree: object) -> list[str]:
    """Return `unisono.acknowledge` of a file."""
    section = tree.get("unisono") if isinstance(tree, Mapping) else None
    names = section.get("acknowledge") if isinstance(section, Mapping) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def own_environment(raw: Mapping[Any, Any]) -> dict[str, str]:
    """Return the section `environment_variables`, which wins over the environment."""
    own = raw.get("environment_variables") or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"environment_variables: must be a mapping of names to values, not {described(own)}")
    return {str(name): str(value) for name, value in own.items()}


def described(value: object) -> str:
    """Return the name of the type of a value, for people."""
    names = {"NoneType": "empty", "str": "text", "int": "a number", "float": "a number", "bool": "true or false"}
    if isinstance(value, Mapping):
        return "a mapping"
    return names.get(type(value).__name__, f"a {type(value).__name__}")


def _entries(raw: object, section: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    listed = raw.get(section) if isinstance(raw, Mapping) else None
    for index, entry in enumerate(listed if isinstance(listed, list) else []):
        if isinstance(entry, Mapping):
            yield index, entry
