"""A recording: one answer as a document of plain JSON, from the prompts' tokens to the times of every step.

docs/traces.md says what is in it; what it is made of is added to and never renamed within a version. It holds what was
said and done and never a header, an address or a key. Text of items is there as tokens only: `said` has its length and
digest, to be compared with what the tokens say to a later reader.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any, Final

import orjson

from unisono.core.conversation import Json
from unisono.core.events import Closed, Event, HostedCall, Item, Reasoning, Repaired, Text, ToolCall
from unisono.core.observer import GenerationDone, StepDone

OBJECT: Final = "unisono.trace"
VERSION: Final = 1
BYTES_PER_TOKEN: Final = 7
"""Of a token's number and the comma behind it, at most."""
DIGEST: Final = 16
"""Hexadecimal digits of a text's SHA-256 that are kept."""

Document = dict[str, Any]


def to_document(done: GenerationDone, gateway: str, max_bytes: int) -> Document:
    """All of it that fits: what asked too much of the room is named in `left_out`, prompts keep their ends."""
    began = done.began
    document: Document = {
        "object": OBJECT,
        "version": VERSION,
        "gateway": gateway,
        "id": began.request_id,
        "at": began.at,
        "tenant": began.tenant,
        "key": began.key,
        "surface": began.surface,
        "model": began.model,
        "background": began.background,
        "resumed": began.resumed,
        "outcome": done.outcome.value,
        "error": done.error,
        "finish": done.finish,
        "first_s": done.first_s,
        "ended_s": done.ended_s,
        "backend": done.backend,
        "failovers": done.failovers,
        "left_out_turns": done.left_out,
        "unmet": done.unmet,
        "usage": None if done.usage is None else asdict(done.usage),
        "recoveries": list(done.recoveries),
        "tries": [asdict(one) for one in done.tries],
        "waits": [asdict(one) for one in done.waits],
        "tools": [asdict(one) | {"outcome": one.outcome.value} for one in done.tools],
        "asked": None if began.asked is None else dict(began.asked),
        "output": list(done.journal),
        "said": said_of(done.said),
        "left_out": [],
        "steps": [_step(step) for step in done.steps],
    }
    _fit(document, [step.prompt for step in done.steps], max_bytes)
    return document


def _step(step: StepDone) -> dict[str, Json]:
    return {
        "step": step.step,
        "deployment": step.deployment,
        "began_s": step.began_s,
        "first_token_s": step.first_token_s,
        "ended_s": step.ended_s,
        "prompt_tokens": step.prompt_tokens,
        "cached_tokens": step.cached_tokens,
        "generated": step.generated,
        "finish": step.finish,
        "failure": step.failure,
        "prompt": None,
    }


def said_of(events: Iterable[Event]) -> list[dict[str, Json]]:
    """Items and repairs, in their order, without ids: what two readings of equal tokens have in common."""
    said: list[dict[str, Json]] = []
    for event in events:
        if isinstance(event, Repaired):
            said.append({"repaired": event.rule, "position": event.position, "dropped": event.dropped})
        elif isinstance(event, Closed):
            kind, name = _kind(event.item)
            text = event.text.encode("utf-8", "surrogatepass")
            said.append(
                {
                    "closed": kind,
                    "name": name,
                    "characters": len(event.text),
                    "digest": sha256(text).hexdigest()[:DIGEST],
                    "tokens": len(event.tokens),
                    "complete": event.complete,
                }
            )
    return said


def _kind(item: Item) -> tuple[str, str]:
    match item:
        case Reasoning():
            return "analysis", ""
        case Text():
            return item.phase.value, ""
        case ToolCall():
            return "call", item.name
        case HostedCall():
            return "hosted_call", item.name
        case _:
            return "listing", item.server


# -- fitting


def _fit(document: Document, prompts: Sequence[Sequence[int]], max_bytes: int) -> None:
    room = max_bytes - len(dumped(document))
    for name, nothing in (("asked", None), ("output", []), ("said", [])):
        if room >= 0:
            break
        document[name] = nothing
        document["left_out"].append(name)
        room = max_bytes - len(dumped(document))
    same = [0, *map(_in_common, prompts, prompts[1:])]
    rests = [list(prompt[behind:]) for prompt, behind in zip(prompts, same, strict=False)]
    most = _share([len(rest) for rest in rests], max(room, 0) // BYTES_PER_TOKEN)
    for step, rest, behind in zip(document["steps"], rests, same, strict=False):
        gone = max(len(rest) - most, 0)
        head = len(rest) - gone - (len(rest) - gone) // 2
        step["prompt"] = {"same": behind, "tokens": rest[:head] + rest[head + gone :], "gap": None}
        if gone:
            step["prompt"]["gap"] = {"at": head, "tokens": gone}
            document["left_out"].append(f"prompt {step['step']}")


def _in_common(before: Sequence[int], after: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike, found by halves: they are long and compared at once."""
    low, high = 0, min(len(before), len(after))
    while low < high:
        middle = (low + high + 1) // 2
        if list(before[low:middle]) == list(after[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _share(lengths: Sequence[int], room: int) -> int:
    """The most each may have so that all of them fit."""
    left, most = len(lengths), 0
    for length in sorted(lengths):
        if length * left > room:
            return room // left
        most, room, left = length, room - length, left - 1
    return most


# -- bytes


def dumped(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        # Half a pair of surrogates, which a client may have sent.
        return json.dumps(value, separators=(",", ":")).encode()


def packed(document: Mapping[str, Any]) -> bytes:
    """As it is kept. More effort takes several times as long, for a twentieth of the bytes."""
    return zlib.compress(dumped(document), zlib.Z_BEST_SPEED)


def unpacked(data: bytes) -> Document:
    """Raises ValueError."""
    try:
        document = json.loads(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError("this is no recording") from error
    return checked(document)


def checked(document: object) -> Document:
    """Raises ValueError for what is no recording, or one of a newer version."""
    if not isinstance(document, dict) or document.get("object") != OBJECT:
        raise ValueError("this is no recording")
    if document.get("version") != VERSION:
        raise ValueError("this recording is of another version of the gateway")
    return document


def prompts_of(document: Mapping[str, Any]) -> list[list[int | None]]:
    """The prompt of each step; None stands where tokens were left out."""
    prompts: list[list[int | None]] = []
    before: list[int | None] = []
    for step in document["steps"]:
        told = step["prompt"] or {"same": 0, "tokens": [], "gap": None}
        rest: list[int | None] = list(told["tokens"])
        if gap := told["gap"]:
            rest[gap["at"] : gap["at"]] = [None] * gap["tokens"]
        before = before[: told["same"]] + rest
        prompts.append(before)
    return prompts


def about_of(document: Mapping[str, Any]) -> bytes:
    """What a list shows."""
    names = ("model", "surface", "outcome", "error", "finish", "recoveries", "failovers", "ended_s", "backend", "unmet")
    generated = sum(step["generated"] for step in document["steps"])
    return dumped({name: document[name] for name in names} | {"generated": generated})
