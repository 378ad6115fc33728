"""Inspector view of a recording: steps with prompts and output, attempts, times, recoveries.

A recording may be untrusted input. Malformed content is reported as damage. The work is limited by the size of the
recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from unisono.core.events import Repaired
from unisono.engine.journal import JournalEntry, JournalMarker, Part, TokenSource, parts_of, with_repairs
from unisono.errors import InvalidRequest, UnisonoError
from unisono.harmony.encoding import Encoding
from unisono.web.segments import Segment, Segments, describe_action, shortened

# Fields of a recording that the page displays, grouped by the type of their value. Add new fields of recordings here.
WORDS: Final = (
    "id", "gateway", "surface", "model", "outcome", "error", "finish", "backend", "unmet",
)  # fmt: skip
NUMBERS: Final = ("at", "first_s", "ended_s", "failovers", "left_out_turns")
GENERATION_WORDS: Final = ("deployment", "finish", "failure")
GENERATION_NUMBERS: Final = ("began_s", "first_token_s", "ended_s", "prompt_tokens", "cached_tokens", "generated")
USAGE: Final = ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens", "tool_output_tokens")
# JavaScript represents integers exactly up to this value.
LARGEST: Final = 1 << 53


def recounted(document: Mapping[str, Any], encoding: Encoding) -> dict[str, Any]:
    """Build the inspector's view of a recording. Raises InvalidRequest if it is damaged."""
    try:
        return {
            "about": _about(document),
            "steps": list(_steps(document, encoding)),
            "items": [_item(one) for one in document["said"] if "closed" in one],
            "tools": [_tool(one) for one in document["tools"]],
            "left_out": [shortened(one) for one in document["left_out"]],
        }
    # Any client can upload a recording, so its values may have any type.
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, UnisonoError) as error:
        raise InvalidRequest("This recording is damaged.", param="trace") from error


def _about(document: Mapping[str, Any]) -> dict[str, Any]:
    usage = document["usage"]
    return {
        **{name: shortened(document[name]) for name in WORDS},
        **{name: _number(document[name]) for name in NUMBERS},
        "background": bool(document["background"]),
        "resumed": bool(document["resumed"]),
        "usage": None if usage is None else {name: _number(usage[name]) for name in USAGE},
        "recoveries": [shortened(rule) for rule in document["recoveries"]],
        "tries": [
            {"deployment": shortened(one["deployment"]), "failure": shortened(one["failure"] or "")}
            for one in document["tries"]
        ],
        "waits": [
            {**_numbers(one, ("began_s", "ended_s")), "failure": shortened(one["failure"] or "")}
            for one in document["waits"]
        ],
    }


def _numbers(of: Mapping[str, Any], names: Sequence[str]) -> dict[str, int | float | None]:
    return {name: _number(of[name]) for name in names}


def _number(value: object) -> int | float | None:
    """Return a number of limited size, or None. Raises TypeError for any other value."""
    if value is None or (isinstance(value, int | float) and abs(value) < LARGEST):
        return value
    raise TypeError("not a number")


def _item(record: Mapping[str, Any]) -> dict[str, Any]:
    """Describe an item without its text, which a recording contains only as output tokens."""
    return {
        "kind": shortened(record["closed"]),
        "name": shortened(record["name"]),
        "characters": _number(record["characters"]),
        "complete": bool(record["complete"]),
    }


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    words = {name: shortened(tool[name]) for name in ("server", "name", "outcome")}
    return words | _numbers(tool, ("began_s", "ended_s"))


def _steps(document: Mapping[str, Any], encoding: Encoding) -> Iterator[dict[str, Any]]:
    generations = document["steps"]
    for number, output in enumerate(_outputs(document, encoding)):
        own = [one for one in generations if one["step"] == number]
        views = [
            {name: shortened(one[name] or "") for name in GENERATION_WORDS} | _numbers(one, GENERATION_NUMBERS)
            for one in own
        ]
        yield {
            "step": number,
            "generations": views,
            "prompts": [prompt for one in own if (prompt := _prompt(one["prompt"], encoding))],
            "output": output,
            "generated": sum(one["generated"] or 0 for one in views),
        }


def _prompt(prompt: Mapping[str, Any] | None, encoding: Encoding) -> dict[str, Any] | None:
    """Return the part of a prompt that the previous prompt did not contain, None if it is empty."""
    if prompt is None or not (prompt["tokens"] or prompt["gap"]):
        return None
    segments = Segments(encoding)
    tokens, gap = [_id(token) for token in prompt["tokens"]], prompt["gap"]
    # The recorder shortens a large prompt in the middle. `at` is the position of the omitted tokens.
    at = len(tokens) if gap is None else int(gap["at"])
    segments.add(tokens[:at])
    if gap is not None:
        segments.gap(int(_number(gap["tokens"]) or 0))
    segments.add(tokens[at:])
    return {"behind": _number(prompt["same"]), "segments": segments.pop_new()}


def _id(token: object) -> int:
    """Return a token id. Raises TypeError for any other value."""
    # `True` is an `int` for isinstance, so the exact type is compared.
    if type(token) is not int or abs(token) >= LARGEST:
        raise TypeError("not a token id")
    return token


def _outputs(document: Mapping[str, Any], encoding: Encoding) -> Iterator[list[Segment]]:
    """Yield the output of each step, with repairs at the positions where they were decided."""
    segments = Segments(encoding)
    repairs = [
        Repaired(str(one["repaired"]), _id(one["position"]), _id(one["dropped"]))
        for one in document["said"]
        if "repaired" in one
    ]
    for part in with_repairs(parts_of([_id(number) for number in document["output"]]), repairs):
        match part:
            case JournalMarker.STEP_ENDED:
                yield segments.pop_new()
            case Repaired():
                segments.repair(part)
            case _:
                add_part(segments, part)
    yield segments.pop_new()


def add_part(segments: Segments, part: Part) -> None:
    """Add a part of a recorded output: its tokens, or a remark about what tokens do not show."""
    match part:
        case JournalMarker():
            pass
        case TokenSource():
            segments.add_remark(f"token ids derived from text: {part.guessed}; stop token hidden: {part.stop_hidden}")
        case JournalEntry():
            segments.add_remark(describe_action(part.value))
            if isinstance(moved := part.value.get("moved"), list):
                segments.add([_id(token) for token in moved])
        case tokens:
            segments.add(tokens)
