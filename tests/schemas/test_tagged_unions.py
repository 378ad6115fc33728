"""Tagged unions: recognised by their tags and rewritten as an equivalent anyOf."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.schemas.suite import closed
from unisono.core.tagged_unions import for_grammar, is_tagged_union
from unisono.schemas.check_schema import OPENAI, check


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Black(Strict):
    pet: Literal["cat"]
    color: Literal["black"]


class White(Strict):
    pet: Literal["cat"]
    color: Literal["white"]


class Dog(Strict):
    pet: Literal["dog"]
    name: str


class Owner(Strict):
    one: Annotated[Black | White, Field(discriminator="color")]
    several: list[Annotated[Annotated[Black | White, Field(discriminator="color")] | Dog, Field(discriminator="pet")]]


def test_pydantic_unions_are_accepted_as_strict_and_rewritten() -> None:
    schema = Owner.model_json_schema()
    check(schema, "schema", strict=OPENAI)
    text = repr(for_grammar(schema))
    assert "'oneOf'" not in text
    assert "'discriminator'" not in text
    assert text.count("'anyOf'") == 3


A, B = closed(tag={"const": "a"}), closed(tag={"enum": ["b", "c"]})
UNIONS: dict[str, tuple[list[Any], bool]] = {
    "constants and enums": ([A, B], True),
    "equal tags": ([A, B, A], False),
    "tag of any text": ([A, closed(tag={"type": "string"})], False),
    "optional tag": ([A, {**B, "required": []}], False),
    "branch that is not an object": ([A, {"type": "string"}], False),
    "boolean branch": ([A, True], False),
    "reference": ([A, {"$ref": "#/$defs/b"}], True),
    "encoded reference": ([A, {"$ref": "#/$defs/%62"}], True),
    "reference without a target": ([A, {"$ref": "#/$defs/x"}], False),
    "reference to itself": ([A, {"$ref": "#/$defs/loop"}], False),
}


@pytest.mark.parametrize(("branches", "exclusive"), UNIONS.values(), ids=UNIONS)
def test_a_union_is_rewritten_if_its_tags_differ(branches: list[Any], exclusive: bool) -> None:
    union = {"oneOf": branches, "discriminator": {"propertyName": "tag"}}
    root = {**closed(a=union), "$defs": {"b": B, "loop": {"$ref": "#/$defs/loop"}}}
    assert is_tagged_union(union, root) is exclusive
    expected = {**root, "properties": {"a": {"anyOf": branches}}} if exclusive else root
    assert for_grammar(root) == expected


def test_values_and_property_names_are_not_treated_as_unions() -> None:
    union = {"oneOf": [A, B], "discriminator": {"propertyName": "tag"}}
    schema = {"properties": {"oneOf": A, "discriminator": B}, "const": union, "default": union}
    assert for_grammar(schema) == schema
