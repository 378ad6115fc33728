"""Route `POST /responses/compact`: the model writes a summary that replaces the history.

The result contains the user's newest messages unchanged, and one sealed item with these messages and the summary. The
client stores the result; the gateway stores nothing. When the client sends the sealed item back as input, any replica
can decrypt it, in any dialect, and the model reads the summary. If the model writes no complete summary, the sealed
item contains the history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.answer_report import backend_header, recoveries_header, to_about
from unisono.api.automatic_compaction import fitted, preserved_characters, threshold_of
from unisono.api.body import read_model_request, work_size
from unisono.api.client_toolbox import Toolbox
from unisono.api.collected_answer import CollectedAnswer, collect_run
from unisono.api.compaction_summary import (
    Replacement,
    notes_on_summary,
    replacement_of,
    sealed_items,
    summary_of,
    summary_request,
)
from unisono.api.disconnects import until_disconnect
from unisono.api.json_response import to_whole
from unisono.api.responses.answer_schema import Compaction
from unisono.api.responses.continued_history import continued, recall
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.input_items import COMPACTION_TRIGGER, InputTrigger
from unisono.api.responses.items import NewId, Wire, to_wire
from unisono.api.responses.outbound.dialects import Dialect
from unisono.api.responses.outbound.response import to_usage
from unisono.api.responses.prepared_request import Sender, assembled, validate_body
from unisono.api.responses.routes.responses_api import ResponsesApi
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.route_table import RouteTable, dependency, keep_properties
from unisono.api.unused_fields import MAX_NOTES, without_effect
from unisono.core.conversation import Effort, Item, UserMessage
from unisono.core.frozen import dataclass
from unisono.engine.request import GenerationReport, GenerationRequest

# Request fields that have an effect on a compaction. Instructions and tools are included, so that the prompt begins
# like the conversation's other prompts, and the backend's prefix cache matches.
EFFECTIVE_FIELDS = frozenset(
    {"model", "input", "instructions", "previous_response_id", "tools", "reasoning", "prompt_cache_key", "user"}
)


@dataclass(frozen=True, slots=True)
class CompactedConversation:
    """Result of a compaction.

    `preserved` holds the newest user messages; `sealed` holds the whole compacted conversation, encrypted.
    """

    id: str
    created_at: int
    preserved: tuple[UserMessage, ...]
    sealed: str
    result: CollectedAnswer
    report: GenerationReport
    notes: tuple[str, ...]


async def compacted(deps: ResponsesDeps, sender: Sender, body: Mapping[str, Any], size: int) -> CompactedConversation:
    """Compact the conversation in a request body of `size` bytes.

    Raises the same errors as the creation of a response. Raises StoreTooLarge if the conversation can be neither
    summarized nor sealed.
    """
    # Clients send all fields of their usual requests. The output options do not apply to a summary.
    effective = {name: value for name, value in body.items() if name in EFFECTIVE_FIELDS}
    effective["reasoning"] = _reasoning(body.get("reasoning"))
    request = await validate_body(deps, sender.caller, {**effective, "store": False}, size, sender.request_id)
    request = request.model_copy(update={"input": [*request.input, InputTrigger(type=COMPACTION_TRIGGER)]})
    model = deps.resolve(request.model, sender.caller)
    past = await recall(deps.store, sender.tenant, request)
    response_id, created_at = deps.new_id("resp_"), int(deps.clock())
    prepared = await assembled(
        deps, sender, request, past, model, response_id=response_id, created_at=created_at, size=size
    )
    # Get the encryption key before the generation. Without a key, the result could not be returned.
    seals = await deps.seals()
    stream = deps.service.start(summary_request(prepared.generation.request))
    try:
        result = await collect_run(stream)
    finally:
        await stream.aclose()
    # The summary replaces everything that the model has seen, including earlier responses.
    history = continued(past.earlier, prepared.generation.input)
    summary, report = summary_of(result), stream.report
    replacement = await _fitted(deps, prepared.generation.request, history, summary, threshold_of(None, model.window))
    report.notes = [*notes_on_summary(summary, report), *report.notes]
    if not summary:
        report.facts.left_out = 0
    sealed = sealed_items(replacement.items, seals, sender.tenant)
    ignored = without_effect("", {name: value for name, value in body.items() if name not in EFFECTIVE_FIELDS})
    notes = (*prepared.generation.notes, *ignored)[:MAX_NOTES]
    return CompactedConversation(response_id, created_at, replacement.newest, sealed, result, report, notes)


async def _fitted(
    deps: ResponsesDeps, request: GenerationRequest, history: Sequence[Item], summary: str, limit: int
) -> Replacement:
    """Return the items that replace the conversation, if possible below `limit` tokens."""

    async def size(replacement: Replacement) -> int:
        conversation = replace(request.conversation, items=replacement.items, prefill=None, reasoning_from=0)
        return await deps.service.count(replace(request, conversation=conversation))

    if not summary:
        return replacement_of(history, summary)
    return await fitted(partial(replacement_of, history, summary), size, preserved_characters(limit), limit)


def _reasoning(reasoning: Any) -> Any:
    """Return the reasoning options with low effort, unless the client has set an effort.

    A client sets the effort of its conversation. A different effort would change the beginning of the prompt, so that
    the backend's prefix cache would not match.
    """
    if reasoning is None or (isinstance(reasoning, dict) and reasoning.get("effort") is None):
        return {**(reasoning or {}), "effort": Effort.LOW.value}
    return reasoning


def to_compaction(done: CompactedConversation, dialect: Dialect, new_id: NewId) -> Wire:
    """Return the body of the answer to `POST /responses/compact`."""
    return {
        "id": done.id,
        "object": "response.compaction",
        "created_at": done.created_at,
        "output": [dialect.item(item) for item in _output(done, new_id)],
        "usage": to_usage(done.result.finished.usage),
        "unisono": to_about([done.report], done.notes),
    }


def _output(done: CompactedConversation, new_id: NewId) -> Iterator[Wire]:
    for message in done.preserved:
        yield to_wire(message, new_id("msg_"), Toolbox())
    yield {"id": new_id("cmp_"), "type": "compaction", "encrypted_content": done.sealed}


class CompactRequest(ResponsesRequest):
    """Body in the OpenAPI document: a Responses request without the fields that have no effect."""

    model_config = ConfigDict(defer_build=True, json_schema_extra=partial(keep_properties, EFFECTIVE_FIELDS))


def add_compact_route(table: RouteTable, dialect: Dialect) -> None:
    @table.add_model_call("/responses/compact", answer=Compaction, body=CompactRequest)
    async def compact_response(request: Request) -> Response:
        """Compact a conversation."""
        deps = dependency(request, ResponsesApi).deps
        body = await read_model_request(request, "user", "safety_identifier")
        sender = Sender(request.state.caller, request.state.request_id, dialect)
        work = compacted(deps, sender, body, work_size(await request.body()))
        done = await until_disconnect(request, work)
        headers = {**backend_header([done.report]), **recoveries_header([done.report])}
        return to_whole(to_compaction(done, dialect, deps.new_id), headers)
