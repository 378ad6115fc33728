"""Dependencies of the routes of the Responses API."""

from __future__ import annotations

from unisono.api.responses.background.runner import BackgroundRunner
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.sse import KEEP_ALIVE_S
from unisono.core.frozen import dataclass


@dataclass(frozen=True, slots=True)
class ResponsesApi:
    deps: ResponsesDeps
    runner: BackgroundRunner
    keep_alive_s: float = KEEP_ALIVE_S
