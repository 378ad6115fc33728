"""Changes that hooks make to a generation request, and the note that stores the changes.

The note is a JSON object at the beginning of the journal. With the note, another process can resume the generation with
the same request. The note contains only the differences. For a conversation, these are the new items between the equal
items at its beginning and at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    Effort,
    Item,
    Json,
    UserMessage,
)
from unisono.core.generation import Sampling
from unisono.core.hooks import Changes
from unisono.core.item_records import Record, to_item, to_record
from unisono.core.passthrough_request import AnswerMode, PassthroughRequest
from unisono.engine.request import GenerationRequest, RawPrompt
from unisono.errors import Refused, StoreUnreadable

ITEMS, FIRST, LAST, INSTRUCTIONS, EFFORT, SAMPLING, SAID = (
    "items",
    "first",
    "last",
    "instructions",
    "effort",
    "sampling",
    "said",
)


def changed(request: GenerationRequest, changes: Changes) -> GenerationRequest:
    """Apply changes to a request.

    Raises TypeError, ValueError or AttributeError if the changes are invalid.
    """
    conversation, sampling = request.conversation, request.answer.sampling
    if changes.items is not None:
        conversation = _with_items(conversation, changes.items)
    preamble = conversation.preamble
    if changes.instructions is not None:
        preamble = replace(preamble, instructions=str(changes.instructions))
    if changes.effort is not None:
        preamble = replace(preamble, effort=Effort(changes.effort))
    if changes.sampling is not None:
        if not isinstance(changes.sampling, Sampling):
            raise TypeError(f"`sampling` must be a `Sampling`, not a {type(changes.sampling).__name__}")
        sampling = changes.sampling
    if preamble is not conversation.preamble:
        conversation = replace(conversation, preamble=preamble)
    if conversation is request.conversation and sampling is request.answer.sampling:
        return request
    raw = request.raw if request.raw is None else _raw(request.raw, request.conversation, conversation)
    return replace(request, conversation=conversation, raw=raw, answer=replace(request.answer, sampling=sampling))


def without_passthrough(request: GenerationRequest, passthrough: PassthroughRequest) -> GenerationRequest:
    """Return `request`, which hooks have changed, without its pass-through body.

    The body does not contain the changes, so it must not be sent. Raises Refused unless the engine can answer the
    request without this body.
    """
    if passthrough.way is not AnswerMode.ENGINE_THEN_PASSTHROUGH:
        raise Refused(
            "The request contains content that a guardrail masks, or that another hook changes. Requests to this "
            "pass-through model cannot be changed; remove the content, or use another model.",
            param=request.prompt.fields.conversation,
        )
    return replace(request, passthrough=None)


def _raw(raw: RawPrompt, old: Conversation, new: Conversation) -> RawPrompt:
    """Return the raw prompt with the changes that hooks made to its text.

    Raises Refused if the prompt must not be changed, and ValueError if hooks changed anything but the text.
    """
    if new.preamble.instructions:
        raise ValueError("a hook cannot add instructions to a raw prompt")
    if new.items is old.items:
        return raw
    if raw.is_fixed:
        raise Refused(
            "The recorded prompt contains content that a guardrail masks, or that another hook changes. "
            "It cannot be changed; fork another recording.",
            param="id",
        )
    match new.items:
        case (UserMessage(text=text),) if text:
            return replace(raw, text=text, tokens=())
    raise ValueError("a hook must return a raw prompt as a single user message with text")


def _with_items(conversation: Conversation, new: Sequence[Item]) -> Conversation:
    """Replace the items of a conversation.

    The stored tokens of a new item are removed, because the model would otherwise read the tokens instead of the text.
    """
    old = conversation.items
    known = set(map(id, old))
    items: list[Item] = []
    for at, item in enumerate(new):
        if at < len(old) and item == old[at]:
            items.append(old[at])
        else:
            items.append(item if id(item) in known else _without_tokens(item))
    same = len(items) == len(old) and all(item is before for item, before in zip(items, old, strict=True))
    return conversation if same else replace(conversation, items=tuple(items))


def _without_tokens(item: Item) -> Item:
    # Raises KeyError for an object that is not an item.
    to_record(item)
    if isinstance(item, AssistantReasoning | AssistantMessage | AssistantCall):
        return replace(item, tokens=())
    return item


def to_note(
    before: GenerationRequest, after: GenerationRequest, annotations: Mapping[str, Mapping[str, Json]]
) -> dict[str, Json]:
    """Return the note with the changes from `before` to `after`, and the hooks' `annotations`."""
    old, new = before.conversation, after.conversation
    note: dict[str, Json] = {}
    if new.items is not old.items:
        first, last = _common_ends(old.items, new.items)
        records: list[Json] = [to_record(item) for item in new.items[first : len(new.items) - last]]
        note |= {ITEMS: records, FIRST: first, LAST: last}
    if new.preamble.instructions != old.preamble.instructions:
        note[INSTRUCTIONS] = new.preamble.instructions
    if new.preamble.effort != old.preamble.effort:
        note[EFFORT] = new.preamble.effort.value
    if after.answer.sampling != before.answer.sampling:
        bias: list[Json] = [[token, amount] for token, amount in after.answer.sampling.logit_bias.items()]
        note[SAMPLING] = {**asdict(after.answer.sampling), "logit_bias": bias}
    if annotations:
        note[SAID] = {name: dict(words) for name, words in annotations.items()}
    return note


def _common_ends(old: Sequence[Item], new: Sequence[Item]) -> tuple[int, int]:
    """Return the number of items that are identical at the beginning, and the number at the end."""
    most = min(len(old), len(new))
    first = next((at for at in range(most) if old[at] is not new[at]), most)
    last = next((at for at in range(most - first) if old[-1 - at] is not new[-1 - at]), most - first)
    return first, last


def from_note(
    request: GenerationRequest, note: Mapping[str, Json]
) -> tuple[GenerationRequest, dict[str, dict[str, Json]]]:
    """Return the request with the changes that `to_note` recorded, and the annotations.

    Raises StoreUnreadable if the note is damaged or belongs to a different request.
    """
    read = cast("Mapping[str, Any]", note)
    try:
        conversation = request.conversation
        if ITEMS in read:
            conversation = replace(conversation, items=_noted_items(conversation.items, read))
        effort = Effort(read[EFFORT]) if EFFORT in read else None
        sampling = _noted_sampling(read[SAMPLING]) if SAMPLING in read else None
        texts = {str(name): dict(words) for name, words in read.get(SAID, {}).items()}
        rest = Changes(instructions=read.get(INSTRUCTIONS), effort=effort, sampling=sampling)
        return changed(replace(request, conversation=conversation), rest), texts
    except (KeyError, TypeError, ValueError, AttributeError) as failure:
        raise StoreUnreadable(
            "The stored changes that hooks made to this request are damaged; send a new request."
        ) from failure


def _noted_items(items: Sequence[Item], note: Mapping[str, Any]) -> tuple[Item, ...]:
    first, last = note[FIRST], note[LAST]
    if first + last > len(items):
        raise ValueError("the stored changes belong to a different conversation")
    put = [to_item(cast("Record", record)) for record in note[ITEMS]]
    return (*items[:first], *put, *items[len(items) - last :])


def _noted_sampling(noted: Mapping[str, Any]) -> Sampling:
    return Sampling(**{**noted, "logit_bias": {int(token): float(amount) for token, amount in noted["logit_bias"]}})
