"""Gate that makes the tokens of an answer in progress visible to its client."""

from __future__ import annotations

from unisono.core.live_outputs import LiveOutput, LiveOutputs
from unisono.engine.request import GenerationRequest
from unisono.middleware.pipeline import Gate


class LiveObservation:
    """Factory of gates that enter generations of HTTP requests into `outputs`."""

    def __init__(self, outputs: LiveOutputs) -> None:
        self._outputs = outputs

    def __call__(self, request: GenerationRequest) -> Gate | None:
        return LiveGate(request, self._outputs) if request.origin.request_id else None


class LiveGate(Gate):
    """Gate that enters one generation while it is iterated."""

    def __init__(self, request: GenerationRequest, outputs: LiveOutputs) -> None:
        self._origin = request.origin
        self._outputs = outputs

    def start(self) -> None:
        caller = self._origin.caller
        key = caller.key if caller is not None else ""
        # The engine only appends to the journal of a report.
        self._outputs.add(self._origin.request_id, LiveOutput(self._origin.tenant, key, self.report.journal))

    def end(self, error: BaseException | None) -> None:
        self._outputs.end(self._origin.request_id)
