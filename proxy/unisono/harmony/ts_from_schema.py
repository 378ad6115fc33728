"""TypeScript shapes from the JSON Schema of tool parameters.

The shapes can be printed as correct TypeScript: references are resolved, `allOf` is merged, alternatives become unions,
and nothing silently becomes `any`. Constraints that TypeScript cannot express become comments. Text that could
break out of the declaration is rejected. A `SchemaBudget` bounds the work for any schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TypeAlias

from unisono.core.frozen import dataclass
from unisono.core.json_pointers import names_in
from unisono.errors import InvalidRequest, well_formed
from unisono.harmony.declaration_limits import (
    MAX_ENUM,
    MAX_KEY,
    SchemaBudget,
    SchemaPlace,
    breaks_out,
    one_line,
    to_json,
)
from unisono.harmony.ts_types import (
    ANY,
    NEVER,
    NULL,
    BlockType,
    InlineType,
    ObjectField,
    Shape,
    array_of,
    comments_of,
    inline,
    merged,
    union_of,
)

Schema: TypeAlias = Mapping[str, object]

# Aliases that clients use for JSON Schema's seven type names.
TYPE_NAMES = {
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "decimal": "number",
    "str": "string",
    "text": "string",
    "bool": "boolean",
    "dict": "object",
    "map": "object",
    "list": "array",
    "tuple": "array",
    "none": "null",
}

ALTERNATIVES = {"anyOf": "at least one", "oneOf": "exactly one"}

MAX_REFERENCE_LENGTH = 1_000

# Types of schemas without `type`, by their keywords; the first match counts.
_KEYWORD_TYPES = {
    "object": ("properties", "patternProperties", "additionalProperties", "required"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}

_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "nullable", "$defs", "definitions", "$schema", "$id", "$comment")
)


@dataclass(frozen=True, slots=True)
class SchemaReading:
    """TypeScript shape and comments of a schema; `flat` is the schema with references resolved."""

    shape: Shape
    description: str = ""
    notes: tuple[str, ...] = ()
    flat: Schema = field(default_factory=dict)

    @property
    def comment(self) -> str:
        notes = "; ".join(self.notes)
        return f"{self.description} ({notes})" if self.description and notes else self.description or notes


def read_parameters(schema: object, budget: SchemaBudget) -> SchemaReading | None:
    """Return the type of a tool's argument object; None if the tool takes no arguments.

    The work is charged to `budget`. Raises InvalidRequest for a schema that cannot be declared; the message names the
    location inside the schema."""
    if not isinstance(schema, Mapping):
        raise InvalidRequest("A tool's parameters must be a JSON Schema object.")
    if not schema or not schema.keys() - _ANNOTATIONS:
        return None
    reader = _Reader(schema, budget)
    reading = reader.read(schema, SchemaPlace(references=("#",)))
    shape = reading.shape
    if isinstance(shape, BlockType):
        if not shape.fields:
            return None
        return SchemaReading(BlockType(shape.fields, comment=reading.comment))
    return SchemaReading(shape, reading.description, reading.notes)


class _Reader:
    """Reader of the schemas in one document."""

    def __init__(self, document: Schema, budget: SchemaBudget) -> None:
        self._document = document
        self._budget = budget

    def read(self, schema: object, place: SchemaPlace) -> SchemaReading:
        self._budget.spend(nodes=1)
        place.check_depth()
        if isinstance(schema, bool):
            return SchemaReading(ANY if schema else NEVER)
        if not isinstance(schema, Mapping):
            raise place.refuse("a schema must be an object or a boolean")
        # Ignored keywords cost little, but references can lead to them thousands of times, so they are charged too.
        self._budget.spend(nodes=_breadth(schema) // 32)
        flat, place = self._flatten(schema, place)
        description = one_line(text) if isinstance(text := flat.get("description"), str) else ""
        self._budget.spend(characters=len(description))
        inner = self._alternatives(flat, place) or self._plain(flat, place)
        shape = union_of((inner.shape, NULL)) if flat.get("nullable") is True else inner.shape
        return SchemaReading(shape, description or inner.description, inner.notes, flat)

    def _flatten(self, schema: Schema, place: SchemaPlace) -> tuple[Schema, SchemaPlace]:
        """Return the schema with `$ref` and `allOf` merged in, its own keywords first."""
        reference, parts = schema.get("$ref"), schema.get("allOf")
        if reference is None and not parts:
            return schema, place
        place.check_depth()
        flat: Schema = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        if isinstance(reference, str):
            target: Schema
            if reference in place.references:
                target = self._repeated(reference)
            else:
                place = place.inside(reference)
                target, place = self._flatten(self._find(reference, place), place)
            # The title of a definition describes the definition, and not the property that refers to it.
            flat = self._merged(flat, {key: value for key, value in target.items() if key != "title"})
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, Mapping):
                inner, deeper = self._flatten(part, place.at("allOf"))
                place = SchemaPlace(place.names, deeper.references)
                flat = self._merged(flat, inner)
        return flat, place

    def _merged(self, first: Schema, second: Schema) -> Schema:
        self._budget.spend(nodes=1 + (_breadth(first) + _breadth(second)) // 32)
        return merged(first, second)

    def _find(self, reference: str, place: SchemaPlace) -> Schema:
        """Return the schema that a reference points to; only a description if not in the document."""
        if len(reference) > MAX_REFERENCE_LENGTH:
            raise place.refuse(f"a reference is longer than {MAX_REFERENCE_LENGTH} characters")
        elsewhere = {"description": f"see {one_line(reference)}"}
        base, _, pointer = reference.partition("#")
        if base or (pointer and not pointer.startswith("/")):
            return elsewhere
        found: object = self._document
        for key in names_in(reference):
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                return elsewhere
        if isinstance(found, bool):
            return {} if found else {"not": {}}
        if not isinstance(found, Mapping):
            raise place.refuse("a reference must point to a schema")
        return found

    def _repeated(self, reference: str) -> Schema:
        """Return the substitute for a recursive reference: only the type and name of its target."""
        target = self._find(reference, SchemaPlace())
        name = one_line(reference.rsplit("/", 1)[-1].removeprefix("#"))
        kind = _kind(target)
        note = f"same shape as {name}" if name else "same shape as the whole argument"
        return {"description": note} | ({"type": kind} if kind else {})

    def _alternatives(self, schema: Schema, place: SchemaPlace) -> SchemaReading | None:
        for keyword, words in ALTERNATIVES.items():
            options = schema.get(keyword)
            if not isinstance(options, list) or not options:
                continue
            base = {key: value for key, value in schema.items() if key != keyword}
            if all(isinstance(option, Mapping) and option.keys() <= {"required", "description"} for option in options):
                names = [" and ".join(_texts(option.get("required"))) for option in options]
                rest = self._alternatives(base, place) or self._plain(base, place)
                note = f"{words} of these is required: {one_line(', '.join(filter(None, names)))}"
                self._budget.spend(characters=len(note))
                return SchemaReading(rest.shape, rest.description, (*rest.notes, note) if any(names) else rest.notes)
            shared = {key: value for key, value in base.items() if key not in _ANNOTATIONS}
            readings = [
                self.read({"allOf": [option, shared]} if shared else option, place.at(f"{keyword}.{number}"))
                for number, option in enumerate(options)
            ]
            return _either(readings)
        return None

    def _plain(self, schema: Schema, place: SchemaPlace) -> SchemaReading:
        literals = schema.get("enum")
        if "const" in schema:
            literals = [schema["const"]]
        notes = comments_of(schema, self._budget)
        kind = schema.get("type")
        if isinstance(literals, list) and literals:
            # Schema generators may list null in `type` and omit it from `enum`.
            also = (NULL,) if isinstance(kind, list) and "null" in kind else ()
            return SchemaReading(union_of((self._literals(literals, place), *also)), notes=notes)
        if isinstance(kind, list) and kind:
            readings = [self._of_kind(str(name), schema, place) for name in kind]
            return SchemaReading(
                _either(readings).shape, notes=(*notes, *(note for each in readings for note in each.notes))
            )
        reading = self._of_kind(_kind(schema), schema, place)
        return SchemaReading(reading.shape, notes=(*notes, *reading.notes))

    def _of_kind(self, name: str, schema: Schema, place: SchemaPlace) -> SchemaReading:
        return _KINDS.get(TYPE_NAMES.get(name.lower(), name), _anything)(self, schema, place)

    def of_object(self, schema: Schema, place: SchemaPlace) -> SchemaReading:
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        values = self._values(schema, place)
        extra = ((f"each: {values.comment}",) if values.comment else ()) if values else ()
        if isinstance(properties, Mapping) and properties:
            required = frozenset(_texts(schema.get("required")))
            fields = tuple(
                self._field(key, value, key in required, place.at(str(key))) for key, value in properties.items()
            )
            if values:
                return SchemaReading(BlockType(fields), notes=(f"other keys: {inline(values.shape).text}", *extra))
            return SchemaReading(BlockType(fields), notes=("other keys are allowed",) if others is True else ())
        if values:
            return SchemaReading(InlineType((f"Record<string, {inline(values.shape).text}>",)), notes=extra)
        if not place.names and others is not True:
            return SchemaReading(BlockType(()))
        return SchemaReading(InlineType(("{}" if others is False else "object",)))

    def _values(self, schema: Schema, place: SchemaPlace) -> SchemaReading | None:
        """Return the shape of the values of keys that `properties` does not name; None if not given."""
        patterns, others = schema.get("patternProperties"), schema.get("additionalProperties")
        if isinstance(patterns, Mapping) and patterns:
            shapes = [self.read(value, place.at("patternProperties")).shape for value in patterns.values()]
            note = f"keys match {' or '.join(one_line(str(pattern)) for pattern in patterns)}"
            self._budget.spend(characters=len(note))
            return SchemaReading(union_of(shapes), notes=(note,))
        return self.read(others, place.at("additionalProperties")) if isinstance(others, Mapping) and others else None

    def _field(self, key: object, schema: object, required: bool, place: SchemaPlace) -> ObjectField:
        if not isinstance(key, str):
            raise place.refuse("a property name must be a string")
        if len(key) > MAX_KEY:
            raise place.refuse(f"a property name is longer than {MAX_KEY} characters")
        reading = self.read(schema, place)
        flat = reading.flat
        title = one_line(text) if isinstance(text := flat.get("title"), str) else ""
        examples, others = self._examples(flat.get("examples"))
        comment = SchemaReading(reading.shape, reading.description, (*reading.notes, *others)).comment
        default = self._default(flat, place) if "default" in flat else None
        self._budget.spend(characters=len(key) + len(title) + sum(map(len, (*examples, *others))))
        return ObjectField(
            key=well_formed(key),
            shape=reading.shape,
            required=required,
            # A generated title repeats the words of the key, so it would only cost tokens.
            title="" if _characters(title) == _characters(key) else title,
            comment=comment,
            default=default,
            examples=examples,
        )

    def _default(self, schema: Schema, place: SchemaPlace) -> str:
        default = schema["default"]
        bare = isinstance(default, str) and "enum" in schema and not breaks_out(default)
        text = well_formed(str(default)) if bare else to_json(default)
        self._budget.spend(characters=len(text))
        return text

    def _examples(self, examples: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the examples that are printed as lines, and those that become a comment.

        Examples are printed like openai-harmony does if all of them are strings. Otherwise, they become one comment.
        """
        if not isinstance(examples, list) or not examples:
            return (), ()
        texts = _texts(examples)
        if len(texts) == len(examples):
            return tuple(to_json(example)[1:-1] for example in texts), ()
        return (), (f"examples: {', '.join(map(to_json, examples))}",)

    def of_array(self, schema: Schema, place: SchemaPlace) -> SchemaReading:
        items, first = schema.get("items"), schema.get("prefixItems")
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems")
        if isinstance(first, list) and first:
            parts = [self.read(part, place.at(f"items.{n}")) for n, part in enumerate(first)]
            texts = [inline(part.shape).text for part in parts]
            if isinstance(items, Mapping):
                texts.append(f"...{inline(array_of(self.read(items, place.at('items')).shape)).text}")
            notes = tuple(f"item {n}: {part.comment}" for n, part in enumerate(parts, 1) if part.comment)
            return SchemaReading(InlineType((f"[{', '.join(texts)}]",)), notes=notes)
        item = self.read(items if items is not None else True, place.at("items"))
        return SchemaReading(array_of(item.shape), notes=(f"each: {item.comment}",) if item.comment else ())

    def _literals(self, values: Sequence[object], place: SchemaPlace) -> InlineType:
        if len(values) > MAX_ENUM:
            raise place.refuse(f"an enum has more than {MAX_ENUM} values")
        texts = [to_json(value) for value in values]
        self._budget.spend(characters=sum(map(len, texts)))
        unique = tuple(dict.fromkeys(texts))
        return InlineType(unique)


def _line(text: str) -> Callable[[_Reader, Schema, SchemaPlace], SchemaReading]:
    reading = SchemaReading(InlineType((text,)))
    return lambda _reader, _schema, _place: reading


_anything = _line("any")

_KINDS: dict[str, Callable[[_Reader, Schema, SchemaPlace], SchemaReading]] = {
    "object": _Reader.of_object,
    "array": _Reader.of_array,
    "string": _line("string"),
    "number": _line("number"),
    "integer": _line("number"),
    "boolean": _line("boolean"),
    "null": _line("null"),
}


def _kind(schema: Schema) -> str:
    """Return the type of the schema, or the type that its keywords imply; "" if unknown."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind
    return next((name for name, words in _KEYWORD_TYPES.items() if any(word in schema for word in words)), "")


def _either(readings: Sequence[SchemaReading]) -> SchemaReading:
    """Return the union of alternatives with all of their comments."""
    shape = union_of(reading.shape for reading in readings)
    speaking = [reading for reading in readings if reading.comment]
    if len({reading.shape for reading in readings} - {NULL}) <= 1 and len(speaking) == 1:
        return SchemaReading(shape, speaking[0].description, speaking[0].notes)
    notes = [
        f"{_label(reading.shape, number)}: {reading.comment}"
        for number, reading in enumerate(readings, 1)
        if reading.comment
    ]
    return SchemaReading(shape, notes=tuple(dict.fromkeys(notes)))


def _label(shape: Shape, number: int) -> str:
    return shape.text if isinstance(shape, InlineType) and len(shape.text) <= 40 else f"option {number}"


def _breadth(schema: Schema) -> int:
    """Return the number of keywords plus the number of entries in their lists and objects."""
    return len(schema) + sum(len(value) for value in schema.values() if isinstance(value, list | dict))


def _characters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text).casefold()


def _texts(values: object) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
