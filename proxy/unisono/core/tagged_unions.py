"""Tagged unions in JSON schemas: `oneOf` with a `discriminator`, as Pydantic writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from unisono.core.json_pointers import names_in

# Maximum number of references in a chain that are followed.
MAX_REFERENCES: Final = 64

_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA: Final = frozenset({"const", "enum", "default", "examples"})


def is_tagged_union(schema: Mapping[str, object], root: Mapping[str, object]) -> bool:
    """Return True if no two branches of `oneOf` allow the same discriminator value.

    `root` is the whole schema, in which references are resolved.
    """
    branches, discriminator = schema.get("oneOf"), schema.get("discriminator")
    if not isinstance(branches, list | tuple) or not isinstance(discriminator, Mapping):
        return False
    tag = discriminator.get("propertyName")
    if not isinstance(tag, str):
        return False
    seen: set[str] = set()
    for branch in branches:
        values = _tags(branch, tag, root)
        if not values or not seen.isdisjoint(values):
            return False
        seen |= values
    return True


def for_grammar(schema: Mapping[str, object]) -> Mapping[str, object]:
    """Return an equivalent schema with `anyOf` for tagged unions, which more engines support."""
    return _rewritten(schema, schema)


def _tags(branch: object, tag: str, root: Mapping[str, object], depth: int = 0) -> frozenset[str]:
    """Return the possible values of a branch's property `tag`, as JSON texts.

    The set is empty if the values are not limited to a list.
    """
    if not isinstance(branch, Mapping) or depth > MAX_REFERENCES:
        return frozenset()
    if isinstance(reference := branch.get("$ref"), str):
        return _tags(_target(reference, root), tag, root, depth + 1)
    inner = branch.get("oneOf", branch.get("anyOf"))
    if isinstance(inner, list | tuple):
        found = [_tags(each, tag, root, depth + 1) for each in inner]
        return frozenset().union(*found) if all(found) else frozenset()
    properties, required = branch.get("properties"), branch.get("required")
    if branch.get("type") != "object" or not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        return frozenset()
    declared = properties.get(tag)
    if tag not in required or not isinstance(declared, Mapping):
        return frozenset()
    values = [declared["const"]] if "const" in declared else declared.get("enum", ())
    return frozenset(map(json.dumps, values)) if isinstance(values, Sequence) else frozenset()


def _target(reference: str, root: Mapping[str, object]) -> object:
    found: object = root
    for name in names_in(reference):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _rewritten(schema: Mapping[str, object], root: Mapping[str, object]) -> Mapping[str, object]:
    result = {name: _value(name, value, root) for name, value in schema.items()}
    if "anyOf" not in schema and is_tagged_union(schema, root):
        result["anyOf"] = result.pop("oneOf")
        del result["discriminator"]
    return result


def _value(name: str, value: object, root: Mapping[str, object]) -> object:
    if name in _DATA:
        return value
    if name in _NAMED and isinstance(value, Mapping):
        return {key: _rewritten(each, root) if isinstance(each, Mapping) else each for key, each in value.items()}
    if isinstance(value, Mapping):
        return _rewritten(value, root)
    if isinstance(value, list | tuple):
        return [_rewritten(each, root) if isinstance(each, Mapping) else each for each in value]
    return value
