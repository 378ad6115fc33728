"""Check that a schema is supported, before any token is generated.

Every part is visited once. An error names the path in the request and a replacement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from unisono.core.tagged_unions import is_tagged_union
from unisono.errors import InvalidRequest
from unisono.schemas.formats import FORMATS
from unisono.schemas.keywords import KEYWORDS, REFUSED, SHAPES, Holds, Keyword, schemas_in
from unisono.schemas.patterns import BadPattern, Expression

DEEPEST = 64
"""Maximum nesting depth of schemas."""
MOST_SCHEMAS = 10_000
MOST_PROPERTIES = 5_000
MOST_CHOICES = 1_000
"""Maximum values of all enums together."""
MOST_CHARACTERS = 120_000
"""Maximum characters of all property and definition names and all enum and const values."""
MOST_PATTERN_WORK = 250_000
"""Maximum work of compiling all expressions, in the units of `patterns`.

Each distinct expression counts once, and each occurrence a little.
"""
DEEPEST_VALUE = 16
"""Maximum depth of a value in enum or const."""


def check(schema: object, path: str, *, strict: bool = False) -> None:
    """Raise InvalidRequest with the path, below `path`, of an unsupported keyword.

    With `strict` the schema has to be in OpenAI's subset for strict schemas. The root is an object, every object is
    closed with all its properties required, and only the keywords marked strict in the table occur.
    """
    if not isinstance(schema, Mapping):
        raise _refused(path, "has to be a JSON schema, which is an object")
    survey = _Survey(path, strict)
    survey.visit(schema)
    survey.check_references()
    if strict and (schema.get("type") != "object" or "anyOf" in schema or "oneOf" in schema):
        raise _refused(f"{path}.type", "has to be 'object': a strict schema is one at its root, without a union")


def _refused(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}' {why}.", param=param)


@dataclass(slots=True)
class _Survey:
    """State of the survey of one schema. `places`: its schemas by JSON pointer."""

    path: str
    strict: bool
    places: dict[tuple[str, ...], Mapping[str, object]] = field(default_factory=dict)
    properties: int = 0
    choices: int = 0
    characters: int = 0
    pattern_work: int = 0
    patterns: set[str] = field(default_factory=set)

    def visit(self, root: Mapping[str, object]) -> None:
        waiting: list[tuple[tuple[str, ...], object, int]] = [((), root, 1)]
        while waiting:
            place, schema, depth = waiting.pop()
            if depth > DEEPEST:
                raise _refused(self.param(place), f"is too deep: schemas may stand {DEEPEST} deep in one another")
            if not isinstance(schema, Mapping):
                if self.strict and place[-1] != "additionalProperties":
                    raise _refused(self.param(place), "has to be an object in a strict schema")
                continue
            self.places[place] = schema
            if len(self.places) > MOST_SCHEMAS:
                raise _refused(self.path, f"is too large: it holds more than {MOST_SCHEMAS:,} schemas")
            for name, value in schema.items():
                found = self.keyword(place, str(name), value)
                if found is not None:
                    waiting += [(to, each, depth + 1) for to, each in _below(place, name, found, value)]
            if self.strict:
                self.closed(place, schema)

    def param(self, place: tuple[str, ...]) -> str:
        return ".".join((self.path, *place))

    def keyword(self, place: tuple[str, ...], name: str, value: object) -> Keyword | None:
        """Check one keyword; return None for one that does not constrain values."""
        param = self.param((*place, name))
        if name in REFUSED:
            raise _refused(param, f"is not supported: {REFUSED[name]}")
        if name in ("$id", "$schema") and place:
            raise _refused(param, "is not supported: it may stand at the root only")
        found = KEYWORDS.get(name)
        if found is None:
            return None
        if self.strict and not found.strict and not self.is_tagged_union(place, name):
            raise _refused(param, "is not supported in a strict schema")
        fits, what = SHAPES.get(found.holds, (found.fits, found.what))
        if not fits(value):
            raise _refused(param, f"has to be {what}")
        self.count(param, name, value)
        return found

    def is_tagged_union(self, place: tuple[str, ...], name: str) -> bool:
        """Return True for the `oneOf` of a tagged union.

        Raises InvalidRequest if its branches overlap.
        """
        schema = self.places[place]
        if name != "oneOf" or "discriminator" not in schema:
            return False
        if not is_tagged_union(schema, self.places[()]):
            why = "has branches that the discriminator's property does not tell apart; give each its own constant there"
            raise _refused(self.param((*place, name)), why)
        return True

    def count(self, param: str, name: str, value: object) -> None:
        """Count costly keywords against the limits."""
        if name in ("properties", "patternProperties") and isinstance(value, Mapping):
            self.properties += len(value)
            self.characters += sum(map(len, value))
        elif name in ("$defs", "definitions") and isinstance(value, Mapping):
            self.characters += sum(map(len, value))
        elif name == "enum" and isinstance(value, list | tuple):
            self.choices += len(value)
            self.characters += sum(_size(each, param) for each in value)
        elif name == "const":
            self.characters += _size(value, param)
        elif name == "format" and self.strict and value not in FORMATS:
            raise _refused(param, f"is not supported in a strict schema; what is: {', '.join(FORMATS)}")
        for pattern in _patterns(name, value):
            if pattern in self.patterns:
                continue
            self.patterns.add(pattern)
            try:
                self.pattern_work += 20 + Expression(pattern).size.work
            except BadPattern as error:
                raise _refused(param, f"is not supported: {error}") from error
        for size, most, what in (
            (self.properties, MOST_PROPERTIES, "properties"),
            (self.choices, MOST_CHOICES, "values in enums"),
            (self.characters, MOST_CHARACTERS, "characters in names and values"),
            (self.pattern_work, MOST_PATTERN_WORK, "steps of work in regular expressions"),
        ):
            if size > most:
                raise _refused(param, f"is too much: a schema may have {most:,} {what}")

    def closed(self, place: tuple[str, ...], schema: Mapping[str, object]) -> None:
        """Check that a strict schema closes its object and requires all properties."""
        types = schema.get("type")
        if types != "object" and not (isinstance(types, list | tuple) and "object" in types):
            return
        if schema.get("additionalProperties") is not False:
            raise _refused(self.param((*place, "additionalProperties")), "has to be false in a strict schema")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        assert isinstance(properties, Mapping), "its shape was checked"
        assert isinstance(required, list | tuple), "its shape was checked"
        missing = sorted(set(properties) - set(required))
        if missing:
            raise _refused(
                self.param((*place, "required")),
                f"has to name every property in a strict schema, and does not name '{missing[0]}'; "
                "one that may be missing has null among its types",
            )

    def check_references(self) -> None:
        """Check that each reference leads to a schema in this document.

        A chain of references must not lead back to itself for the same value.
        """
        leads = {place: tuple(self._in_place(place, schema)) for place, schema in self.places.items()}
        settled: set[tuple[str, ...]] = set()
        for start in leads:
            self._walk(start, leads, settled)

    def _in_place(self, place: tuple[str, ...], schema: Mapping[str, object]) -> Iterator[tuple[str, ...]]:
        for name, value in schema.items():
            keyword = KEYWORDS.get(name)
            if keyword is None or not keyword.in_place:
                continue
            if name == "$ref":
                yield self._target((*place, name), str(value))
            for to, each in _below(place, name, keyword, value):
                if isinstance(each, Mapping):
                    yield to

    def _target(self, place: tuple[str, ...], reference: str) -> tuple[str, ...]:
        param = self.param(place)
        if reference != "#" and not reference.startswith("#/"):
            raise _refused(param, "has to begin with '#/': only references within the schema are followed")
        names = reference[2:].split("/") if len(reference) > 1 else []
        target = tuple(name.replace("~1", "/").replace("~0", "~") for name in names)
        if "%" in reference or target not in self.places:
            raise _refused(param, "leads to no schema")
        return target

    def _walk(
        self,
        start: tuple[str, ...],
        leads: Mapping[tuple[str, ...], tuple[tuple[str, ...], ...]],
        settled: set[tuple[str, ...]],
    ) -> None:
        """Search depth first without recursion: a chain may be as long as there are schemas."""
        if start in settled:
            return
        above = {start}
        stack = [(start, iter(leads[start]))]
        while stack:
            place, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                stack.pop()
                above.discard(place)
                settled.add(place)
            elif following in above:
                raise _refused(self.param(place), "leads back to itself without a property or an item between")
            elif following not in settled:
                above.add(following)
                stack.append((following, iter(leads[following])))


def _below(
    place: tuple[str, ...], name: str, keyword: Keyword, value: object
) -> Iterator[tuple[tuple[str, ...], object]]:
    for key, each in schemas_in(keyword, value).items():
        yield ((*place, name) if keyword.holds is Holds.ONE else (*place, name, key)), each


def _patterns(name: str, value: object) -> Iterator[str]:
    if name == "pattern":
        yield str(value)
    elif name == "patternProperties" and isinstance(value, Mapping):
        yield from value


def _size(value: object, param: str) -> int:
    """Return the number of characters of a value in enum or const."""
    size = 0
    waiting = [(value, 1)]
    while waiting:
        each, depth = waiting.pop()
        if depth > DEEPEST_VALUE:
            raise _refused(param, "holds a value that is too deep")
        size += len(each) if isinstance(each, str) else 1
        if isinstance(each, Mapping):
            size += sum(map(len, each))
            waiting += [(inner, depth + 1) for inner in each.values()]
        elif isinstance(each, list | tuple):
            waiting += [(inner, depth + 1) for inner in each]
    return size
