"""Authenticated routes of the web page: gateway status, recordings, inspections.

A recording is visible to its tenant only. Inspections run in a thread with limited concurrency and bounded input.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.body import off_loop, read_json
from unisono.api.inspect_request import InspectRequest
from unisono.core.access import Caller
from unisono.core.recordings import TraceStore
from unisono.errors import InvalidRequest, LimitReached, NotFound
from unisono.observe.recording import dumped, unpacked
from unisono.web.inspector import inspected

LISTED: Final = 20
MAX_LISTED: Final = 200
# Valid ids of recordings.
POSSIBLE: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# Maximum concurrent inspections.
AT_ONCE: Final = 1
# Maximum queued inspections.
MAX_QUEUED_INSPECTIONS: Final = 16

Overview = Callable[[Caller], Mapping[str, Any]]


def web_router(*, overview: Overview, traces: TraceStore) -> APIRouter:
    """Create the router. Expects the layers of `api.asgi_layers` in front."""
    reading = InspectionReader()

    async def status(request: Request) -> Response:
        return _json(overview(request.state.caller))

    async def listed(request: Request) -> Response:
        caller: Caller = request.state.caller
        found = await traces.traces(caller.tenant, _limit(request))
        data = [{"id": one.id, "at": one.at, **json.loads(one.about)} for one in found]
        return _json({"object": "list", "data": data})

    async def one(request: Request) -> Response:
        return _json(await _document(traces, request.state.caller, request.path_params["id"]))

    async def inspect(request: Request) -> Response:
        body = await read_json(request)
        given = await off_loop(lambda: InspectRequest.model_validate(body), len(await request.body()))
        given.check()
        if given.id is not None:
            given = InspectRequest(trace=await _document(traces, request.state.caller, given.id))
        return _json(await reading.of(given))

    router = APIRouter()
    for prefix in ("/v1", ""):
        router.add_route(f"{prefix}/status", status, methods=["GET"], name="status")
        router.add_route(f"{prefix}/traces", listed, methods=["GET"], name="traces")
        router.add_route(f"{prefix}/traces/{{id}}", one, methods=["GET"], name="trace")
        router.add_route(f"{prefix}/inspect", inspect, methods=["POST"], name="inspect")
    return router


class InspectionReader:
    """Runner of inspections in a thread, with a bounded queue."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def of(self, given: InspectRequest) -> Mapping[str, Any]:
        """Run an inspection. Raises InvalidRequest, and LimitReached if the queue is full."""
        if self._waiting >= MAX_QUEUED_INSPECTIONS:
            raise LimitReached("Too many inspections are in progress; try again in a moment.", retry_after_s=1.0)
        self._waiting += 1
        try:
            async with self._slots:
                return await asyncio.to_thread(inspected, given)
        finally:
            self._waiting -= 1


async def _document(traces: TraceStore, caller: Caller, id: str) -> dict[str, Any]:
    """Load a recording. Raises NotFound, InvalidRequest."""
    # No other id can exist in the store.
    found = await traces.trace(caller.tenant, id) if POSSIBLE.fullmatch(id) else None
    if found is None:
        raise NotFound("The recording does not exist: it may have expired, or the answer was not recorded.")
    try:
        return await asyncio.to_thread(unpacked, found.document)
    except ValueError as error:
        raise InvalidRequest(f"The recording cannot be read: {error}.") from error


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", str(LISTED))
    if not (given.isascii() and given.isdigit() and len(given) <= 4 and 1 <= int(given) <= MAX_LISTED):
        raise InvalidRequest(f"'limit' must be a whole number from 1 to {MAX_LISTED}.", param="limit")
    return int(given)


def _json(value: Mapping[str, Any]) -> Response:
    return Response(dumped(value), media_type="application/json", headers={"cache-control": "no-store"})
