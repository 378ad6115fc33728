"""Seeded JSON schemas and regular expressions in levels of difficulty, each with a check by an independent library.

Nothing is downloaded. The gateway validates answers with its own code, so `jsonschema` and Python's `re` decide here.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from jsonschema import Draft202012Validator

# The demo model was trained on one schema only, with this name and these questions.
TRAINED_SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
}
TRAINED_CITIES: Final = ("Paris", "London", "Rome", "Tokyo", "Berlin", "Madrid", "Oslo", "Cairo")
EFFORTS: Final = ("low", "medium", "high")
TRAINED_LEVELS: Final[Mapping[str, Mapping[str, float]]] = {
    "schema 0: trained": {},
    "schema 0: trained, temperature 1": {"temperature": 1, "seed": 1},
}

SCHEMAS_PER_LEVEL: Final = 50
EXPRESSIONS_PER_LEVEL: Final = 20


@dataclass(frozen=True)
class Case:
    """Request fields, and the check of the answer's text."""

    level: str
    question: str
    fields: Mapping[str, Any]
    is_valid: Callable[[str], bool]


def trained_cases() -> list[Case]:
    """Return the requests that the demo model was trained on: every city with every effort, greedy and sampled."""
    return [
        _schema_case(level, TRAINED_SCHEMA, city, reasoning_effort=effort, **sampling)
        for level, sampling in TRAINED_LEVELS.items()
        for city in TRAINED_CITIES
        for effort in EFFORTS
    ]


def schema_cases(seed: int, per_level: int = SCHEMAS_PER_LEVEL) -> list[Case]:
    """Return cases with schemas, the same ones for the same seed."""
    seeded = random.Random(seed)
    return [
        _schema_case(f"schema {level}", write(seeded), seeded.choice(TRAINED_CITIES))
        for level, write in SCHEMA_LEVELS.items()
        for _ in range(per_level)
    ]


def expression_cases(seed: int, per_level: int = EXPRESSIONS_PER_LEVEL) -> list[Case]:
    """Return cases with regular expressions, the same ones for the same seed."""
    seeded = random.Random(seed)
    return [
        _expression_case(f"regex {level}", write(seeded), seeded.choice(TRAINED_CITIES))
        for level, write in EXPRESSION_LEVELS.items()
        for _ in range(per_level)
    ]


def _schema_case(level: str, schema: Mapping[str, Any], city: str, **fields: Any) -> Case:
    validator = Draft202012Validator(schema)

    def is_valid(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text)))
        except json.JSONDecodeError:
            return False

    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return Case(level, _question(city), {"response_format": form, **fields}, is_valid)


def _expression_case(level: str, pattern: str, city: str) -> Case:
    # Python's engine has no classes of Unicode.
    compiled = re.compile(pattern.replace(r"\p{Lu}", "[A-ZÀ-ÖØ-Þ]").replace(r"\p{L}", r"[^\W\d_]"))
    fields = {"structured_outputs": {"regex": pattern}}
    return Case(level, _question(city), fields, lambda text: compiled.fullmatch(text) is not None)


def _question(city: str) -> str:
    return f"Which country is {city} in?"


# Schemas

NAMES: Final = (
    "city", "country", "name", "id", "count", "tags", "items", "owner", "status", "price", "note", "address", "größe",
)  # fmt: skip
WORDS: Final = ("red", "green", "blue", "open", "closed", "naïve", "日本", "a b", 'say "hi"')


def _closed(properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


def _object(seeded: random.Random, few: int, many: int, value: Callable[[random.Random], Any]) -> dict[str, Any]:
    return _closed({name: value(seeded) for name in seeded.sample(NAMES, seeded.randint(few, many))})


def _simple(seeded: random.Random) -> dict[str, Any]:
    return seeded.choice((
        {"type": "string", "maxLength": seeded.randint(5, 20)},
        {"type": "integer", "minimum": 0, "maximum": 9},
        {"type": "boolean"},
    ))  # fmt: skip


def _limited(seeded: random.Random) -> dict[str, Any]:
    low = seeded.randint(-50, 50)
    return seeded.choice((
        _simple(seeded),
        {"enum": seeded.sample(WORDS, 3)},
        {"type": "integer", "minimum": low, "maximum": low + seeded.randint(1, 200)},
        {"type": ["string", "null"], "minLength": 1, "maxLength": 12},
        {"const": seeded.choice(WORDS)},
    ))  # fmt: skip


def _nested(seeded: random.Random) -> dict[str, Any]:
    return seeded.choice((
        _limited(seeded),
        _object(seeded, 1, 3, _limited),
        {"type": "array", "items": _limited(seeded), "minItems": 1, "maxItems": 3},
    ))  # fmt: skip


def _branched(seeded: random.Random) -> dict[str, Any]:
    return seeded.choice((
        _nested(seeded),
        {"anyOf": [_object(seeded, 1, 2, _nested), {"type": "null"}]},
        {"anyOf": [_closed({"kind": {"const": word}, "value": _nested(seeded)}) for word in ("a", "b")]},
        {"$ref": "#/$defs/shared"},
    ))  # fmt: skip


def _patterned(seeded: random.Random) -> dict[str, Any]:
    return seeded.choice((
        _branched(seeded),
        {"type": "string", "pattern": seeded.choice(("^[A-Z]{2}-[0-9]{3}$", "^(\\+49)?[0-9]{4,8}$", "^#[0-9a-f]{6}$"))},
        {"type": "string", "format": seeded.choice(("date", "date-time", "uuid"))},
        {"type": "array", "prefixItems": [_limited(seeded), _limited(seeded)], "minItems": 2, "maxItems": 2},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
    ))  # fmt: skip


def _with_definitions(schema: dict[str, Any], seeded: random.Random) -> dict[str, Any]:
    return {**schema, "$defs": {"shared": _object(seeded, 1, 2, _limited)}}


def _recursive(seeded: random.Random) -> dict[str, Any]:
    leaf = _object(seeded, 1, 3, _limited)
    leaf["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    leaf["required"].append("next")
    schema = _object(seeded, 6, 10, _patterned)
    schema["properties"]["tree"] = {"$ref": "#/$defs/node"}
    schema["required"].append("tree")
    return {**schema, "$defs": {"node": leaf, "shared": _object(seeded, 1, 2, _limited)}}


SCHEMA_LEVELS: Final[Mapping[str, Callable[[random.Random], dict[str, Any]]]] = {
    "1: flat": lambda seeded: _object(seeded, 1, 3, _simple),
    "2: enums and limits": lambda seeded: _object(seeded, 2, 5, _limited),
    "3: nested": lambda seeded: _object(seeded, 2, 4, _nested),
    "4: anyOf and $ref": lambda seeded: _with_definitions(_object(seeded, 2, 4, _branched), seeded),
    "5: patterns and formats": lambda seeded: _with_definitions(_object(seeded, 5, 8, _patterned), seeded),
    "6: recursive and wide": _recursive,
}


# Regular expressions


def _literal(seeded: random.Random) -> str:
    return "|".join(re.escape(word) for word in seeded.sample(WORDS, seeded.randint(1, 4)))


def _class(seeded: random.Random) -> str:
    return seeded.choice(("[a-z]", "[A-Z]", "[0-9]", r"\d", r"\w", "[aeiou]", "[a-zA-Z_]", "[äöü]"))


def _classes(seeded: random.Random) -> str:
    return "".join(
        _class(seeded) + seeded.choice(("", "{2}", "{3}", "{1,4}", "?")) + seeded.choice(("-", "_", ":", "/"))
        for _ in range(seeded.randint(1, 4))
    )


def _grouped(seeded: random.Random) -> str:
    return seeded.choice((
        rf"^(19|20)\d{{2}}-(0[1-9]|1[0-2])-\d{{{seeded.randint(1, 2)}}}$",
        rf"\+?\d{{1,3}}( \d{{2,4}}){{1,{seeded.randint(2, 4)}}}",
        rf"(?:https?|ftp)://{_class(seeded)}{{1,10}}\.(com|org|net)(/{_class(seeded)}{{1,8}})?",
        rf"({_class(seeded)}{{2}}:){{{seeded.randint(2, 5)}}}{_class(seeded)}{{2}}",
        rf"(?P<key>[a-z]{{1,6}})=({_literal(seeded)})",
    ))  # fmt: skip


def _open(seeded: random.Random) -> str:
    return seeded.choice((
        rf"[^\s@]+@[^\s@.]+\.{_class(seeded)}{{2,3}}",
        r"[A-Z][a-z]+( [A-Z][a-z]+)*\.",
        rf"\[({_class(seeded)}(, {_class(seeded)})*)?\]",
        r"(\d+(\.\d+)?)(, ?-?\d+(\.\d+)?)*",
        rf"<({_class(seeded)}+)>[^<]*</x>",
        rf"[\S]+? {_class(seeded)}+é*🙂?",
    ))  # fmt: skip


def _beyond(seeded: random.Random) -> str:
    """Return an expression without a grammar for llama.cpp."""
    return seeded.choice((
        f"(?i){_classes(seeded)}",
        rf"\b{_class(seeded)}+\b",
        rf"\p{{Lu}}\p{{L}}{{1,{seeded.randint(2, 9)}}}",
        rf"({_class(seeded)}+ ?)+",
        r"((25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)\.){3}[0-9]{1,3}",
        rf"(a|b|ab){{1,{seeded.randint(3, 90)}}}",
    ))  # fmt: skip


EXPRESSION_LEVELS: Final[Mapping[str, Callable[[random.Random], str]]] = {
    "1: literals": _literal,
    "2: classes": _classes,
    "3: groups": _grouped,
    "4: open repetitions": _open,
    "5: no grammar of llama.cpp": _beyond,
}
