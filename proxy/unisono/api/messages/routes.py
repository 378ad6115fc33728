"""Routes of the Messages API: `/v1/messages` and its `count_tokens`, with and without `/v1`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from unisono.api.answer_report import backend_header, recoveries_header
from unisono.api.automatic_compaction import request_to_count, start_answer
from unisono.api.body import off_loop, read_json, work_size
from unisono.api.caller_options import with_options
from unisono.api.collected_answer import CollectedAnswer, collect_run
from unisono.api.compaction_summary import sealed_items
from unisono.api.disconnects import until_disconnect
from unisono.api.end_user_fields import identify_end_user
from unisono.api.image_descriptions import ImageDescriber
from unisono.api.json_response import to_whole
from unisono.api.media_loading import MediaSource, media_context
from unisono.api.messages.answer_schema import Message, MessageEvent, MessageTokens
from unisono.api.messages.context_management import EditedRequest, edited, first_read_position
from unisono.api.messages.error_format import anthropic_limits
from unisono.api.messages.history import SealedBlocks
from unisono.api.messages.inbound import (
    MessagesGeneration,
    MessagesModel,
    needs_seals,
    to_compaction_plan,
    to_generation_request,
)
from unisono.api.messages.outbound import MessageEvents, MessageFrame, to_message
from unisono.api.messages.schema import MessagesInput, MessagesRequest
from unisono.api.route_table import MODEL_CALL_ERRORS, RouteTable, dependency
from unisono.api.sse import KEEP_ALIVE_S, EventStream, generation_source
from unisono.core.access import Caller
from unisono.core.conversation import Item
from unisono.core.frozen import dataclass
from unisono.core.input_files import FileReader
from unisono.core.trace_context import identify
from unisono.engine.request import GenerationReport, GenerationService, GenerationStream

# Length in characters above which an answer is built in a thread. An answer of this length takes up to a millisecond,
# because the arguments of its calls are parsed.
LONG_ANSWER: Final = 16_384

MESSAGES = RouteTable("messages", failure="MessagesFailure")

Kind = TypeVar("Kind", bound=MessagesInput)


class Sealing(SealedBlocks, Protocol):
    """Sealing and signing of data that clients store and send back."""

    def seal(self, tenant: str, items: Sequence[Item], session: str = "") -> str: ...

    def sign(self, tenant: str, text: str) -> str: ...


@dataclass(frozen=True, slots=True)
class MessagesDeps:
    """Dependencies of the Messages API.

    `resolve` finds a model by name. It raises UnknownModel, or ModelNotAllowed if the caller may not use the model.
    `seals` loads the sealing key, which may be in the store; it raises StoreUnavailable if the store cannot be reached.
    `today` returns YYYY-MM-DD, `new_id` an unguessable string, and `clock` the Unix time in seconds.
    """

    service: GenerationService
    resolve: Callable[[str, Caller], MessagesModel]
    seals: Callable[[], Awaitable[Sealing]]
    today: Callable[[], str]
    new_id: Callable[[], str]
    clock: Callable[[], float]
    describer: ImageDescriber | None = None
    files: FileReader | None = None
    keep_alive_s: float = KEEP_ALIVE_S


@dataclass(frozen=True, slots=True)
class PreparedMessage:
    """Request that is ready for generation.

    `edits` is the result of the request's `context_management`, or None if the request has no such field.
    """

    generation: MessagesGeneration
    frame: MessageFrame
    edits: EditedRequest | None = None


@MESSAGES.add_model_call("/messages", answer=Message, body=MessagesRequest, events=MessageEvent)
async def create_message(request: Request) -> Response:
    """Create a message in Anthropic's format, complete or as a stream of events."""
    deps = dependency(request, MessagesDeps)
    prepared = await prepare_message(deps, request, MessagesRequest)
    generation = prepared.generation
    stream = start_answer(deps.service, generation.request, generation.compaction)
    report = stream.report
    request.state.reports = [report]
    if prepared.generation.stream:
        events = MessageEvents(prepared.frame, report)
        return EventStream(
            generation_source(stream, events.write),
            headers=lambda: headers_of(report, deps.clock()),
            broken=events.broken,
            keep_alive_s=deps.keep_alive_s,
            keep_alive=events.keep_alive,
        )
    result = await until_disconnect(request, collected(stream))
    headers = {**headers_of(report, deps.clock()), **recoveries_header([report])}
    size = sum(len(closed.text) for closed in result.items)
    return await off_loop(lambda: to_whole(to_message(result, report, prepared.frame), headers), size, LONG_ANSWER)


@MESSAGES.add(
    "POST", "/messages/count_tokens", MODEL_CALL_ERRORS, answer=MessageTokens, body=MessagesInput, direct=True
)
async def count_message_tokens(request: Request) -> Response:
    """Count the input tokens of a request."""
    deps = dependency(request, MessagesDeps)
    prepared = await prepare_message(deps, request, MessagesInput)
    tokens = await until_disconnect(request, _counted(deps.service, prepared))
    return to_whole(tokens)


async def _counted(service: GenerationService, prepared: PreparedMessage) -> dict[str, Any]:
    edits = prepared.edits
    known = None if edits is None else edits.tokens
    counted = request_to_count(prepared.generation.request, prepared.generation.compaction)
    tokens = await service.count(counted) if known is None else known
    if edits is None:
        return {"input_tokens": tokens}
    original = tokens if edits.original_tokens is None else edits.original_tokens
    return {"input_tokens": tokens, "context_management": {"original_input_tokens": original}}


async def prepare_message(deps: MessagesDeps, request: Request, kind: type[Kind]) -> PreparedMessage:
    """Validate and convert a request, and apply its context edits.

    Raises an error if the request is invalid or not supported, or if the caller may not use its model.
    """
    body = await read_json(request)
    if kind is MessagesRequest:
        await identify_end_user(request, body, "metadata.user_id")
        body = with_options(request, body)
    size = work_size(await request.body())
    caller: Caller = request.state.caller
    # Counting tokens must cost nothing, so the vision model is not called.
    can_ask = kind is MessagesRequest
    request_id = request.state.request_id
    source = MediaSource(body, caller, kind, request_id, size, can_ask, first_read_position, request)
    context = await media_context(deps.resolve, source, deps.describer, deps.files)
    parsed = await off_loop(lambda: kind.model_validate(body, context=context), size)
    model = deps.resolve(parsed.model, caller)
    # The sealing key may be in the store. A request without sealed data must not depend on the store.
    seals = await deps.seals() if needs_seals(parsed) else None

    def turned() -> MessagesGeneration:
        return to_generation_request(
            parsed,
            model=model,
            today=deps.today(),
            caller=caller,
            request_id=request.state.request_id,
            seals=seals,
        )

    generation = await off_loop(turned, size)
    edits = None
    if parsed.context_management is not None:
        edits = await edited(deps.service, generation.request, parsed.context_management.edits)
        generation = replace(generation, request=edits.request)
    plan = to_compaction_plan(parsed, generation.request.conversation, model.window)
    generation = replace(generation, compaction=plan)
    frame = _frame(deps, request, parsed, generation, edits, seals)
    identify(response_id=frame.id)
    return PreparedMessage(generation, frame, edits)


def _frame(
    deps: MessagesDeps,
    request: Request,
    parsed: MessagesInput,
    generation: MessagesGeneration,
    edits: EditedRequest | None,
    seals: Sealing | None,
) -> MessageFrame:
    tenant: str = request.state.caller.tenant
    request.state.notes = generation.notes
    more: dict[str, Any] = {}
    if seals is not None:
        more["sign"] = lambda text: seals.sign(tenant, text)
        more["seal_history"] = lambda items: sealed_items(items, seals, tenant)
        more["seal"] = lambda items, talk: seals.seal(tenant, items, talk)
    return MessageFrame(
        id=f"msg_{deps.new_id()}",
        model=parsed.model,
        request_id=request.state.request_id,
        thinking=generation.thinking,
        server_tool_names=generation.server_tool_names,
        mcp_servers=generation.mcp_servers,
        session=generation.session,
        notes=generation.notes,
        max_tokens=parsed.max_tokens,
        hold_calls=generation.request.answer.hold_calls,
        applied_edits=None if edits is None else edits.applied,
        removed=generation.request.conversation.removed,
        **more,
    )


async def collected(stream: GenerationStream) -> CollectedAnswer:
    """Collect a generation. The backend is released when this function returns or raises."""
    try:
        return await collect_run(stream)
    finally:
        await stream.aclose()


def headers_of(report: GenerationReport, now: float) -> Mapping[str, str]:
    """Return the backend headers and the rate limit headers; `now` is the Unix time in seconds."""
    limits = {} if report.standing is None else anthropic_limits(report.standing, now)
    return {**backend_header([report]), **limits}
