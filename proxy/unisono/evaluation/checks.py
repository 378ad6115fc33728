"""Checks of an answer against what a case expects. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from unisono.evaluation.cases import Case, Expected, ExpectedCall
from unisono.schemas.validation import Validator

MARKERS: Final = re.compile(r"<\|(?:start|end|message|channel|constrain|return|call)\|>")
# Characters that are ignored when texts are compared, as in the checker of the Berkeley Function Calling Leaderboard.
IGNORED: Final = re.compile(r"[ ,./\-_*^]")
MAX_SHOWN: Final = 120

Json = Mapping[str, Any]


def fault_of(case: Case, message: Json) -> str:
    """Describe the first fault in the message of an answer. Empty if the answer is correct."""
    text = message.get("content") or ""
    if MARKERS.search(text):
        return "the text contains special tokens of Harmony"
    if message.get("refusal"):
        return f"refused: {_shown(message['refusal'])}"
    calls = message.get("tool_calls") or []
    expected = case.expected
    return (
        _undeclared(case, calls)
        or ("" if expected.calls is None else _calls_fault(expected, expected.calls, calls))
        or _text_fault(expected.text, text)
        or ("" if expected.schema is None else _json_fault(expected.schema, text))
        or ("no reasoning" if expected.has_reasoning and not message.get("reasoning_content") else "")
    )


def _undeclared(case: Case, calls: Sequence[Json]) -> str:
    declared = {tool["function"]["name"] for tool in case.body.get("tools", ())}
    for call in calls:
        function = call["function"]
        if function["name"] not in declared:
            return f"calls {_shown(function['name'])}, which is not declared"
        if not isinstance(_parsed(function["arguments"]), dict):
            return f"the arguments of {function['name']} are not a JSON object: {_shown(function['arguments'])}"
    return ""


def _calls_fault(expected: Expected, wanted: Sequence[ExpectedCall], calls: Sequence[Json]) -> str:
    if len(calls) != len(wanted):
        names = ", ".join(call["function"]["name"] for call in calls)
        return f"{len(calls)} calls instead of {len(wanted)}{f': {names}' if names else ''}"
    made = [(call["function"]["name"], _parsed(call["function"]["arguments"])) for call in calls]
    faults = [[_call_fault(each, *call, is_exact=expected.is_exact) for call in made] for each in wanted]
    if _can_be_paired([[to for to, fault in enumerate(row) if not fault] for row in faults]):
        return ""
    for each, row in zip(wanted, faults, strict=True):
        if "" not in row:
            # Report the fault of a call to the same tool, preferably of a call that fits no other expected call.
            same = [to for to, (name, _) in enumerate(made) if name == each.name]
            same.sort(key=lambda to: any(not others[to] for others in faults))
            return row[same[0]] if same else f"no call of {each.name}"
    return "two expected calls are both matched by the same call only"


def _can_be_paired(fitting: Sequence[Sequence[int]]) -> bool:
    """Return True if each expected call can be paired with a different call that fits it.

    `fitting` contains a row for each expected call, with the indexes of the calls that fit it.
    """
    rows: dict[int, int] = {}

    def place(row: int, tried: set[int]) -> bool:
        for number in fitting[row]:
            if number not in tried:
                tried.add(number)
                if number not in rows or place(rows[number], tried):
                    rows[number] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(fitting)))


def _call_fault(wanted: ExpectedCall, name: str, arguments: Any, *, is_exact: bool) -> str:
    if name != wanted.name:
        return f"calls {name} instead of {wanted.name}"
    for argument, value in arguments.items():
        if argument not in wanted.arguments:
            return f"{name} has an unexpected argument {_shown(argument)}"
        accepted = wanted.arguments[argument]
        if not (value in accepted if is_exact else is_accepted(value, accepted)):
            return f"{name}: {argument} is {_shown(json.dumps(value, ensure_ascii=False))}"
    # An argument without accepted values must be missing.
    required = [each for each, values in wanted.arguments.items() if values and "" not in values]
    missing = [each for each in required if each not in arguments]
    return f"{name} lacks {', '.join(missing)}" if missing else ""


def is_accepted(value: Any, accepted: Sequence[Any]) -> bool:
    """Return True if a value equals one of the accepted values.

    Texts are compared without regard to case and punctuation. An accepted object contains a list of accepted values for
    each field. An accepted list may contain such objects.
    """
    return any(_equals(value, each) for each in accepted)


def _equals(value: Any, accepted: Any) -> bool:
    match accepted:
        case dict():
            return (
                isinstance(value, dict)
                and value.keys() <= accepted.keys()
                and all(is_accepted(each, _listed(accepted[name])) for name, each in value.items())
                and all("" in _listed(values) for name, values in accepted.items() if name not in value)
            )
        case list():
            is_list = isinstance(value, list) and len(value) == len(accepted)
            return is_list and all(map(_equals, value, accepted))
        case str():
            return isinstance(value, str) and _plain(value) == _plain(accepted)
        case bool():
            return value is accepted
        case int() | float():
            return isinstance(value, int | float) and not isinstance(value, bool) and value == accepted
        case _:
            return bool(value == accepted)


def _listed(values: Any) -> Sequence[Any]:
    return values if isinstance(values, list) else [values]


def _plain(text: str) -> str:
    return IGNORED.sub("", text).lower().replace("'", '"')


def _text_fault(pattern: str, text: str) -> str:
    return "" if re.search(pattern, text, re.IGNORECASE) else f"the text is {_shown(text)!r}"


def _json_fault(schema: Json, text: str) -> str:
    if (value := _parsed(text)) is None:
        return f"the text is not JSON: {_shown(text)}"
    mismatch = Validator(schema).first(schema, value)
    return "" if mismatch is None else str(mismatch)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"
