"""Preparation of a request: validated body, prior state, generation request and frame.

Invalid requests are rejected here, before a backend is called. If the response is to be stored, the generation starts
only if the store answers, accepts writes and has room. Otherwise the client could not retrieve the promised response.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request

from unisono.api.automatic_compaction import start_answer
from unisono.api.body import off_loop
from unisono.api.compaction_summary import ItemSealing, replaces_history, sealed_items
from unisono.api.gateway_tools import browser_results, builtin_for, to_builtin_servers
from unisono.api.media_loading import MediaSource, media_context
from unisono.api.responses.continued_history import OUR_ID, PriorState, Recall, no_conversation, recall
from unisono.api.responses.deps import ResponsesDeps, ResponsesModel, SealsSource
from unisono.api.responses.inbound import ResponsesGeneration, check, mcp_specs, to_generation_request
from unisono.api.responses.input_conversion import KnownState, has_sealed, opener
from unisono.api.responses.input_items import COMPACTIONS
from unisono.api.responses.lease_keeper import hold_lease
from unisono.api.responses.outbound.dialects import OPENAI, Dialect
from unisono.api.responses.outbound.reasoning_summary import SUMMARY_CHARS
from unisono.api.responses.outbound.response import ResponseFrame, to_echo
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.responses.server_tools.approval_claims import ApprovalClaims, approvals_in
from unisono.api.responses.server_tools.approval_history import SEALED, server_tool_history
from unisono.api.responses.server_tools.servers import to_servers
from unisono.api.tool_server_rules import ServerRules
from unisono.core.access import Caller
from unisono.core.conversation import AssistantCall
from unisono.core.error_texts import ConversationConflict
from unisono.core.frozen import dataclass
from unisono.core.ids import DerivedIds
from unisono.core.state_store import Lease, Status
from unisono.core.tool_host import ToolServer
from unisono.core.trace_context import identify
from unisono.engine.request import GenerationRequest, GenerationService, GenerationStream


@dataclass(frozen=True, slots=True)
class Sender:
    """Sender of a request, and the dialect of the answer.

    `notes` are texts about headers and parameters without effect.
    """

    caller: Caller
    request_id: str
    dialect: Dialect = OPENAI
    notes: tuple[str, ...] = ()

    @property
    def tenant(self) -> str:
        """Tenant of the caller, which owns the responses and conversations that are stored."""
        return self.caller.tenant


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """Request that is ready for generation.

    `lease` is the lease on the request's conversation, and `revision` the revision of the conversation when it was
    read. Both are None for a request without a conversation. `approvals` are claims on the approval requests that the
    request answers.
    """

    sender: Sender
    request: ResponsesRequest
    generation: ResponsesGeneration
    frame: ResponseFrame
    approvals: ApprovalClaims
    lease: Lease | None = None
    revision: int | None = None

    def start(self, service: GenerationService) -> GenerationStream:
        """Start the generation. The conversation is compacted first if that is necessary."""
        return start_answer(service, self.generation.request, self.generation.compaction)

    @property
    def item_ids(self) -> DerivedIds:
        """Ids for the answer's items, derived from the response id: every process gets equal ids."""
        return DerivedIds(self.frame.id, "item")


async def validate_body(
    deps: ResponsesDeps,
    caller: Caller,
    body: Mapping[str, Any],
    size: int,
    request_id: str,
    *,
    answered: bool = True,
    counted: bool = False,
    request: Request | None = None,
) -> ResponsesRequest:
    """Validate a body of `size` bytes, and return the request.

    If `answered` is False, the request only prepares a later request, and may lack fields that an answer requires. If
    `counted` is True, only the tokens of the request are counted, and images are not described. Raises InvalidRequest
    for a field with an invalid value, and ClientGone if the client of the HTTP request `request` disconnects.
    """
    begin = partial(_first_read_position, deps, caller.tenant, size)
    source = MediaSource(body, caller, ResponsesRequest, request_id, size, not counted, begin, request)
    context = await media_context(deps.resolve, source, deps.describer, deps.files)

    def judge() -> ResponsesRequest:
        validated = ResponsesRequest.model_validate(body, context=context)
        check(validated, answered=answered)
        return validated

    return await off_loop(judge, size)


async def _first_read_position(deps: ResponsesDeps, tenant: str, size: int, items: Sequence[Any]) -> int:
    """Return the 0-based position of the newest compaction that replaces all items before it.

    Returns 0 if the items contain no such compaction.
    """
    objects = [(position, item) for position, item in enumerate(items) if isinstance(item, dict)]
    # A compaction without model output before it does not replace the messages that the client sends again.
    first = next((position for position, item in objects if _is_output(item)), len(items))
    compactions = [(at, item.get("encrypted_content")) for at, item in objects if item.get("type") in COMPACTIONS]
    sealed = [(at, text) for at, text in compactions if at > first and isinstance(text, str)]
    if not sealed:
        return 0
    seals = await deps.seals()

    def found() -> int:
        opened = ((at, seals.open(tenant, text)) for at, text in reversed(sealed))
        return next((at for at, meaning in opened if meaning is not None and replaces_history(meaning)), 0)

    return await off_loop(found, size)


def _is_output(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "function_call" or (item.get("role") == "assistant" and bool(item.get("content")))


@asynccontextmanager
async def prepare_request(
    deps: ResponsesDeps,
    sender: Sender,
    request: ResponsesRequest,
    *,
    response_id: str,
    size: int = 0,
    read_prior_state: Recall = recall,
) -> AsyncIterator[PreparedRequest]:
    """Prepare `request`, and hold the lease of its conversation until the block ends.

    Raises an UnisonoError if the request is invalid or its state is missing, and ConversationConflict if the
    conversation has another response in progress.
    """
    # The lease is acquired before the conversation is read, so that no other response can append to it in between.
    model = deps.resolve(request.model, sender.caller)
    if request.conversation is None:
        prepared = await _prepare_request(deps, sender, request, model, response_id, size, read_prior_state)
        async with prepared.approvals.hold():
            yield prepared
        return
    if not OUR_ID.fullmatch(request.conversation.id):
        raise no_conversation(request.conversation.id)
    async with hold_lease(deps, sender.tenant, request.conversation.id, response_id) as lease:
        if lease is None:
            raise ConversationConflict
        prepared = await _prepare_request(deps, sender, request, model, response_id, size, read_prior_state, lease)
        async with prepared.approvals.hold():
            yield prepared


async def _prepare_request(
    deps: ResponsesDeps,
    sender: Sender,
    request: ResponsesRequest,
    model: ResponsesModel,
    response_id: str,
    size: int,
    read_prior_state: Recall,
    lease: Lease | None = None,
) -> PreparedRequest:
    past = await read_prior_state(deps.store, sender.tenant, request)
    prepared = await assembled(
        deps,
        sender,
        request,
        past,
        model,
        response_id=response_id,
        created_at=int(deps.clock()),
        lease=lease,
        size=size,
    )
    if request.stored or lease is not None:
        await check_store(deps, prepared)
    return prepared


async def check_store(deps: ResponsesDeps, prepared: PreparedRequest) -> None:
    """Check before the generation whether the store will accept the response.

    Without this check, a generation whose response cannot be stored would be wasted. Raises StoreError if the store
    does not answer, or if the input is too large to be stored.
    """
    beginning = prepared.frame.stored(Status.IN_PROGRESS, input=prepared.generation.input)
    await deps.store.check(beginning, prepared.sender.tenant)


async def assembled(
    deps: ResponsesDeps,
    sender: Sender,
    request: ResponsesRequest,
    past: PriorState,
    model: ResponsesModel,
    *,
    response_id: str,
    created_at: int,
    lease: Lease | None = None,
    size: int = 0,
) -> PreparedRequest:
    """Build the generation request and the frame from a request and its prior state."""
    # Every generation of a response begins here, including those of background responses.
    identify(response_id=response_id, conversation_id=request.conversation.id if request.conversation else "")
    seals = await deps.seals() if _needs_seals(request, past) else None
    known = _known(past, seals, sender.tenant)
    rules = deps.servers.for_model(model.tool_servers).for_caller(sender.caller)
    # A tool server keeps resources, such as a shell or a browser page, for one session. All responses with the same
    # sticky key share a session. Without a sticky key, each response has its own session.
    sticky = _sticky(sender, request, past, response_id)
    servers = _servers(sender, request, rules, sticky or f"{sender.tenant}\0{response_id}")
    today = past.prompt_date(deps.today())
    parse = partial(
        to_generation_request,
        request,
        known,
        model=model.group,
        today=today,
        caller=sender.caller,
        request_id=sender.request_id,
        new_id=deps.new_id,
        hold_calls=not model.stream_tool_arguments,
        seed=response_id,
        # A background response always uses `today`, because a process that takes it over cannot read the date from this
        # process's conversation cache.
        dated=bool(past.first_day or request.background),
        sticky=sticky,
        servers=servers,
        rules=model.rules,
        window=model.window,
    )
    generation = await off_loop(parse, size)
    generation = replace(generation, request=_with_sealing(generation.request, deps.seals, sender.tenant))
    fields = approvals_in(request, generation.request.server_tools)
    approvals = ApprovalClaims(deps, sender.tenant, response_id, fields)
    if fields:
        generation = replace(generation, request=approvals.attach_to(generation.request))
    frame = _frame(sender, request, past, model, generation, response_id, created_at, today, seals)
    return PreparedRequest(sender, request, generation, frame, approvals, lease, past.revision)


def _servers(sender: Sender, request: ResponsesRequest, rules: ServerRules, session: str) -> tuple[ToolServer, ...]:
    return to_servers(mcp_specs(request), rules, sender.tenant) + to_builtin_servers(
        [builtin_for(tool.type) for tool in request.tools or ()], rules.trained, owner=sender.tenant, session=session
    )


def _frame(
    sender: Sender,
    request: ResponsesRequest,
    past: PriorState,
    model: ResponsesModel,
    generation: ResponsesGeneration,
    response_id: str,
    created_at: int,
    today: str,
    seals: ItemSealing | None,
) -> ResponseFrame:
    pages = {**past.hosted.pages, **past.now.pages, **server_tool_history(generation.input).pages}
    return ResponseFrame(
        id=response_id,
        created_at=created_at,
        model=request.model,
        request=to_echo(request, generation.request.answer.sampling),
        toolbox=generation.toolbox,
        notes=(*sender.notes, *generation.notes, *_notes_on_summary(request, model)),
        dialect=sender.dialect,
        hold_calls=generation.request.answer.hold_calls,
        show_reasoning=model.show_reasoning,
        # The seal binds reasoning to its tenant, so that another tenant cannot send it back.
        seal=_sealer(seals, sender.tenant) if request.seals_reasoning else None,
        first_day=today,
        ancestors=past.ancestors,
        conversation=request.conversation.id if request.conversation else None,
        seen=past.seen,
        include=frozenset(request.include or ()),
        browsed=browser_results(generation.request.conversation.items, pages),
        summary_chars=SUMMARY_CHARS[request.summary],
        seal_history=_history_sealer(seals, sender.tenant) if generation.compaction is not None else None,
        logprobs=generation.request.logprobs,
    )


def _notes_on_summary(request: ResponsesRequest, model: ResponsesModel) -> tuple[str, ...]:
    is_without_effect = request.summary is not None and not model.show_reasoning
    return ("reasoning.summary: no effect, because this model hides its reasoning",) if is_without_effect else ()


def _needs_seals(request: ResponsesRequest, past: PriorState) -> bool:
    return (
        has_sealed(request.input)
        or request.seals_reasoning
        or request.is_compaction
        or bool(request.context_management)
        or bool(past.hosted.sealed or past.now.sealed)
        or any(SEALED in item.wire for item in (past.stored_items or {}).values())
    )


def _known(past: PriorState, seals: ItemSealing | None, tenant: str) -> KnownState:
    stored = (past.stored_items or {}).get
    return KnownState(past.earlier, stored, opener(seals, tenant), past.hosted, past.now, past.configuration)


def _sealer(seals: ItemSealing | None, tenant: str) -> Any:
    assert seals is not None
    return lambda item: seals.seal(tenant, [item])


def _with_sealing(request: GenerationRequest, seals: SealsSource, tenant: str) -> GenerationRequest:
    """Return the request with a function that encrypts calls, for calls that wait for the user."""
    if request.server_tools is None:
        return request

    async def seal_calls(calls: Sequence[AssistantCall]) -> str:
        return (await seals()).seal(tenant, calls)

    return replace(request, server_tools=replace(request.server_tools, seal_calls=seal_calls))


def _history_sealer(seals: ItemSealing | None, tenant: str) -> Any:
    assert seals is not None
    return lambda items: sealed_items(items, seals, tenant)


def _sticky(sender: Sender, request: ResponsesRequest, past: PriorState, response_id: str) -> str:
    """Return the key that routes all requests of a conversation to the same backend.

    The key is `prompt_cache_key`, the conversation's id, or the id of the first response. Returns "" if later requests
    cannot have the same key.
    """
    # If the response is not stored, only `prompt_cache_key` can connect this request with later ones.
    if request.prompt_cache_key:
        origin = f"key {request.prompt_cache_key}"
    elif request.conversation is not None:
        origin = request.conversation.id
    elif past.ancestors or request.stored:
        origin = past.ancestors[0] if past.ancestors else response_id
    else:
        return ""
    return f"{sender.tenant}\0{origin}"
