"""Pass-through generation: acquires slots, sends the request, and relays the answer.

If an attempt fails before any output was emitted, the next deployment is tried. After output, the answer ends with the
error, since no other deployment can continue it. Nothing is emitted before the first token. The last batch is buffered
until the backend has reported the usage.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from time import monotonic

from unisono.core.answer_times import Pace
from unisono.core.conversation import Json, Phase
from unisono.core.events import Closed, Event, Finished, Text
from unisono.core.observer import StepDone
from unisono.core.passthrough_request import (
    GATEWAY_FIELDS,
    AnswerPart,
    Api,
    PassthroughJob,
    PassthroughRequest,
    has_output,
    starred,
)
from unisono.core.route_protocol import DeploymentPool, RouteRequirements, Slot
from unisono.engine.attempt import SlotSession
from unisono.engine.failover_policy import Progress
from unisono.engine.request import BatchStream, GenerationReport, GenerationRequest
from unisono.errors import (
    BackendError,
    BackendProtocolError,
    BackendRejected,
    BackendTimeout,
    ContextTooLong,
    UnisonoError,
)
from unisono.passthrough.text_relays import Relay, relay_for

# Body fields that limit the number of tokens of the answer; the first field that is present is used. Other APIs have no
# such field.
MAX_TOKENS_FIELDS: Mapping[Api, tuple[str, ...]] = {
    Api.CHAT: ("max_completion_tokens", "max_tokens"),
    Api.RESPONSES: ("max_output_tokens",),
}


class PassthroughGeneration(BatchStream):
    """A pass-through answer in progress."""

    def __init__(self, pool: DeploymentPool, request: GenerationRequest, passthrough: PassthroughRequest) -> None:
        self.report = GenerationReport()
        self._request = request
        self._passthrough = passthrough
        self._pool = pool

    async def _each(self) -> AsyncGenerator[list[Event]]:
        places = SlotSession(self._pool, self._request, self.report, is_passthrough=True)
        demand = RouteRequirements(self._passthrough.window_tokens, max_tokens=self._request.answer.max_tokens)
        try:
            while True:
                has_started = False
                try:
                    place = await places.acquire(demand)
                    async with aclosing(self._answer(places, place)) as batches:
                        async for batch in batches:
                            has_started = True
                            yield batch
                except (BackendError, ContextTooLong) as error:
                    # No other backend can continue in the middle of an answer that was passed through.
                    await places.recover(error, Progress.SEEN if has_started else Progress.NOTHING, resumable=False)
                else:
                    places.pause()
                    return
        finally:
            places.release()

    async def _answer(self, places: SlotSession, place: Slot) -> AsyncGenerator[list[Event]]:
        """Yield the whole answer of one deployment.

        Raises the error of an attempt that fails before the answer is complete.
        """
        job = self._job(places, place)
        relaying = relay_for(self._passthrough)
        telling = PassthroughTelemetry(self.report, place.deployment.name, relaying)
        buffered: list[Event] = []
        has_begun = False
        coming = place.deployment.passing.answer(job)
        try:
            async with place.first_token_limit() if job.stream else nullcontext():
                async for bodies in coming if job.stream else _read_unless_probe_fails(coming, place):
                    buffered += relaying.feed(bodies)
                    # Output before the first token is buffered, so that another deployment may still answer.
                    if not has_begun and any(has_output(job.api, body) for body in bodies):
                        has_begun = True
                        place.record_first_token()
                    if has_begun:
                        telling.record_output(monotonic())
                    if buffered and has_begun and not relaying.ending:
                        yield buffered
                        buffered = []
            if not relaying.is_complete:
                raise BackendProtocolError("the backend ended its answer before it was complete")
        except UnisonoError as error:
            if isinstance(error, BackendRejected) and error.backend_field is not None:
                error.param = self._client_field(error.backend_field)
            # A failure after the end of the answer is ignored.
            if not relaying.ending:
                telling.failure = error.code
                raise
        finally:
            telling.finish_attempt()
            if job.stream:
                telling.record_times(place)
            place.record_usage(relaying.usage.prompt_tokens + relaying.usage.completion_tokens)
            if isinstance(coming, AsyncGenerator):
                await coming.aclose()
        closed = Closed(Text(0, Phase.FINAL), "".join(relaying.text))
        yield [*buffered, closed, Finished(relaying.reason, relaying.usage)]

    def _client_field(self, path: str) -> str | None:
        """Return the field path in a backend's error if the client's body has this field."""
        name = path.replace("[", ".").partition(".")[0]
        return path if name in self._passthrough.body else None

    def _job(self, places: SlotSession, place: Slot) -> PassthroughJob:
        request, passthrough = self._request, self._passthrough
        return PassthroughJob(
            passthrough.api,
            sent_body(passthrough, request.answer.max_tokens),
            passthrough.stream,
            starred(request.model, passthrough.model),
            places.start_attempt(place),
            request.origin.request_id,
            places.trace_span(0),
            passthrough.upload,
        )


async def _read_unless_probe_fails(
    coming: AsyncIterator[Sequence[AnswerPart]], place: Slot
) -> AsyncGenerator[Sequence[AnswerPart]]:
    """Yield the bodies of an answer that is not streamed.

    The answer may take until the total time limit. Raises BackendTimeout earlier if the deployment fails a probe and
    another deployment is available.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            async with asyncio.timeout(None) as limit:
                place.on_failed_probe(lambda left_s: limit.reschedule(loop.time() + left_s))
                bodies = await anext(coming, None)
        except TimeoutError as error:
            raise BackendTimeout("the backend sent no response, and its health probe failed") from error
        finally:
            place.on_failed_probe(None)
        if bodies is None:
            return
        yield bodies


class PassthroughTelemetry:
    """Telemetry of one attempt on `deployment`, added to the report when the attempt ends."""

    def __init__(self, report: GenerationReport, deployment: str, relaying: Relay) -> None:
        self._report = report
        self._deployment = deployment
        self._relay = relaying
        self._started_s = report.now_s()
        self._pace = Pace()
        self.failure = ""

    def record_output(self, now: float) -> None:
        """Record new output. Until the usage is known, each piece of text counts as one token."""
        if new := self._relay.pieces - self._pace.tokens:
            self._pace.record(new, now)

    def record_times(self, place: Slot) -> None:
        """Report the times of a streamed answer to the deployment, which learns from them."""
        pace, usage = self._pace, self._relay.usage
        if pace.first is None or self.failure:
            return
        read_tokens = usage.prompt_tokens - usage.cached_tokens if usage.cached_tokens else None
        first_token_s = pace.first - self._report.began - self._started_s
        place.record_attempt(first_token_s, pace.largest_gap_s or None, read_tokens)

    def finish_attempt(self) -> None:
        report, pace, relaying = self._report, self._pace, self._relay
        usage = relaying.usage
        report.facts.reasoning_tokens += usage.reasoning_tokens
        report.facts.steps.append(
            StepDone(
                step=0,
                deployment=self._deployment,
                started_s=self._started_s,
                first_token_s=None if pace.first is None else pace.first - report.began,
                ended_s=report.now_s(),
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                generated=usage.completion_tokens,
                finish=relaying.reason.value if relaying.is_complete else "",
                failure=self.failure,
                gaps=pace.gaps,
                gaps_s=pace.gaps_s,
                units=relaying.units,
            )
        )


def sent_body(passthrough: PassthroughRequest, max_tokens: int | None) -> Mapping[str, Json]:
    """Return the client's body with a token limit and a request to report the usage.

    The fields that address the gateway are left out. `max_tokens` is the maximum number of tokens for all generated
    answers together; None means no limit. If the client's limit is higher, it is lowered to this number.
    """
    body = {name: value for name, value in passthrough.body.items() if name not in GATEWAY_FIELDS}
    if passthrough.stream and passthrough.api is Api.CHAT and not passthrough.is_usage_requested:
        options = body.get("stream_options")
        body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    names = MAX_TOKENS_FIELDS.get(passthrough.api)
    if names is None:
        return body
    most = None if max_tokens is None else max(max_tokens // passthrough.sequences, 1)
    if most is not None and (passthrough.max_tokens is None or most < passthrough.max_tokens):
        present = [name for name in names if body.get(name) is not None] or [names[-1]]
        body |= dict.fromkeys(present, most)
    return body
