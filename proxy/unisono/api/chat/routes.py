"""Route of the Chat Completions API: `POST /v1/chat/completions`, with and without `/v1`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.answer_report import backend_header, recoveries_header
from unisono.api.body import OFF_LOOP_BYTES, read_model_request, work_size
from unisono.api.chat.answer_schema import ChatCompletion, ChatCompletionChunk
from unisono.api.chat.inbound import ChatGeneration, to_generation_request
from unisono.api.chat.outbound import ChatFrame, ChatStreamChunks, to_completion
from unisono.api.chat.schema import ChatRequest
from unisono.api.disconnects import until_disconnect
from unisono.api.error_responses import REPORTS
from unisono.api.gateway_tools import NOTHING_TO_RUN, RunnableTools
from unisono.api.image_descriptions import ImageDescriber
from unisono.api.json_response import to_whole
from unisono.api.media_loading import MediaSource, media_context, with_file_texts
from unisono.api.media_replacement import MediaRules
from unisono.api.model_rules import NO_RULES, ModelRules
from unisono.api.n_choices import chunk_source, collect_all, start_all
from unisono.api.passthrough_requests import (
    FindWay,
    either_source,
    passed_through,
    start_whole,
    way_for,
    with_passthrough,
)
from unisono.api.request_options import ReasoningField
from unisono.api.route_table import RouteTable, dependency
from unisono.api.sse import KEEP_ALIVE_S, EventStream
from unisono.api.unused_fields import NOTES
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.input_files import FileReader
from unisono.core.passthrough_request import AnswerMode, Api
from unisono.core.trace_context import identify
from unisono.engine.request import GenerationService, GenerationStream
from unisono.errors import InvalidRequest

CHAT = RouteTable("chat")


@dataclass(frozen=True, slots=True)
class ChatModel:
    """Settings of a model for the Chat Completions API.

    `group` is the deployment group that serves the model. `reasoning` selects the answer fields that contain the
    reasoning. If `stream_tool_arguments` is False, a tool call is emitted only when it is complete. `runnable` are the
    tools that the gateway can run.
    """

    group: str
    reasoning: ReasoningField = ReasoningField.BOTH
    stream_tool_arguments: bool = False
    runnable: RunnableTools = NOTHING_TO_RUN
    rules: ModelRules = NO_RULES


# Function that resolves a model name, with aliases and defaults applied. It raises UnknownModel for an unknown name,
# and ModelNotAllowed for a model that the caller may not use.
Resolve = Callable[[str, Caller], ChatModel]


@dataclass(frozen=True, slots=True)
class ChatRoute:
    """Handler of the Chat Completions API.

    `find_way` returns the answer mode of a model; if `find_way` is None, the engine answers every request. `describer`
    describes images, and `files` reads files. `passthrough_files` reads the files in pass-through requests, for hooks.
    `today` returns the date as YYYY-MM-DD, `new_id` an unguessable string, and `clock` the Unix time in seconds.
    """

    service: GenerationService
    resolve: Resolve
    today: Callable[[], str]
    new_id: Callable[[], str]
    clock: Callable[[], float]
    fingerprint: str | None = None
    find_way: FindWay | None = None
    describer: ImageDescriber | None = None
    files: FileReader | None = None
    passthrough_files: FileReader | None = None
    keep_alive_s: float = KEEP_ALIVE_S

    async def complete(self, request: Request) -> Response:
        body = await read_model_request(request, "user", "safety_identifier")
        state: dict[str, Any] = request.scope["state"]
        caller: Caller = state["caller"]
        request_id: str = state["request_id"]
        served = way_for(self.find_way, body, caller)
        way = served.way
        size = work_size(await request.body())
        source = MediaSource(body, caller, ChatRequest, request_id, size, request=request)

        async def pass_through() -> Response:
            readable = await with_file_texts(source, self.passthrough_files)
            group, keep_alive_s = served.group, self.keep_alive_s
            return await passed_through(
                request, self.service, Api.CHAT, body, group, keep_alive_s=keep_alive_s, readable=readable
            )

        if way is AnswerMode.PASSTHROUGH:
            return await pass_through()
        context = await media_context(self.resolve, source, self.describer, self.files)
        parse = partial(self._parse, body, caller, request_id, way, context)
        try:
            chat, model, generation = parse() if size <= OFF_LOOP_BYTES else await asyncio.to_thread(parse)
        except (InvalidRequest, ValidationError):
            if way is not AnswerMode.PASSTHROUGH_THEN_ENGINE:
                raise
            # A request that gpt-oss cannot serve may still be valid for the pass-through backend.
            return await pass_through()
        passes = generation.request.passthrough is not None
        if way is AnswerMode.PASSTHROUGH_THEN_ENGINE and not passes:
            return await pass_through()
        state[NOTES] = generation.notes
        frame = self._frame(chat, model, generation)
        identify(response_id=frame.id)
        streams = await start_all(self.service, generation.requests)
        reports = state[REPORTS] = [stream.report for stream in streams]
        if generation.stream:
            return self._stream(frame, streams, passes=passes)
        if passes:
            streams[0], through = await until_disconnect(request, start_whole(streams[0]))
            if through is not None:
                return to_whole(through, backend_header(reports))
        results = await until_disconnect(request, collect_all(streams))
        headers = {**backend_header(reports), **recoveries_header(reports)}
        return to_whole(to_completion(results, reports, frame), headers)

    async def count(self, body: dict[str, Any], caller: Caller, request_id: str) -> int:
        """Return the number of prompt tokens of a request.

        Raises InvalidRequest or pydantic's ValidationError if the request is invalid.
        """
        _, _, generation = self._parse(body, caller, request_id, AnswerMode.ENGINE, {})
        return await self.service.count(generation.request)

    def _parse(
        self,
        body: Mapping[str, Any],
        caller: Caller,
        request_id: str,
        way: AnswerMode,
        context: Mapping[str, MediaRules],
    ) -> tuple[ChatRequest, ChatModel, ChatGeneration]:
        chat = ChatRequest.model_validate(body, context=context)
        model = self.resolve(chat.model, caller)
        generation = to_generation_request(
            chat,
            model=model.group,
            today=self.today(),
            caller=caller,
            request_id=request_id,
            hold_calls=not model.stream_tool_arguments,
            runnable=model.runnable,
            rules=model.rules,
        )
        # A pass-through answer cannot replace several choices, because each choice is a separate generation. Nor can it
        # replace an answer for which the gateway has run tools, because the results of the calls would be lost.
        may_run_tools = way is AnswerMode.ENGINE_THEN_PASSTHROUGH and generation.request.server_tools is not None
        if way.passes and generation.choices == 1 and not may_run_tools:
            generation = replace(generation, request=with_passthrough(generation.request, Api.CHAT, body, way))
        return chat, model, generation

    def _frame(self, request: ChatRequest, model: ChatModel, generation: ChatGeneration) -> ChatFrame:
        return ChatFrame(
            id=f"chatcmpl-{self.new_id()}",
            created=int(self.clock()),
            model=request.model,
            fingerprint=self.fingerprint,
            reasoning=model.reasoning if generation.shows_reasoning else ReasoningField.NONE,
            toolbox=generation.toolbox,
            notes=generation.notes,
            include_usage=generation.include_usage,
            hold_calls=generation.request.answer.hold_calls,
            logprobs=generation.request.logprobs,
        )

    def _stream(self, frame: ChatFrame, streams: list[GenerationStream], *, passes: bool) -> EventStream:
        reports = [stream.report for stream in streams]
        chunks = ChatStreamChunks(frame, reports)
        source = chunk_source(streams, chunks)
        if passes:
            source = either_source(streams[0], Api.CHAT, source.write)
        return EventStream(
            source,
            headers=lambda: backend_header(reports),
            broken=chunks.broken,
            keep_alive_s=self.keep_alive_s,
        )


@CHAT.add_model_call("/chat/completions", answer=ChatCompletion, body=ChatRequest, events=ChatCompletionChunk)
async def create_chat_completion(request: Request) -> Response:
    """Create a chat completion, as a whole or as a stream of events."""
    return await dependency(request, ChatRoute).complete(request)
