"""Route of the Completions API: `POST /v1/completions`, with and without `/v1`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from unisono.api.answer_report import backend_header
from unisono.api.body import off_loop, read_model_request
from unisono.api.caller_options import with_options
from unisono.api.completions.inbound import CompletionGenerations, Cut, Spell, check_allowed, to_generation_requests
from unisono.api.completions.outbound import (
    Completion,
    CompletionChunk,
    CompletionFrame,
    CompletionStreamChunks,
    to_completion,
)
from unisono.api.completions.schema import CompletionRequest
from unisono.api.disconnects import until_disconnect
from unisono.api.end_user_fields import identify_end_user
from unisono.api.json_response import to_whole
from unisono.api.model_rules import NO_RULES, ModelRules
from unisono.api.n_choices import chunk_source, collect_all, start_all
from unisono.api.route_table import RouteTable, dependency
from unisono.api.sse import KEEP_ALIVE_S, EventStream
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.trace_context import identify
from unisono.engine.request import GenerationService, RawPrompt

COMPLETIONS = RouteTable("completions")
# Maximum number of prompt tokens with log probabilities in an answer that is serialized on the event loop. A larger
# answer is serialized in a thread.
MAX_SCORED_ON_LOOP: Final = 2_000
# Estimated size in bytes of a token id in a JSON body.
BYTES_PER_ID: Final = 7


@dataclass(frozen=True, slots=True)
class RawModel:
    """Settings of a model for the Completions API: its deployment group and its rules."""

    group: str
    rules: ModelRules = NO_RULES


# Function that resolves a model name, with aliases and defaults applied. It raises UnknownModel for an unknown name,
# and ModelNotAllowed for a model that the caller may not use.
Resolve = Callable[[str, Caller], RawModel]


@dataclass(frozen=True, slots=True)
class CompletionRoute:
    """Handler of the Completions API.

    `switched_on` is True if the operator has enabled raw completions. `permitted_name` takes the name of a deployment
    group, and returns a name or alias by which the caller may use the group. `spell` converts token ids to text, and
    `cut` converts text to token ids. `new_id` returns an unguessable string, and `clock` the Unix time in seconds.
    """

    service: GenerationService
    resolve: Resolve
    permitted_name: Callable[[str, Caller], str]
    switched_on: bool
    spell: Spell
    cut: Cut
    new_id: Callable[[], str]
    clock: Callable[[], float]
    fingerprint: str | None = None
    keep_alive_s: float = KEEP_ALIVE_S

    async def complete(self, request: Request) -> Response:
        check_allowed(request.state.caller, switched_on=self.switched_on)
        body = await read_model_request(request, "user", "safety_identifier")
        generations, frame = await self._read(request, body, len(await request.body()))
        streams = await start_all(self.service, generations.requests)
        reports = [stream.report for stream in streams]
        if generations.stream:
            chunks = CompletionStreamChunks(frame, reports)
            return EventStream(
                chunk_source(streams, chunks),
                headers=lambda: backend_header(reports),
                broken=chunks.broken,
                keep_alive_s=self.keep_alive_s,
            )
        results = await until_disconnect(request, collect_all(streams))
        scored = sum(len(report.facts.logprobs.prompt) for report in reports if report.facts.logprobs is not None)
        return await off_loop(
            lambda: to_whole(to_completion(results, reports, frame), backend_header(reports)),
            scored,
            MAX_SCORED_ON_LOOP,
        )

    async def complete_own(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """Complete a prompt that the gateway itself has written, and return the answer.

        The caller needs no permission for raw prompts, and hooks cannot change the prompt. `body` is a completion
        request with one prompt of token ids, without `stream`. The `model` in the body is the name of a deployment
        group, even if the caller may use the group only by an alias.
        """
        body = {**body, "model": self.permitted_name(body["model"], request.state.caller)}
        await identify_end_user(request, body, "user")
        size = BYTES_PER_ID * len(body["prompt"])
        generations, frame = await self._read(request, with_options(request, body), size)
        requests = [
            replace(each, raw=replace(each.raw, is_fixed=True)) for each in generations.requests if each.raw is not None
        ]
        streams = await start_all(self.service, requests)
        results = await until_disconnect(request, collect_all(streams))
        return to_completion(results, [stream.report for stream in streams], frame)

    async def _read(
        self, request: Request, body: Mapping[str, Any], size: int
    ) -> tuple[CompletionGenerations, CompletionFrame]:
        # The caller in the request's state already has the options of the request, which were read from the body.
        parse = partial(self._parse, body, request.state.caller, request.state.request_id)
        completion, generations = await off_loop(parse, size)
        request.state.notes = generations.notes
        frame = self._frame(completion, generations)
        identify(response_id=frame.id)
        return generations, frame

    def _parse(
        self, body: Mapping[str, Any], caller: Caller, request_id: str
    ) -> tuple[CompletionRequest, CompletionGenerations]:
        completion = CompletionRequest.model_validate(body)
        model = self.resolve(completion.model, caller)
        return completion, to_generation_requests(
            completion,
            caller=caller,
            spell=self.spell,
            cut=self.cut,
            rules=model.rules,
            model=model.group,
            request_id=request_id,
        )

    def _frame(self, request: CompletionRequest, generations: CompletionGenerations) -> CompletionFrame:
        return CompletionFrame(
            id=f"cmpl-{self.new_id()}",
            created=int(self.clock()),
            model=request.model,
            prompts=[generation_request.raw or RawPrompt() for generation_request in generations.requests],
            texts=generations.texts,
            per_prompt=generations.per_prompt,
            has_token_ids=generations.has_token_ids,
            fingerprint=self.fingerprint,
            notes=generations.notes,
            include_usage=generations.include_usage,
            logprobs=request.logprobs,
        )


@COMPLETIONS.add_model_call("/completions", answer=Completion, body=CompletionRequest, events=CompletionChunk)
async def create_completion(request: Request) -> Response:
    """Complete a raw prompt, as a whole or as a stream of events; the operator must enable this."""
    return await dependency(request, CompletionRoute).complete(request)
