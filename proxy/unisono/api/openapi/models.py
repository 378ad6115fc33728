"""Conversion of request models to schemas of the OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

Schema = dict[str, Any]

PLACE = "#/components/schemas/"
# Pattern of pydantic's names for models whose name occurs in several packages.
_QUALIFIED = re.compile(r"unisono__api__(\w+?)__\w+__(\w+)")


class _Plain(GenerateJsonSchema):
    """Generator that omits titles that repeat names, and null defaults."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        made = super().default_schema(schema)
        return {name: value for name, value in made.items() if name != "default" or value is not None}


def schemas_of(models: Sequence[type[BaseModel]]) -> dict[str, Schema]:
    """Return the schemas of `models` and of all models they refer to, under unique names."""
    _, made = models_json_schema(
        [(model, "validation") for model in models], ref_template=PLACE + "{model}", schema_generator=_Plain
    )
    named = json.loads(_QUALIFIED.sub(lambda found: found[1].capitalize() + found[2], json.dumps(made["$defs"])))
    wanted = list(dict.fromkeys(model.__name__ for model in models))
    for name in wanted:
        wanted += [other for other in dict.fromkeys(_referred(named[name])) if other not in wanted]
    return {name: _untitled(named[name]) for name in sorted(wanted)}


def ref(name: str) -> Schema:
    return {"$ref": PLACE + name}


def to_parameters(query: type[BaseModel]) -> list[Schema]:
    """Return the query parameters of a model.

    A query has no null; absent values are omitted.
    """
    made = query.model_json_schema(ref_template=PLACE + "{model}", schema_generator=_Plain)
    return [
        {"name": name, "in": "query", "required": False, "schema": _without_null(schema)}
        for name, schema in made["properties"].items()
    ]


def _untitled(schema: Schema) -> Schema:
    return {name: value for name, value in schema.items() if name != "title"}


def _without_null(schema: Schema) -> Schema:
    match schema:
        case {"anyOf": [dict(inner), {"type": "null"}]}:
            return inner
        case _:
            return schema


def _referred(value: Any) -> Iterator[str]:
    """Yield the names of all schemas that `value` refers to."""
    match value:
        case {"$ref": str(place)}:
            yield place.removeprefix(PLACE)
        case Mapping():
            for inner in value.values():
                yield from _referred(inner)
        case list():
            for inner in value:
                yield from _referred(inner)
