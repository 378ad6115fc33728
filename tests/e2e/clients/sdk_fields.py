"""Fields of the request types that an SDK declares, with values to try.

The table of fields in the documentation is made from these, so that a field that a new SDK adds fails a test before a
user sends it. `python sdk_fields.py openai|anthropic` writes the rows of the SDK in this environment.
"""

from __future__ import annotations

import collections.abc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Required, get_args, get_origin

from sdk_types import FORMS, WORD, Json, examples, members
from typing_extensions import get_type_hints, is_typeddict

ROWS = Path(__file__).parents[2] / "fields"
# Fields whose content other suites cover kind by kind, and the model, which every request has.
SKIPPED = frozenset({"messages", "input", "system", "model"})
# Parameters that the SDK sends as headers.
HEADERS = frozenset({"betas", "user_profile_id", "workspace_id"})
# Request types of each API. Of two rows for the same field, that of the first type counts.
SDKS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "openai": {
        "chat": [("openai.types.chat.completion_create_params", "CompletionCreateParamsBase")],
        "responses": [("openai.types.responses.response_create_params", "ResponseCreateParamsBase")],
        "completions": [("openai.types.completion_create_params", "CompletionCreateParamsBase")],
    },
    "anthropic": {
        "messages": [
            ("anthropic.types.beta.message_create_params", "MessageCreateParamsBase"),
            ("anthropic.types.message_create_params", "MessageCreateParamsBase"),
        ],
    },
}
# Fields beside those of the base types.
STREAM: Json = {"path": "stream", "at": ["stream"], "body": {}, "values": [True, False]}
# Number of fields from which an object with fields of the same type is a map.
MIN_NAMES = 8
# Values of types without a structure: one that is not the default, and one that is false in most languages.
PLAIN: dict[Any, list[Any]] = {
    bool: [True, False],
    int: [7, 0],
    float: [0.5, 0],
    str: [WORD, ""],
    object: [WORD, False],
    Any: [WORD, False],
}


def rows_of(kind: Any, *, within: tuple[Any, ...] = ()) -> Iterator[Json]:
    """Yield a row for each field of a typed dictionary and of the objects in it.

    A row has the `path` of a field with the kinds of the objects around it, its position `at` in the request, a `body`
    with the required fields around it, but not the field, and the `values` to try.
    """
    hints = get_type_hints(kind, include_extras=True)
    for name, hint in hints.items():
        if not within and name in SKIPPED | HEADERS:
            continue
        required = {
            other: examples(inner, other)[0]
            for other, inner in hints.items()
            if within and other != name and (get_origin(inner) is Required or other == "type")
        }
        yield {"path": name, "at": [name], "body": required, "values": values_of(hint, name)}
        for step, key, inner in _objects_in(hint):
            if inner in within:
                continue
            if _is_map(inner):
                # Each of its fields has the same name and type as the others.
                step, key, inner = f"{step}.NAME", [*key, next(iter(get_type_hints(inner)))], _fields_of_map(inner)
            for row in rows_of(inner, within=(*within, inner)):
                if row["path"] in ("type", "role"):
                    continue
                yield {
                    "path": f"{name}{step}.{row['path']}",
                    "at": [name, *key, *row["at"]],
                    "body": required | {name: _around(key, row["body"])},
                    "values": row["values"],
                }


def _fields_of_map(kind: Any) -> Any:
    return members(next(iter(get_type_hints(kind).values())))[0]


def _is_map(kind: Any) -> bool:
    """Return whether an object maps the names of many tools to the same fields."""
    hints = get_type_hints(kind).values()
    inner = [get_type_hints(each).keys() for hint in hints for each in members(hint) if is_typeddict(each)]
    return len(inner) == len(hints) >= MIN_NAMES and all(names == inner[0] for names in inner)


def _kind(kind: Any) -> str:
    """Return the first value of the field `type`, or the name of the type."""
    named = [each for each in members(get_type_hints(kind).get("type")) if get_origin(each) is Literal]
    return str(get_args(named[0])[0]) if named else str(kind.__name__)


def _around(key: list[Any], body: Json) -> Any:
    """Put an object into the list or the map that contains it."""
    match key:
        case []:
            return body
        case [int(), *inner]:
            return [_around(inner, body)]
        case _:
            return {key[0]: _around(key[1:], body)}


def _objects_in(hint: Any) -> Iterator[tuple[str, list[Any], Any]]:
    """Yield the objects of a field: the step to it in a path and in a request, and its type."""
    kinds = members(hint)
    objects = [kind for kind in kinds if is_typeddict(kind)]
    for kind in objects:
        yield (f"[{_kind(kind)}]" if len(objects) > 1 else ""), [], kind
    for kind in kinds:
        origin = get_origin(kind)
        if origin is dict:
            yield from ((".NAME", [WORD], inner) for inner in filter(is_typeddict, members(get_args(kind)[1])))
        elif isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
            inner_kinds = [inner for inner in members(get_args(kind)[0]) if is_typeddict(inner)]
            for inner in inner_kinds:
                yield f"[{_kind(inner) if len(inner_kinds) > 1 else ''}]", [0], inner


def values_of(hint: Any, name: str) -> list[Any]:
    """Return the values of a field to try, each once."""
    found: list[Any] = []
    for kind in members(hint):
        origin = get_origin(kind)
        if is_typeddict(kind):
            found += examples(kind)[:1] if get_type_hints(kind) else []
            found += [] if kind.__required_keys__ else [{}]
        elif origin is Literal:
            # Sorted: of two equal types with another order of values, Python keeps the first one that it meets.
            found += sorted(get_args(kind), key=str)
        elif origin is dict:
            found += [{WORD: WORD}, {}]
        elif isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
            found += [[examples(get_args(kind)[0], name)[0]], []]
        elif kind is str and name in FORMS:
            found += [FORMS[name], ""]
        else:
            found += PLAIN.get(kind, [{WORD: WORD}, {}])
    unique = {json.dumps(value, sort_keys=True): value for value in found}
    return [*unique.values()]


def rows(sdk: str) -> Json:
    """Return the rows of all APIs of an SDK by the name of the API."""
    found: Json = {}
    for api, kinds in SDKS[sdk].items():
        by_path: Json = {}
        for module, name in kinds:
            for row in rows_of(getattr(__import__(module, fromlist=[name]), name)):
                by_path.setdefault(row["path"], row)
        found[api] = [*by_path.values(), STREAM]
    return found


def version(sdk: str) -> str:
    """Return the version of an SDK."""
    return str(__import__(sdk).__version__)


def written(sdk: str) -> str:
    """Return the content of the file of an SDK: its version, and one row on each line."""
    parts = [f'"version": {json.dumps(version(sdk))}']
    for api, found in rows(sdk).items():
        lines = ",\n".join(f"  {json.dumps(row, sort_keys=True)}" for row in found)
        parts.append(f"{json.dumps(api)}: [\n{lines}\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def check_rows(sdk: str) -> None:
    """Fail with the fields and values that the table in the repository does not have."""
    known = json.loads((ROWS / f"{sdk}.json").read_text())
    new = [
        f"{api}: {row['path']}" for api, found in rows(sdk).items() for row in found if row not in known.get(api, ())
    ]
    command = f"python tests/e2e/clients/sdk_fields.py {sdk} > tests/fields/{sdk}.json"
    assert not new, f"fields that the table does not have; run `{command}`:\n" + "\n".join(new)


if __name__ == "__main__":
    sys.stdout.write(written(sys.argv[1]))
