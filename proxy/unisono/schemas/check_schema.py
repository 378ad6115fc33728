"""Check that a schema is supported, before any token is generated.

Each schema is visited once. An error names the path in the request and, if possible, what to use instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from unisono.core.json_pointers import names_in
from unisono.core.tagged_unions import is_tagged_union
from unisono.errors import InvalidRequest
from unisono.schemas.formats import FORMATS
from unisono.schemas.keyword_table import KEYWORDS, REFUSED, SHAPES, Keyword, Subschemas, schemas_in
from unisono.schemas.patterns import BadPattern, Expression

# Maximum nesting depth of schemas.
MAX_LEVELS = 64
# Maximum number of schemas in one document, because each of them is visited.
MAX_SCHEMAS = 10_000
MAX_PROPERTIES = 5_000
# Maximum values of all enums together.
MAX_ENUM_VALUES = 1_000
# Maximum characters of all property and definition names and all enum and const values.
MAX_CHARACTERS = 120_000
# Maximum work of compiling all expressions, in the units of `patterns`. Each distinct expression counts once.
MAX_PATTERN_WORK = 250_000
# Maximum nesting depth of a value in enum or const.
MAX_VALUE_LEVELS = 16

# Location of a schema in its document: the steps of its JSON pointer.
Location: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StrictRules:
    """Rules of one API for strict schemas.

    In every API, the root is an object, every object is closed, and the gateway enforces the whole schema. `keywords`
    and `formats` are the permitted keywords and formats. Unless `can_omit_properties` is True, an object requires all
    its properties.
    """

    keywords: Collection[str]
    formats: Collection[str]
    can_omit_properties: bool


OPENAI: Final = StrictRules(
    keywords=frozenset(name for name, keyword in KEYWORDS.items() if keyword.strict),
    formats=[*FORMATS],
    can_omit_properties=False,
)
# Anthropic permits `allOf`, but fewer other keywords. All are permitted here, because the gateway can enforce them.
# `uri` is not checked: models write addresses with characters that a URI must escape.
ANTHROPIC: Final = StrictRules(keywords=frozenset(KEYWORDS), formats=[*FORMATS, "uri"], can_omit_properties=True)


def check(schema: object, path: str, *, strict: StrictRules | None = None) -> None:
    """Raise InvalidRequest if a schema is not supported, or violates the rules `strict`.

    The error names the keyword by its path below `path`.
    """
    if not isinstance(schema, Mapping):
        raise _refused(path, "must be a JSON schema, which is an object")
    survey = _Survey(path, strict)
    survey.visit(schema)
    survey.check_references()
    if strict is not None and (schema.get("type") != "object" or "anyOf" in schema or "oneOf" in schema):
        raise _refused(f"{path}.type", "must be 'object': the root of a strict schema is an object, not a union")


def _refused(param: str, fault: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}' {fault}.", param=param)


@dataclass(slots=True)
class _Survey:
    """State of the check of one document.

    `schemas` maps the location of each schema in the document to that schema.
    """

    path: str
    strict: StrictRules | None
    schemas: dict[Location, Mapping[str, object]] = field(default_factory=dict)
    properties: int = 0
    enum_values: int = 0
    characters: int = 0
    pattern_work: int = 0
    patterns: set[str] = field(default_factory=set)

    def visit(self, root: Mapping[str, object]) -> None:
        pending: list[tuple[Location, object, int]] = [((), root, 1)]
        while pending:
            location, schema, level = pending.pop()
            if level > MAX_LEVELS:
                raise _refused(self.param(location), f"is nested too deeply: use at most {MAX_LEVELS} levels")
            if not isinstance(schema, Mapping):
                if self.strict is not None and location[-1] != "additionalProperties":
                    raise _refused(self.param(location), "must be an object in a strict schema")
                continue
            self.schemas[location] = schema
            if len(self.schemas) > MAX_SCHEMAS:
                raise _refused(self.path, f"is too large: it contains more than {MAX_SCHEMAS:,} schemas")
            for name, value in schema.items():
                found = self.check_keyword(location, str(name), value)
                if found is not None:
                    pending += [(to, each, level + 1) for to, each in _subschemas(location, name, found, value)]
            if self.strict is not None:
                self.check_closed(location, schema, self.strict)

    def param(self, location: Location) -> str:
        return ".".join((self.path, *location))

    def check_keyword(self, location: Location, name: str, value: object) -> Keyword | None:
        """Check one keyword. Return None for a keyword that does not constrain values."""
        param = self.param((*location, name))
        if name in REFUSED:
            raise _refused(param, f"is not supported: {REFUSED[name]}")
        if name in ("$id", "$schema") and location:
            raise _refused(param, "is supported only at the root of a schema")
        found = KEYWORDS.get(name)
        if found is None:
            return None
        strict = self.strict
        if strict is not None and name not in strict.keywords and not self.is_tagged_union(location, name):
            raise _refused(param, "is not supported in a strict schema")
        is_permitted, expected = SHAPES.get(found.subschemas, (found.is_permitted, found.expected))
        if not is_permitted(value):
            raise _refused(param, f"must be {expected}")
        self.count(param, name, value)
        return found

    def is_tagged_union(self, location: Location, name: str) -> bool:
        """Return True for the `oneOf` of a tagged union.

        Raises InvalidRequest if its branches overlap.
        """
        schema = self.schemas[location]
        if name != "oneOf" or "discriminator" not in schema:
            return False
        if not is_tagged_union(schema, self.schemas[()]):
            fault = (
                "has branches that its discriminator cannot distinguish; "
                "set the discriminator's property to a different constant in each branch"
            )
            raise _refused(self.param((*location, name)), fault)
        return True

    def count(self, param: str, name: str, value: object) -> None:
        """Count costly keywords against the limits."""
        if name in ("properties", "patternProperties") and isinstance(value, Mapping):
            self.properties += len(value)
            self.characters += sum(map(len, value))
        elif name in ("$defs", "definitions") and isinstance(value, Mapping):
            self.characters += sum(map(len, value))
        elif name == "enum" and isinstance(value, list | tuple):
            self.enum_values += len(value)
            self.characters += sum(_size(each, param) for each in value)
        elif name == "const":
            self.characters += _size(value, param)
        elif name == "format" and self.strict is not None and value not in self.strict.formats:
            raise _refused(param, f"is not supported in a strict schema; use one of: {', '.join(self.strict.formats)}")
        for pattern in _patterns(name, value):
            if pattern in self.patterns:
                continue
            self.patterns.add(pattern)
            try:
                self.pattern_work += 20 + Expression(pattern).size.work
            except BadPattern as error:
                raise _refused(param, f"is not supported: {error}") from error
        for size, limit, unit in (
            (self.properties, MAX_PROPERTIES, "properties"),
            (self.enum_values, MAX_ENUM_VALUES, "values in enums"),
            (self.characters, MAX_CHARACTERS, "characters in names and values"),
            (self.pattern_work, MAX_PATTERN_WORK, "steps of work in regular expressions"),
        ):
            if size > limit:
                raise _refused(param, f"exceeds a limit: a schema may have at most {limit:,} {unit}")

    def check_closed(self, location: Location, schema: Mapping[str, object], rules: StrictRules) -> None:
        """Check that a strict schema closes its object, and follows the rules for its properties."""
        types = schema.get("type")
        if types != "object" and not (isinstance(types, list | tuple) and "object" in types):
            return
        if schema.get("additionalProperties") is not False:
            raise _refused(self.param((*location, "additionalProperties")), "must be false in a strict schema")
        if rules.can_omit_properties:
            return
        properties, required = schema.get("properties", {}), schema.get("required", [])
        assert isinstance(properties, Mapping), "its shape was checked"
        assert isinstance(required, list | tuple), "its shape was checked"
        missing = sorted(set(properties) - set(required))
        if missing:
            raise _refused(
                self.param((*location, "required")),
                f"must name every property in a strict schema, but does not name '{missing[0]}'; "
                "for an optional property, allow the type null",
            )

    def check_references(self) -> None:
        """Check that each reference points to a schema in this document.

        A chain of references must not lead back to itself for the same value.
        """
        edges = {
            location: tuple(self._same_value_schemas(location, schema)) for location, schema in self.schemas.items()
        }
        acyclic: set[Location] = set()
        for start in edges:
            self._check_cycles(start, edges, acyclic)

    def _same_value_schemas(self, location: Location, schema: Mapping[str, object]) -> Iterator[Location]:
        """Yield the locations of the schemas that apply to the same value as `schema`."""
        for name, value in schema.items():
            keyword = KEYWORDS.get(name)
            if keyword is None or not keyword.in_place:
                continue
            if name == "$ref":
                yield self._target((*location, name), str(value))
            for to, each in _subschemas(location, name, keyword, value):
                if isinstance(each, Mapping):
                    yield to

    def _target(self, location: Location, reference: str) -> Location:
        param = self.param(location)
        if reference != "#" and not reference.startswith("#/"):
            raise _refused(param, "must begin with '#/': only references within the schema are supported")
        target = names_in(reference)
        if target not in self.schemas:
            raise _refused(param, "does not point to a schema")
        return target

    def _check_cycles(
        self, start: Location, edges: Mapping[Location, tuple[Location, ...]], acyclic: set[Location]
    ) -> None:
        """Raise InvalidRequest if a cycle of references can be reached from `start`.

        The depth-first search is not recursive, because a chain may be as long as the number of schemas.
        """
        if start in acyclic:
            return
        above = {start}
        stack = [(start, iter(edges[start]))]
        while stack:
            location, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                stack.pop()
                above.discard(location)
                acyclic.add(location)
            elif following in above:
                fault = "refers back to itself for the same value; put a property or an item between the references"
                raise _refused(self.param(location), fault)
            elif following not in acyclic:
                above.add(following)
                stack.append((following, iter(edges[following])))


def _subschemas(location: Location, name: str, keyword: Keyword, value: object) -> Iterator[tuple[Location, object]]:
    for key, each in schemas_in(keyword, value).items():
        yield ((*location, name) if keyword.subschemas is Subschemas.ONE else (*location, name, key)), each


def _patterns(name: str, value: object) -> Iterator[str]:
    if name == "pattern":
        yield str(value)
    elif name == "patternProperties" and isinstance(value, Mapping):
        yield from value


def _size(value: object, param: str) -> int:
    """Return the number of characters of a value in enum or const."""
    size = 0
    pending = [(value, 1)]
    while pending:
        each, level = pending.pop()
        if level > MAX_VALUE_LEVELS:
            raise _refused(param, f"contains a value of more than {MAX_VALUE_LEVELS} levels")
        size += len(each) if isinstance(each, str) else 1
        if isinstance(each, Mapping):
            size += sum(map(len, each))
            pending += [(inner, level + 1) for inner in each.values()]
        elif isinstance(each, list | tuple):
            pending += [(inner, level + 1) for inner in each]
    return size
