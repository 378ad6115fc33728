"""Validation of a value against a schema: one function per keyword, and a limit on work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from unisono.schemas.formats import fits
from unisono.schemas.patterns import Expression
from unisono.schemas.values import is_type, key, shown

MOST_STEPS = 200_000
"""Maximum steps: keywords evaluated, plus work of equal cost."""
DEEPEST = 128
"""Maximum depth of nested schema evaluations: far below the recursion limit of Python."""


class WorkLimitReached(Exception):
    """The limits are exceeded, so nothing is known about the value."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """Violation of a schema, with its location in the value."""

    place: tuple[str | int, ...]
    text: str

    def __str__(self) -> str:
        where = "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step[:60]}" for step in self.place[-12:])
        return f"{'The answer' if not self.place else where} {self.text}."


Place: TypeAlias = tuple[str | int, ...]
Complaints: TypeAlias = Iterator[Complaint]
Schema: TypeAlias = Mapping[str, Any]


class Judge:
    """Validator of one value against `root`; single use."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._steps = 0
        self._depth = 0
        # Each expression is compiled at most once.
        self._expressions: dict[str, Expression] = {}

    def complaints(self, value: object) -> Complaints:
        """Yield violations; iteration may raise WorkLimitReached."""
        return self.judge(self._root, value, ())

    def judge(self, schema: object, value: object, place: Place) -> Complaints:
        if schema is True:
            return
        if not isinstance(schema, Mapping):
            yield Complaint(place, "must not be there")
            return
        self._depth += 1
        if self._depth > DEEPEST:
            raise WorkLimitReached
        try:
            for name, wanted in schema.items():
                judge = JUDGES.get(name)
                if judge is not None:
                    self.work()
                    yield from judge(self, wanted, value, place, schema)
        finally:
            self._depth -= 1

    def first(self, schema: object, value: object, place: Place) -> Complaint | None:
        complaints = self.judge(schema, value, place)
        try:
            return next(complaints, None)
        finally:
            complaints.close()  # type: ignore[attr-defined]

    def fits(self, schema: object, value: object) -> bool:
        return self.first(schema, value, ()) is None

    def work(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise WorkLimitReached

    def matches(self, pattern: str, text: str) -> bool:
        expression = self._expressions.get(pattern)
        if expression is None:
            expression = self._expressions[pattern] = Expression(pattern)
        self.work(expression.steps(text))
        return expression.found(text)

    def key(self, value: object) -> object:
        """Return a hashable that is equal for equal JSON values."""
        return key(value, self.work)

    def target(self, reference: str) -> object:
        found: Any = self._root
        for name in reference.split("/")[1:]:
            step = name.replace("~1", "/").replace("~0", "~")
            found = found[int(step)] if isinstance(found, list | tuple) else found[step]
        return found


def _reference(judge: Judge, wanted: str, value: object, place: Place, schema: Schema) -> Complaints:
    return judge.judge(judge.target(wanted), value, place)


def _type(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    names = [wanted] if isinstance(wanted, str) else wanted
    if not any(is_type(name, value) for name in names):
        yield Complaint(place, f"must be of type {' or '.join(names)}, not {shown(value)}")


def _enum(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    mine = judge.key(value)
    if not any(judge.key(each) == mine for each in wanted):
        choice = ", ".join(map(shown, wanted[:20])) + (", ..." if len(wanted) > 20 else "")
        yield Complaint(place, f"must be one of {choice}, not {shown(value)}")


def _const(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if judge.key(value) != judge.key(wanted):
        yield Complaint(place, f"must be {shown(wanted)}, not {shown(value)}")


def _any_of(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    nearest: Complaint | None = None
    for each in wanted:
        complaint = judge.first(each, value, place)
        if complaint is None:
            return
        # Report the alternative that matched to the greatest depth, which most likely was intended.
        if nearest is None or len(complaint.place) > len(nearest.place):
            nearest = complaint
    if nearest is not None:
        yield Complaint(nearest.place, f"{nearest.text} (nor does another alternative allow it)")


def _one_of(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    count = sum(judge.fits(each, value) for each in wanted)
    if count == 0:
        yield from _any_of(judge, wanted, value, place, schema)
    elif count > 1:
        yield Complaint(place, f"must match exactly one alternative, and matches {count}")


def _all_of(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    for each in wanted:
        yield from judge.judge(each, value, place)


def _not(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if judge.fits(wanted, value):
        yield Complaint(place, f"must not be what the schema rules out, as {shown(value)} is")


def _if(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    branch = "then" if judge.fits(wanted, value) else "else"
    if branch in schema:
        yield from judge.judge(schema[branch], value, place)


def _properties(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if isinstance(value, dict):
        for name in value:
            judge.work()
            if name in wanted:
                yield from judge.judge(wanted[name], value[name], (*place, name))


def _pattern_properties(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if isinstance(value, dict):
        for pattern, inner in wanted.items():
            for name in value:
                if judge.matches(pattern, name):
                    yield from judge.judge(inner, value[name], (*place, name))


def _additional(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if not isinstance(value, dict):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name in value:
        judge.work()
        if name in known or any(judge.matches(pattern, name) for pattern in patterns):
            continue
        if wanted is False:
            yield Complaint(place, f"must not have the property {shown(name)}")
        else:
            yield from judge.judge(wanted, value[name], (*place, name))


def _names(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if isinstance(value, dict):
        for name in value:
            if (complaint := judge.first(wanted, name, ())) is not None:
                yield Complaint(place, f"has a property {shown(name)} whose name {complaint.text}")


def _required(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if isinstance(value, dict):
        judge.work(len(wanted))
        for name in wanted:
            if name not in value:
                yield Complaint(place, f"must have the property {shown(name)}")


def _dependent_names(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if isinstance(value, dict):
        for name, others in wanted.items():
            if name in value:
                yield from _required(judge, others, value, place, schema)


def _dependent_schemas(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if isinstance(value, dict):
        for name, inner in wanted.items():
            if name in value:
                yield from judge.judge(inner, value, place)


def _prefix(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if isinstance(value, list):
        for number, (inner, each) in enumerate(zip(wanted, value, strict=False)):
            yield from judge.judge(inner, each, (*place, number))


def _items(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if isinstance(value, list):
        begin = len(schema.get("prefixItems", ()))
        for number, each in enumerate(value[begin:], begin):
            judge.work()
            yield from judge.judge(wanted, each, (*place, number))


def _contains(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if not isinstance(value, list):
        return
    least, most = schema.get("minContains", 1), schema.get("maxContains", len(value))
    count = 0
    for each in value:
        judge.work()
        count += judge.fits(wanted, each)
    if not least <= count <= most:
        yield Complaint(place, f"must have from {least} to {most} items that the schema asks for, not {count}")


def _unique(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if wanted and isinstance(value, list) and len({judge.key(each) for each in value}) < len(value):
        yield Complaint(place, "must not hold the same item twice")


def _pattern(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if isinstance(value, str) and not judge.matches(wanted, value):
        yield Complaint(place, f"must match the pattern {wanted}, as {shown(value)} does not")


def _format(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if isinstance(value, str) and not fits(wanted, value):
        yield Complaint(place, f"must be of the format {wanted}, which {shown(value)} is not")


def _multiple(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
    if is_type("number", value) and _fraction(value) % _fraction(wanted):
        yield Complaint(place, f"must be a multiple of {wanted}, not {shown(value)}")


def _fraction(value: object) -> Fraction:
    # A decimal fraction is compared as written, not as the nearest float; `str` rejects very long integers.
    return Fraction(value) if isinstance(value, int) else Fraction(str(value))


Judging: TypeAlias = Callable[[Judge, Any, object, Place, Schema], Complaints]


def _size(kind: type, what: str, is_wrong: Callable[[int, int], bool], bound: str) -> Judging:
    def judged(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
        if isinstance(value, str | list | dict) and type(value) is kind and is_wrong(len(value), wanted):
            yield Complaint(place, f"must have {bound} {wanted} {what}, not {len(value)}")

    return judged


def _amount(is_wrong: Callable[[Any, Any], bool], bound: str) -> Judging:
    def judged(judge: Judge, wanted: Any, value: object, place: Place, schema: Schema) -> Complaints:
        if is_type("number", value) and is_wrong(value, wanted):
            yield Complaint(place, f"must be {bound} {wanted}, not {shown(value)}")

    return judged


def _fewer(size: int, wanted: int) -> bool:
    return size < wanted


def _more(size: int, wanted: int) -> bool:
    return size > wanted


JUDGES: Mapping[str, Judging] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "$ref": _reference,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "allOf": _all_of,
    "not": _not,
    "if": _if,
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "propertyNames": _names,
    "required": _required,
    "minProperties": _size(dict, "properties", _fewer, "at least"),
    "maxProperties": _size(dict, "properties", _more, "at most"),
    "dependentRequired": _dependent_names,
    "dependentSchemas": _dependent_schemas,
    "prefixItems": _prefix,
    "items": _items,
    "contains": _contains,
    "minItems": _size(list, "items", _fewer, "at least"),
    "maxItems": _size(list, "items", _more, "at most"),
    "uniqueItems": _unique,
    "minLength": _size(str, "characters", _fewer, "at least"),
    "maxLength": _size(str, "characters", _more, "at most"),
    "pattern": _pattern,
    "format": _format,
    "minimum": _amount(lambda value, wanted: value < wanted, "at least"),
    "maximum": _amount(lambda value, wanted: value > wanted, "at most"),
    "exclusiveMinimum": _amount(lambda value, wanted: value <= wanted, "above"),
    "exclusiveMaximum": _amount(lambda value, wanted: value >= wanted, "below"),
    "multipleOf": _multiple,
}
"""Functions of all independent keywords.

The remaining keywords are read by those that they modify.
"""
READ_ALONG = frozenset({"then", "else", "minContains", "maxContains", "$defs", "definitions"})
"""Keywords read by `if`, `contains` and `$ref`."""
