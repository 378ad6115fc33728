"""Compaction of a conversation: the model writes a summary that replaces the history.

The client stores the result: its newest messages unchanged, and one sealed item with the rest. Sent back as input,
the sealed item gives the summary to the model, on any replica and in any dialect. The gateway stores nothing. If the
model writes no summary, the sealed item holds the history itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.api.notes import MAX_NOTES, without_effect
from unisono.api.responses.deps import ItemSealing, ResponsesDeps
from unisono.api.responses.items import NewId, Wire, meaning_of, to_wire
from unisono.api.responses.outbound.dialects import Dialect
from unisono.api.responses.outbound.response import to_usage
from unisono.api.responses.prepared_request import PreparedRequest, Sender, assembled, validate_body
from unisono.api.responses.prior_state import recall
from unisono.api.tools import Toolbox
from unisono.api.unisono_object import to_about
from unisono.core.conversation import (
    AddedTools,
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    DeveloperMessage,
    Effort,
    Item,
    Phase,
    UserMessage,
)
from unisono.core.events import Text
from unisono.engine.collect import CollectedAnswer, collect_run
from unisono.engine.request import ForbiddenTools, GenerationReport, GenerationRequest
from unisono.errors import StoreTooLarge

# Fields of a request that have an effect here. Instructions and tools keep their position in the conversation, so
# that a backend finds the prompt in its cache.
EFFECTIVE_FIELDS = frozenset(
    {"model", "input", "instructions", "previous_response_id", "tools", "reasoning", "prompt_cache_key", "user"}
)

# Maximum tokens of a summary and its reasoning.
MAX_SUMMARY_TOKENS = 8_192
# Maximum characters of user messages that are preserved unchanged.
MAX_PRESERVED_CHARACTERS = 64_000

INSTRUCTIONS = (
    "Sum up our conversation up to here. From now on you will see your summary and my newest messages, and nothing "
    "else of what is above. So put in everything you need to go on: what I asked for and the limits I set; what was "
    "done and found out, with names, numbers, paths, identifiers and quotations exactly as they are; what was decided "
    "and why; what failed; what is still open, and the next step. Do not go on with the work, do not call a tool and "
    "do not address me: answer with the summary alone."
)
# Prefix of a summary in the message to the model.
HEADING = "[Summary of the conversation before this point, as you wrote it]\n\n"


@dataclass(frozen=True, slots=True)
class Compacted:
    """Result of a compaction.

    `preserved` holds user messages; `sealed` holds everything else.
    """

    id: str
    created_at: int
    preserved: tuple[UserMessage, ...]
    sealed: str
    result: CollectedAnswer
    report: GenerationReport
    notes: tuple[str, ...]


async def compacted(deps: ResponsesDeps, sender: Sender, body: Mapping[str, Any], size: int) -> Compacted:
    """Compact the conversation in `body`, of `size` bytes.

    Raises the errors that would refuse a response, and StoreTooLarge for a conversation that can be neither
    summarized nor sealed.
    """
    # Clients send the whole request of their conversation. Its output options do not apply to a summary.
    effective = {name: value for name, value in body.items() if name in EFFECTIVE_FIELDS}
    effective["reasoning"] = _reasoning(body.get("reasoning"))
    request = await validate_body(deps, sender.caller, {**effective, "store": False}, size)
    model = deps.resolve(request.model, sender.caller)
    past = await recall(deps.store, sender.tenant, request)
    response_id, created_at = deps.new_id("resp_"), int(deps.clock())
    prepared = await assembled(
        deps, sender, request, past, model, response_id=response_id, created_at=created_at, size=size
    )
    # This precedes the generation: without a key the result would be lost.
    seals = await deps.seals()
    stream = deps.service.start(to_generation_request(prepared))
    try:
        result = await collect_run(stream)
    finally:
        await stream.aclose()
    # The summary replaces everything that the model has seen, including earlier responses.
    history = (*past.earlier, *meaning_of(prepared.generation.input))
    preserved, sealed = shortened(history, summary_of(result), seals, sender.tenant)
    ignored = without_effect("", {name: value for name, value in body.items() if name not in EFFECTIVE_FIELDS})
    notes = (*prepared.generation.notes, *ignored)[:MAX_NOTES]
    return Compacted(response_id, created_at, preserved, sealed, result, stream.report, notes)


def _reasoning(reasoning: Any) -> Any:
    """Return low effort, unless the client gives the effort of its conversation.

    Another effort changes the prompt from its first line on, so that the backend's cache does not match.
    """
    if reasoning is None or (isinstance(reasoning, dict) and reasoning.get("effort") is None):
        return {**(reasoning or {}), "effort": Effort.LOW.value}
    return reasoning


def to_generation_request(prepared: PreparedRequest) -> GenerationRequest:
    """Return the generation request for the summary.

    A conversation that is already too long is summarized without its oldest messages.
    """
    request = prepared.generation.request
    items = (*request.conversation.items, UserMessage(INSTRUCTIONS))
    return replace(
        request,
        conversation=replace(request.conversation, items=items),
        max_tokens=MAX_SUMMARY_TOKENS,
        calls_allowed=False,
        forbidden_tools=ForbiddenTools.KEEP,
        truncate=True,
        # The tools are in the prompt that a backend has cached; none of them is run.
        server_tools=None if request.server_tools is None else replace(request.server_tools, decisions=(), max_calls=0),
    )


def summary_of(result: CollectedAnswer) -> str:
    """Return the summary, or "" if the model wrote only reasoning or calls."""
    texts = [(closed.item.phase, closed.text) for closed in result.items if isinstance(closed.item, Text)]
    final = "\n\n".join(text for phase, text in texts if phase is Phase.FINAL).strip()
    return final or "\n\n".join(text for _, text in texts).strip()


def shortened(
    items: Sequence[Item], summary: str, seals: ItemSealing, tenant: str
) -> tuple[tuple[UserMessage, ...], str]:
    """Return the messages that stay readable, and the rest with the summary, encrypted.

    Raises StoreTooLarge.
    """
    preserved: tuple[UserMessage, ...] = ()
    rest = [_without_tokens(item) for item in items]
    if summary:
        preserved = tuple(newest_messages(items))
        # The model must not rephrase instructions, and it keeps the tools that were added.
        kept = (item for item in rest if isinstance(item, DeveloperMessage | AddedTools))
        rest = [*kept, UserMessage(HEADING + summary)]
    sealed = seals.seal(tenant, rest)
    if seals.open(tenant, sealed) is None:
        raise StoreTooLarge("The content of the compaction item is too large; shorten the conversation.")
    return preserved, sealed


def newest_messages(items: Sequence[Item]) -> list[UserMessage]:
    """Return the user's newest messages, in order, within the limit `MAX_PRESERVED_CHARACTERS`."""
    preserved: list[UserMessage] = []
    room = MAX_PRESERVED_CHARACTERS
    for message in reversed(items):
        if not isinstance(message, UserMessage) or message.text.startswith(HEADING):
            continue
        room -= len(message.text)
        if room < 0:
            break
        preserved.append(message)
    return preserved[::-1]


def _without_tokens(item: Item) -> Item:
    """Remove the token ids, which only save time and are twice as long as the text."""
    match item:
        case AssistantReasoning() | AssistantMessage() | AssistantCall():
            return replace(item, tokens=())
        case _:
            return item


def to_compaction(done: Compacted, dialect: Dialect, new_id: NewId) -> Wire:
    """Return the body of the answer to `POST /responses/compact`."""
    return {
        "id": done.id,
        "object": "response.compaction",
        "created_at": done.created_at,
        "output": [dialect.item(item) for item in _output(done, new_id)],
        "usage": to_usage(done.result.finished.usage),
        "unisono": to_about([done.report], done.notes),
    }


def _output(done: Compacted, new_id: NewId) -> Iterator[Wire]:
    for message in done.preserved:
        yield to_wire(message, new_id("msg_"), Toolbox())
    yield {"id": new_id("cmp_"), "type": "compaction", "encrypted_content": done.sealed}
