"""Authenticated routes of the web page: gateway status, recordings, forks, inspections.

A recording is visible to its tenant only. Inspections run in a thread. Their concurrency and their input are limited.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, Final, Literal

from fastapi import Query
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from unisono.api.admin.administration import Administration
from unisono.api.answer_types import ABSENT, AnswerModel, Count, Moment, Object
from unisono.api.completions.routes import CompletionRoute
from unisono.api.dependencies import CurrentCaller, ParsedBody, PathId, provided
from unisono.api.field_types import FieldInput, OpenModel, invalid_field
from unisono.api.route_table import BODY_ERRORS, EVENTS, MODEL_CALL_ERRORS, READ_404, RouteTable
from unisono.core.access import Caller
from unisono.core.conversation import Effort
from unisono.core.frozen import dataclass
from unisono.core.generation import STOP_TOKENS
from unisono.core.observer import LiveOutputs
from unisono.core.recordings import TraceStore
from unisono.errors import InvalidRequest, LimitReached, NotFound, UnisonoError
from unisono.observe.recording import dumped, unpacked
from unisono.web.inspector import LARGEST, MAX_CHARACTERS, InspectRequest, inspected
from unisono.web.live_tokens import live_segments
from unisono.web.trace_fork import MORE_TOKENS, ForkChanges, first_changed_token, fork_of

LISTED: Final = 20
MAX_LISTED: Final = 200
# Valid ids of recordings.
POSSIBLE: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# Maximum concurrent inspections.
AT_ONCE: Final = 1
# Maximum queued inspections.
MAX_QUEUED_INSPECTIONS: Final = 16
# Recordings contain prompts, so no cache may store them.
NOT_STORED: Final = {"cache-control": "no-store"}

WEB = RouteTable("gateway")


class InspectionReader:
    """Executor that runs inspections in threads, with a limited number of waiting inspections."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._queued = 0

    async def inspect(self, request: InspectRequest) -> Mapping[str, Any]:
        """Run an inspection.

        Raises InvalidRequest for invalid input, and LimitReached if the queue is full.
        """
        # Every queued inspection holds its recording in memory.
        if self._queued >= MAX_QUEUED_INSPECTIONS:
            raise LimitReached("Too many inspections are in progress; try again in a moment.", retry_after_s=1.0)
        self._queued += 1
        try:
            async with self._slots:
                return await asyncio.to_thread(inspected, request)
        finally:
            self._queued -= 1


Overview = Callable[[Caller], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class WebDeps:
    """Dependencies of the routes."""

    overview: Overview
    traces: TraceStore
    live: LiveOutputs
    inspections: InspectionReader = field(default_factory=InspectionReader)


def _to_limit(value: Any) -> int:
    if value.isascii() and value.isdigit() and len(value) <= 4 and 1 <= int(value) <= MAX_LISTED:
        return int(value)
    raise invalid_field(f"must be a whole number from 1 to {MAX_LISTED}")


Deps = Annotated[WebDeps, provided(WebDeps)]
Limit = Annotated[int, BeforeValidator(_to_limit), FieldInput(Annotated[int, Field(ge=1, le=MAX_LISTED)])]


class Deployment(AnswerModel):
    name: str
    state: str
    reason: str
    cause: str
    kind: str


class ModelStatus(AnswerModel):
    id: str
    model: str
    mode: str
    context: int | None
    ready: bool
    waiting: Count = ABSENT
    deployments: list[Deployment] = ABSENT


class MinuteCounts(AnswerModel):
    at: Moment
    answers: Count
    failed: Count
    recoveries: Object


class GatewayStatus(AnswerModel):
    object: Literal["status"]
    version: str
    at: float
    key: str | None
    role: str
    keyless: bool
    traces: Literal["off", "recoveries", "all"]
    rules: Object
    models: list[ModelStatus]
    workers: Count = ABSENT
    minutes: list[MinuteCounts] = ABSENT


class TraceEntry(AnswerModel):
    id: str
    at: float
    model: str
    outcome: str
    recoveries: list[str]


class TraceList(AnswerModel):
    object: Literal["list"]
    data: list[TraceEntry]


class Trace(AnswerModel):
    object: Literal["unisono.trace"]
    version: Count
    id: str
    steps: list[Object]
    output: list[Count]


class InspectedPart(AnswerModel):
    kind: str


class InspectedStep(AnswerModel):
    step: Count
    generations: list[Object]
    prompts: list[Object]
    output: list[InspectedPart]


class InspectedItem(AnswerModel):
    kind: str
    name: str
    characters: Count
    complete: bool


class Inspection(AnswerModel):
    object: Literal["unisono.inspection"]
    about: Object | None
    steps: list[InspectedStep]
    items: list[InspectedItem]
    tools: list[Object]
    left_out: list[str]


# These routes serialize their answers with `dumped` instead of models. With models, megabytes of tokens would block the
# event loop, and a status, which the page requests every few seconds, would take three times as long.
@WEB.add("GET", "/status", answer=GatewayStatus)
async def get_status(
    deps: Deps, admin: Annotated[Administration, provided(Administration)], caller: CurrentCaller
) -> Response:
    """Return the status of the gateway, limited to data that the key may see."""
    role = (await admin.actor(caller)).role
    return _json({**deps.overview(caller), "role": role})


@WEB.add("GET", "/traces", answer=TraceList)
async def list_traces(
    deps: Deps,
    caller: CurrentCaller,
    limit: Annotated[Limit, Query(description="Maximum number of recordings.")] = LISTED,
) -> Response:
    """List the latest recordings of the key's tenant."""
    found = await deps.traces.traces(caller.tenant, limit)
    data = [{"id": one.id, "at": one.at, **json.loads(one.about)} for one in found]
    return _json({"object": "list", "data": data})


@WEB.add("GET", "/traces/{id}", READ_404, answer=Trace)
async def get_trace(deps: Deps, caller: CurrentCaller, id: PathId) -> Response:
    """Retrieve a recording."""
    return _json(await _document(deps.traces, caller, id))


class ForkRequest(OpenModel):
    """Position at which an answer is forked, and changes to the rest of the answer.

    `at` is the 0-based index of a generated token: within `step`, or within all steps if `step` is null.
    """

    at: Annotated[int, Field(ge=0, le=LARGEST)]
    step: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    effort: Literal["low", "medium", "high"] | None = None
    tool_result: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    user: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None


class TraceFork(AnswerModel):
    """Token ids of a fork.

    `generated` are the recorded tokens of the step before the fork, `recorded` the recorded tokens after it, and
    `forked` the new tokens. `forked` is null if a guardrail masked the answer. `first_difference` is an index like
    `at`, or null if both answers are the same.
    """

    object: Literal["unisono.fork"]
    model: str
    at: Count
    generated: list[Count]
    recorded: list[Count]
    forked: list[Count] | None
    first_difference: int | None
    usage: Object
    unisono: Object


@WEB.add("POST", "/traces/{id}/fork", MODEL_CALL_ERRORS, answer=TraceFork, body=ForkRequest)
async def fork_trace(
    deps: Deps,
    completions: Annotated[CompletionRoute, provided(CompletionRoute)],
    caller: CurrentCaller,
    request: Request,
    id: PathId,
    fork: ParsedBody[ForkRequest],
) -> Response:
    """Generate the rest of a recorded answer again, from a token to the end of its step."""
    document = await _document(deps.traces, caller, id)
    effort = None if fork.effort is None else Effort(fork.effort)
    start = await asyncio.to_thread(fork_of, document, ForkChanges(fork.at, fork.step, effort, fork.tool_result))
    body = {
        "model": document["model"],
        "prompt": [*start.prompt],
        "max_tokens": len(start.recorded) + MORE_TOKENS,
        "temperature": fork.temperature,
        "stop_token_ids": [*STOP_TOKENS],
        "return_token_ids": True,
        **({} if fork.user is None else {"user": fork.user}),
    }
    try:
        answer = await completions.complete_own(request, body)
    except UnisonoError as error:
        # The request body has no field `prompt` or `model`, because both are values of the recording.
        error.param = "id" if error.param in ("prompt", "model") else error.param
        raise
    # If a guardrail has masked the text, the answer has no token ids.
    forked: list[int] | None = answer["choices"][0]["token_ids"]
    return _json(
        {
            "object": "unisono.fork",
            "model": document["model"],
            "at": fork.at,
            "generated": start.generated,
            "recorded": start.recorded,
            "forked": forked,
            "first_difference": None if forked is None else first_changed_token(start, fork.at, forked),
            "usage": answer["usage"],
            "unisono": answer["unisono"],
        }
    )


class LiveTokens(AnswerModel):
    """Event of the stream: the tokens that were generated since the previous event."""

    segments: list[Object]


@WEB.add("GET", "/requests/{id}/tokens", READ_404, answer=LiveTokens, events=LiveTokens)
async def watch_tokens(deps: Deps, caller: CurrentCaller, id: PathId) -> Response:
    """Stream the tokens of an answer in progress to the key that requested it."""
    output = deps.live.find(id, caller.tenant, caller.key)
    if output is None:
        raise NotFound("No answer with this id is in progress in this process.")
    return StreamingResponse(_events(live_segments(output)), headers=NOT_STORED, media_type=EVENTS)


async def _events(batches: AsyncIterator[list[dict[str, Any]]]) -> AsyncIterator[bytes]:
    async for segments in batches:
        yield b"data: " + dumped({"segments": segments}) + b"\n\n"
    yield b"data: [DONE]\n\n"


@WEB.add("POST", "/inspect", (*BODY_ERRORS, 404, 429), answer=Inspection, body=InspectRequest)
async def inspect(deps: Deps, caller: CurrentCaller, inspection: ParsedBody[InspectRequest]) -> Response:
    """Parse a recording, Harmony text or token ids, and return the output with its recoveries."""
    inspection.check()
    if inspection.id is not None:
        # The recording is searched in the tenant of the caller, so other tenants' recordings are not found.
        inspection = InspectRequest(trace=await _document(deps.traces, caller, inspection.id))
    return _json(await deps.inspections.inspect(inspection))


async def _document(traces: TraceStore, caller: Caller, id: str) -> dict[str, Any]:
    """Load a recording. Raises NotFound, or InvalidRequest if it is damaged or not supported."""
    # Ids of any other form cannot exist in the store.
    found = await traces.trace(caller.tenant, id) if POSSIBLE.fullmatch(id) else None
    if found is None:
        raise NotFound("The recording does not exist: it may have expired, or the answer was not recorded.")
    try:
        return await asyncio.to_thread(unpacked, found.document)
    except ValueError as error:
        raise InvalidRequest(f"The recording cannot be read: {error}.") from error


def _json(value: Mapping[str, Any]) -> Response:
    return Response(dumped(value), media_type="application/json", headers=NOT_STORED)
