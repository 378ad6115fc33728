"""Validation of a value against a schema: one function per keyword, and a limit on work."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import orjson

from unisono.core.json_pointers import names_in
from unisono.schemas.formats import has_format
from unisono.schemas.patterns import Expression

# Maximum characters of a quoted string, and digits of a quoted integer.
MAX_QUOTED = 60


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Mapping[str, Callable[[object], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "number": is_number,
    "integer": lambda value: is_number(value) and (isinstance(value, int) or float(str(value)).is_integer()),
    "string": lambda value: isinstance(value, str),
}


def is_type(name: str, value: object) -> bool:
    """Return True if `value` has the JSON type `name`; 1.0 is an integer, True is no number."""
    return _TYPES[name](value)


def hashable(value: object, count_step: Callable[[], None]) -> object:
    """Return a hashable object that is equal for equal JSON values.

    1 and 1.0 are equal, 1 and true are not. Calls `count_step` for every nested value. The function is recursive, so
    the depth of `value` must be limited.
    """
    count_step()
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, list | tuple):
        return ("array", *(hashable(item, count_step) for item in value))
    if isinstance(value, Mapping):
        return frozenset((name, hashable(item, count_step)) for name, item in value.items())
    return value


def quoted(value: object) -> str:
    """Return a value as short text for a message.

    Objects and arrays are only named by type. A long string is truncated. Any other value is quoted as JSON.
    """
    if isinstance(value, str) and len(value) > MAX_QUOTED:
        return orjson.dumps(value[:MAX_QUOTED] + "...").decode()
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "an array"
    if is_number(value):
        is_long = isinstance(value, int) and abs(value) >= 10**MAX_QUOTED
        return f"a number of more than {MAX_QUOTED} digits" if is_long else str(value)[:MAX_QUOTED]
    return orjson.dumps(value).decode()


# Maximum number of steps. A step is the evaluation of one keyword, or other work that takes about as long: one to two
# microseconds.
MAX_STEPS = 400_000
# Additional steps for slow work: the description of a mismatch, the check of a format, and a division.
MISMATCH_STEPS, FORMAT_STEPS, FRACTION_STEPS = 2, 3, 6
# Maximum depth of nested schema evaluations: far below the recursion limit of Python.
MAX_DEPTH = 128
# Maximum number of values of an `enum` in a message for the model.
MAX_LISTED_VALUES = 20

Path: TypeAlias = tuple[str | int, ...]
Schema: TypeAlias = Mapping[str, Any]


class WorkLimitReached(Exception):
    """Raised when a validation exceeds the limits of work; the value may be valid or not."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Violation of a schema, as the validator returns it, with the path of the violating value."""

    path: Path
    text: str

    def __str__(self) -> str:
        where = "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step[:60]}" for step in self.path[-12:])
        return f"{where if self.path else 'The answer'} {self.text}."


Mismatches: TypeAlias = Iterator[Mismatch]


class Validator:
    """Validator of one value against `root`; single use."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._steps = 0
        self._depth = 0
        # Each expression is compiled at most once, and each reference is resolved at most once.
        self._expressions: dict[str, Expression] = {}
        self._targets: dict[str, Any] = {}

    def validate(self, schema: object, value: object, path: Path = ()) -> Mismatches:
        """Yield the mismatches of `value`; iteration may raise WorkLimitReached."""
        if schema is True:
            return
        if not isinstance(schema, Mapping):
            yield Mismatch(path, "is not allowed")
            return
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise WorkLimitReached
        try:
            for name, argument in schema.items():
                if (check := CHECKS.get(name)) is not None:
                    self.count_steps()
                    yield from check(self, argument, value, path, schema)
        finally:
            self._depth -= 1

    def first(self, schema: object, value: object, path: Path = ()) -> Mismatch | None:
        mismatches = self.validate(schema, value, path)
        try:
            found = next(mismatches, None)
        finally:
            mismatches.close()  # type: ignore[attr-defined]
        if found is not None:
            self.count_steps(MISMATCH_STEPS)
        return found

    def is_valid(self, schema: object, value: object) -> bool:
        return self.first(schema, value) is None

    def count_steps(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise WorkLimitReached

    def matches(self, pattern: str, text: str) -> bool:
        expression = self._expressions.get(pattern)
        if expression is None:
            expression = self._expressions[pattern] = Expression(pattern)
        self.count_steps(expression.steps(text))
        return expression.found(text)

    def hashable(self, value: object) -> object:
        return hashable(value, self.count_steps)

    def target(self, reference: str) -> object:
        """Return the schema that a reference points to."""
        if (found := self._targets.get(reference)) is not None:
            return found
        found = self._root
        for step in names_in(reference):
            found = found[int(step)] if isinstance(found, list | tuple) else found[step]
        return self._targets.setdefault(reference, found)


Check: TypeAlias = Callable[[Validator, Any, Any, Path, Schema], Mismatches]


def _for(kind: type, check: Check) -> Check:
    """Limit a check to values of one JSON type; a keyword allows all values of other types."""

    def checked(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
        return check(validator, argument, value, path, schema) if isinstance(value, kind) else iter(())

    return checked


def _ref(validator: Validator, argument: str, value: Any, path: Path, schema: Schema) -> Mismatches:
    return validator.validate(validator.target(argument), value, path)


def _type(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    names = [argument] if isinstance(argument, str) else argument
    if not any(is_type(name, value) for name in names):
        yield Mismatch(path, f"must be of type {' or '.join(names)}, not {quoted(value)}")


def _enum(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    found = validator.hashable(value)
    if not any(validator.hashable(each) == found for each in argument):
        rest = ", ..." if len(argument) > MAX_LISTED_VALUES else ""
        values = ", ".join(map(quoted, argument[:MAX_LISTED_VALUES]))
        yield Mismatch(path, f"must be one of {values}{rest}, not {quoted(value)}")


def _const(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    if validator.hashable(value) != validator.hashable(argument):
        yield Mismatch(path, f"must be {quoted(argument)}, not {quoted(value)}")


def _any_of(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    nearest: Mismatch | None = None
    for each in argument:
        mismatch = validator.first(each, value, path)
        if mismatch is None:
            return
        # Report the alternative that matched to the greatest depth, which most likely was intended.
        if nearest is None or len(mismatch.path) > len(nearest.path):
            nearest = mismatch
    if nearest is not None:
        yield Mismatch(nearest.path, f"{nearest.text} (no other alternative allows it either)")


def _one_of(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    count = sum(validator.is_valid(each, value) for each in argument)
    if count == 0:
        yield from _any_of(validator, argument, value, path, schema)
    elif count > 1:
        yield Mismatch(path, f"must match exactly one alternative, but matches {count}")


def _all_of(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    for each in argument:
        yield from validator.validate(each, value, path)


def _not(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    if validator.is_valid(argument, value):
        yield Mismatch(path, f"must not match the schema of the keyword not, but {quoted(value)} does")


def _if(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    branch = "then" if validator.is_valid(argument, value) else "else"
    return validator.validate(schema.get(branch, True), value, path)


def _properties(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    for name in value:
        validator.count_steps()
        if name in argument:
            yield from validator.validate(argument[name], value[name], (*path, name))


def _pattern_properties(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    for pattern, inner in argument.items():
        for name in value:
            if validator.matches(pattern, name):
                yield from validator.validate(inner, value[name], (*path, name))


def _additional_properties(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name in value:
        validator.count_steps()
        if name in known or any(validator.matches(pattern, name) for pattern in patterns):
            continue
        if argument is False:
            yield Mismatch(path, f"must not have the property {quoted(name)}")
        else:
            yield from validator.validate(argument, value[name], (*path, name))


def _property_names(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    for name in value:
        if (mismatch := validator.first(argument, name)) is not None:
            yield Mismatch(path, f"has a property {quoted(name)} whose name {mismatch.text}")


def _required(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    validator.count_steps(len(argument))
    for name in argument:
        if name not in value:
            yield Mismatch(path, f"must have the property {quoted(name)}")


def _dependent_required(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    for name, others in argument.items():
        if name in value:
            yield from _required(validator, others, value, path, schema)


def _dependent_schemas(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    for name, inner in argument.items():
        if name in value:
            yield from validator.validate(inner, value, path)


def _prefix_items(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    for index, (inner, item) in enumerate(zip(argument, value, strict=False)):
        yield from validator.validate(inner, item, (*path, index))


def _items(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    start = len(schema.get("prefixItems", ()))
    for index, item in enumerate(value[start:], start):
        validator.count_steps()
        yield from validator.validate(argument, item, (*path, index))


def _contains(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    least, most = schema.get("minContains", 1), schema.get("maxContains", len(value))
    count = 0
    for item in value:
        validator.count_steps()
        count += validator.is_valid(argument, item)
    if not least <= count <= most:
        yield Mismatch(path, f"must have from {least} to {most} items that match the keyword contains, not {count}")


def _unique_items(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    if argument and len({validator.hashable(item) for item in value}) < len(value):
        yield Mismatch(path, "must not contain the same item twice")


def _pattern(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    if not validator.matches(argument, value):
        yield Mismatch(path, f"must match the pattern {argument}, but {quoted(value)} does not")


def _format(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    validator.count_steps(FORMAT_STEPS)
    if not has_format(argument, value):
        yield Mismatch(path, f"must have the format {argument}, but {quoted(value)} does not")


def _multiple_of(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
    # The time of a division grows with the digits of an integer.
    validator.count_steps(FRACTION_STEPS + (value.bit_length() // 1_000 if isinstance(value, int) else 0))
    if is_number(value) and _fraction(value) % _fraction(argument):
        yield Mismatch(path, f"must be a multiple of {argument}, not {quoted(value)}")


def _fraction(value: object) -> Fraction:
    # A decimal fraction is compared as written, not as the nearest float; `str` rejects very long integers.
    return Fraction(value) if isinstance(value, int) else Fraction(str(value))


def _size(kind: type, unit: str, is_within: Callable[[int, int], bool], words: str) -> Check:
    def checked(validator: Validator, argument: int, value: Any, path: Path, schema: Schema) -> Mismatches:
        if not is_within(len(value), argument):
            yield Mismatch(path, f"must have {words} {argument} {unit}, not {len(value)}")

    return _for(kind, checked)


def _bound(is_within: Callable[[Any, Any], bool], words: str) -> Check:
    def checked(validator: Validator, argument: Any, value: Any, path: Path, schema: Schema) -> Mismatches:
        if is_number(value) and not is_within(value, argument):
            yield Mismatch(path, f"must be {words} {argument}, not {quoted(value)}")

    return checked


# Checks of all keywords that constrain a value on their own.
CHECKS: Mapping[str, Check] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "$ref": _ref,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "allOf": _all_of,
    "not": _not,
    "if": _if,
    "properties": _for(dict, _properties),
    "patternProperties": _for(dict, _pattern_properties),
    "additionalProperties": _for(dict, _additional_properties),
    "propertyNames": _for(dict, _property_names),
    "required": _for(dict, _required),
    "minProperties": _size(dict, "properties", operator.ge, "at least"),
    "maxProperties": _size(dict, "properties", operator.le, "at most"),
    "dependentRequired": _for(dict, _dependent_required),
    "dependentSchemas": _for(dict, _dependent_schemas),
    "prefixItems": _for(list, _prefix_items),
    "items": _for(list, _items),
    "contains": _for(list, _contains),
    "minItems": _size(list, "items", operator.ge, "at least"),
    "maxItems": _size(list, "items", operator.le, "at most"),
    "uniqueItems": _for(list, _unique_items),
    "minLength": _size(str, "characters", operator.ge, "at least"),
    "maxLength": _size(str, "characters", operator.le, "at most"),
    "pattern": _for(str, _pattern),
    "format": _for(str, _format),
    "minimum": _bound(operator.ge, "at least"),
    "maximum": _bound(operator.le, "at most"),
    "exclusiveMinimum": _bound(operator.gt, "above"),
    "exclusiveMaximum": _bound(operator.lt, "below"),
    "multipleOf": _multiple_of,
}
# Keywords without their own check, because the checks of `if`, `contains` and `$ref` read them.
READ_BY_OTHERS = frozenset({"then", "else", "minContains", "maxContains", "$defs", "definitions"})
