"""Dependencies of the Responses API routes, and an empty route table for each dialect."""

from __future__ import annotations

from unisono.api.responses.background.runner import BackgroundRunner
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.route_table import RouteTable
from unisono.api.sse import KEEP_ALIVE_S
from unisono.core.frozen import dataclass


@dataclass(frozen=True, slots=True)
class ResponsesApi:
    deps: ResponsesDeps
    runner: BackgroundRunner
    keep_alive_s: float = KEEP_ALIVE_S


def responses_table() -> RouteTable:
    """Return an empty table for routes of OpenAI's dialect."""
    return RouteTable("responses")


def open_responses_table() -> RouteTable:
    """Return an empty table for routes of Open Responses."""
    return RouteTable("open responses", prefixes=("/open-responses/v1", "/open-responses"), suffix="InOpenResponses")
