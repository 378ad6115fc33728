"""Recording of one answer as a plain JSON document: prompt tokens, output, and step times.

docs/traces.md describes the fields; within a version, fields are added and never renamed. A recording never contains
headers, addresses or keys. The texts of items are present only as tokens. `said` holds the lengths and digests of the
texts, to compare them with what a later parser reads from the tokens.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

import orjson

from unisono.core.conversation import Json
from unisono.core.events import Closed, Event, HostedCall, Item, Reasoning, Repaired, Text, ToolCall
from unisono.core.generation import Usage
from unisono.core.observer import GenerationDone, SlotWait, StepDone, ToolDone
from unisono.core.route_protocol import Attempt

OBJECT: Final = "unisono.trace"
VERSION: Final = 1
# Maximum JSON bytes of a token id and its comma.
BYTES_PER_TOKEN: Final = 7
# Maximum size in bytes of a document that is compressed with a small window.
SHORT_BYTES: Final = 8192
# Number of hexadecimal digits of a text's SHA-256 that are stored.
DIGEST: Final = 16

Document = dict[str, Any]


def to_document(done: GenerationDone, gateway: str, max_bytes: int) -> Document:
    """Build the document of a recording, of at most `max_bytes` as JSON.

    `gateway` is the version of the gateway. Members that do not fit are omitted and named in `left_out`. The middle of
    prompts that do not fit is omitted too.
    """
    start = done.start
    document: Document = {
        "object": OBJECT,
        "version": VERSION,
        "gateway": gateway,
        "id": start.request_id,
        "at": start.at,
        "tenant": start.tenant,
        "key": start.key,
        "surface": start.surface,
        "model": start.model,
        "background": start.background,
        "resumed": start.resumed,
        "outcome": done.outcome.value,
        "error": done.error,
        "finish": done.finish,
        "first_s": done.first_s,
        "ended_s": done.ended_s,
        "backend": done.backend,
        "failovers": done.failovers,
        "left_out_turns": done.left_out,
        "unmet": done.unmet,
        "usage": None if done.usage is None else _fields_of(done.usage),
        "recoveries": list(done.recoveries),
        "tries": [_fields_of(attempt) for attempt in done.tries],
        "waits": [_with_times(_fields_of(wait)) for wait in done.waits],
        "tools": [_with_times(_fields_of(tool)) | {"outcome": tool.outcome.value} for tool in done.tools],
        "asked": None if start.recorded_request is None else dict(start.recorded_request),
        "output": [],
        "said": output_records(done.output),
        "left_out": [],
        "steps": [_step(step) for step in done.steps],
    }
    # Serializing the output takes most of the time. Its size is therefore estimated, and is measured only if the
    # document may be too large.
    room = max_bytes - len(dumped(document)) - BYTES_PER_TOKEN * len(done.journal)
    document["output"] = list(done.journal)
    if room < BYTES_PER_TOKEN * sum(len(step.prompt) for step in done.steps):
        room = _shrink(document, max_bytes)
    _add_prompts(document, [step.prompt for step in done.steps], room)
    return document


def _fields_of(record: Usage | Attempt | SlotWait | ToolDone) -> dict[str, Json]:
    # `dataclasses.asdict` copies each value, which takes ten times as long.
    return {name: getattr(record, name) for name in record.__slots__}


def _with_times(record: dict[str, Json]) -> dict[str, Json]:
    """Return the fields of a wait or a tool call with `started_s` renamed to `began_s`.

    `began_s` is the name in the format of recordings.
    """
    return {"began_s" if name == "started_s" else name: value for name, value in record.items()}


def _step(step: StepDone) -> dict[str, Json]:
    return {
        "step": step.step,
        "deployment": step.deployment,
        "began_s": step.started_s,
        "first_token_s": step.first_token_s,
        "ended_s": step.ended_s,
        "prompt_tokens": step.prompt_tokens,
        "cached_tokens": step.cached_tokens,
        "generated": step.generated,
        "finish": step.finish,
        "failure": step.failure,
        "prompt": None,
    }


def output_records(events: Iterable[Event]) -> list[dict[str, Json]]:
    """Return the items and repairs of an answer in order, without ids.

    Two parses of the same tokens return equal records.
    """
    records: list[dict[str, Json]] = []
    for event in events:
        if isinstance(event, Repaired):
            records.append({"repaired": event.rule, "position": event.position, "dropped": event.dropped})
        elif isinstance(event, Closed):
            kind, name = _kind(event.item)
            text = event.text.encode("utf-8", "surrogatepass")
            records.append(
                {
                    "closed": kind,
                    "name": name,
                    "characters": len(event.text),
                    "digest": sha256(text).hexdigest()[:DIGEST],
                    "tokens": len(event.tokens),
                    "complete": event.complete,
                }
            )
    return records


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


def _shrink(document: Document, max_bytes: int) -> int:
    """Omit members until the document fits; return the number of bytes left for prompts."""
    room = max_bytes - len(dumped(document))
    for name, nothing in (("asked", None), ("output", []), ("said", [])):
        if room >= 0:
            break
        document[name] = nothing
        document["left_out"].append(name)
        room = max_bytes - len(dumped(document))
    return room


def _add_prompts(document: Document, prompts: Sequence[Sequence[int]], room: int) -> None:
    same = [0, *map(_common_prefix, prompts, prompts[1:])]
    rests = [list(prompt[reused:]) for prompt, reused in zip(prompts, same, strict=False)]
    most = _share([len(rest) for rest in rests], max(room, 0) // BYTES_PER_TOKEN)
    for step, rest, reused in zip(document["steps"], rests, same, strict=False):
        removed = max(len(rest) - most, 0)
        head = len(rest) - removed - (len(rest) - removed) // 2
        step["prompt"] = {"same": reused, "tokens": rest[:head] + rest[head + removed :], "gap": None}
        if removed:
            step["prompt"]["gap"] = {"at": head, "tokens": removed}
            document["left_out"].append(f"prompt {step['step']}")


def _common_prefix(before: Sequence[int], after: Sequence[int]) -> int:
    """Return the length of the common prefix of two prompts.

    A binary search compares slices, which is fast even for long prompts.
    """
    low, high = 0, min(len(before), len(after))
    while low < high:
        middle = (low + high + 1) // 2
        if list(before[low:middle]) == list(after[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _share(lengths: Sequence[int], room: int) -> int:
    """Return the largest limit such that all lengths, each cut to the limit, fit into `room`."""
    remaining, most = len(lengths), 0
    for length in sorted(lengths):
        if length * remaining > room:
            return room // remaining
        most, room, remaining = length, room - length, remaining - 1
    return most


# -- bytes


def dumped(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        # The value contains a lone surrogate, which a client may have sent.
        return json.dumps(value, separators=(",", ":")).encode()


def packed(document: Mapping[str, Any]) -> bytes:
    """Compress a document for the store, at the fastest level.

    A higher level takes several times as long and saves 5 % of the bytes.
    """
    data = dumped(document)
    # By default, a compressor clears 128 KiB of memory, which evicts other data from the caches of the CPU.
    window, memory = (12, 5) if len(data) < SHORT_BYTES else (15, 8)
    compressor = zlib.compressobj(zlib.Z_BEST_SPEED, wbits=window, memLevel=memory)
    return compressor.compress(data) + compressor.flush()


def unpacked(data: bytes) -> Document:
    """Decompress and check a recording. Raises ValueError if it is damaged or not supported."""
    try:
        document = json.loads(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError("not a recording") from error
    return checked(document)


def checked(document: object) -> Document:
    """Return a valid recording. Raises ValueError for any other value or a newer version."""
    if not isinstance(document, dict) or document.get("object") != OBJECT:
        raise ValueError("not a recording")
    if document.get("version") != VERSION:
        raise ValueError("the recording has a different format version; read it with the gateway version that wrote it")
    return document


def prompts_of(document: Mapping[str, Any]) -> list[list[int | None]]:
    """Return the prompt of each step, with None for each omitted token."""
    prompts: list[list[int | None]] = []
    before: list[int | None] = []
    for step in document["steps"]:
        prompt = step["prompt"] or {"same": 0, "tokens": [], "gap": None}
        rest: list[int | None] = list(prompt["tokens"])
        if gap := prompt["gap"]:
            rest[gap["at"] : gap["at"]] = [None] * gap["tokens"]
        before = before[: prompt["same"]] + rest
        prompts.append(before)
    return prompts


def summary_of(document: Mapping[str, Any]) -> bytes:
    """Return the summary of a document, for lists of recordings."""
    names = ("model", "surface", "outcome", "error", "finish", "recoveries", "failovers", "ended_s", "backend", "unmet")
    generated = sum(step["generated"] for step in document["steps"])
    return dumped({name: document[name] for name in names} | {"generated": generated})
