"""Gate that makes the tokens of an answer in progress visible to its client."""

from __future__ import annotations

from unisono.core.observer import LiveOutput, LiveOutputs
from unisono.engine.request import GenerationRequest
from unisono.middleware.pipeline import Gate


class LiveObservation:
    """Factory of gates that list the running generations of HTTP requests in `outputs`."""

    def __init__(self, outputs: LiveOutputs) -> None:
        self._outputs = outputs

    def __call__(self, request: GenerationRequest) -> Gate | None:
        return LiveGate(request, self._outputs) if request.origin.request_id else None


class LiveGate(Gate):
    """Gate that lists one generation in `outputs` while its stream is iterated."""

    def __init__(self, request: GenerationRequest, outputs: LiveOutputs) -> None:
        self._origin = request.origin
        self._outputs = outputs

    def start(self) -> None:
        caller = self._origin.caller
        key = caller.key if caller is not None else ""
        # The journal is shared with the engine, which only appends to it.
        self._outputs.add(self._origin.request_id, LiveOutput(self._origin.tenant, key, self.report.journal))

    def end(self, error: BaseException | None) -> None:
        self._outputs.end(self._origin.request_id)
