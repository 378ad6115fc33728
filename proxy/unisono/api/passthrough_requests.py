"""Pass-through requests on all API surfaces: bodies and answers are forwarded unchanged.

Only the fields `model`, which selects the backend, and `stream` are validated. Usage is read from the answer while the
answer is forwarded.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.answer_report import backend_header
from unisono.api.body import off_loop
from unisono.api.disconnects import until_disconnect
from unisono.api.error_responses import to_body
from unisono.api.json_response import to_whole
from unisono.api.passthrough_estimates import estimated_input, is_media
from unisono.api.request_options import request_fields
from unisono.api.sse import DONE, EventSource, EventStream, error_event, event
from unisono.api.unused_fields import NOTES, without_effect
from unisono.core.access import Caller
from unisono.core.conversation import (
    AssistantMessage,
    Conversation,
    DeveloperMessage,
    Item,
    Json,
    Preamble,
    ToolResult,
    UserMessage,
)
from unisono.core.events import Event, Passed
from unisono.core.passthrough_request import (
    GATEWAY_FIELDS,
    AnswerMode,
    Api,
    PassthroughRequest,
    ServedName,
    whole_number,
)
from unisono.engine.request import (
    AnswerOptions,
    BatchStream,
    GenerationRequest,
    GenerationService,
    GenerationStream,
    PromptOptions,
    RequestOrigin,
)
from unisono.errors import InvalidRequest, UnisonoError, UnsupportedValue

# Returns the answer mode of the model that a request names. Raises UnknownModel, and ModelNotAllowed if the caller may
# not use the model.
FindWay = Callable[[str, Caller], ServedName]

# Fields of messages and their parts that contain no text.
STRUCTURE: Final = frozenset(
    ("type", "role", "id", "call_id", "tool_call_id", "status", "phase", "name", "detail", "format", "cache_control")
) | {"encrypted_content", "signature"}
# Fields outside the conversation whose texts the model reads.
AROUND: Final = ("instructions", "prompt", "documents")
STATEFUL: Final = ("background", "previous_response_id", "conversation")
# Field of the conversation, name of the surface, and fields of the output limit, by API.
IN_BODY: Final[Mapping[Api, tuple[str, str, tuple[str, ...]]]] = {
    Api.CHAT: ("messages", "chat", ("max_completion_tokens", "max_tokens")),
    Api.RESPONSES: ("input", "responses", ("max_output_tokens",)),
}


def way_for(find: FindWay | None, body: Mapping[str, Json], caller: Caller) -> ServedName:
    """Return the deployment group and the answer mode of the model that a body names.

    Returns the defaults for an unknown or forbidden model, because the engine reports such errors later.
    """
    name = body.get("model")
    if find is not None and (name is None or isinstance(name, str)):
        with suppress(UnisonoError):
            return find(name or "", caller)
    return ServedName()


def check_stateless(body: Mapping[str, Json]) -> None:
    """Raise UnsupportedValue if a request needs stored state or tools of the gateway.

    Pass-through models support neither stored state nor the gateway's tools. The error names the field.
    """
    for field in STATEFUL:
        if body.get(field) not in (None, False):
            raise UnsupportedValue(f"'{field}' is not supported for pass-through models; remove it.", param=field)
    tools = body.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and tool.get("type") == "mcp":
            where = f"tools.{index}"
            raise UnsupportedValue(
                f"'{where}': tools of type 'mcp' are not supported for pass-through models; remove it.", param=where
            )


def to_passthrough(api: Api, body: Mapping[str, Json], way: AnswerMode) -> PassthroughRequest:
    """Convert a body to a pass-through request.

    Raises InvalidRequest if `stream` is not a boolean, or a limit is not a whole number.
    """
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidRequest("Invalid value for 'stream': must be true or false.", param="stream")
    options = body.get("stream_options")
    # The Responses API always reports usage, Chat Completions only on request.
    wants_usage = api is not Api.CHAT or (isinstance(options, dict) and options.get("include_usage") is True)
    choices = max(whole_number(body, "n") or 1, 1)
    # Older versions of vLLM generate `best_of` answers, and return the best `n` of them.
    sequences = max(whole_number(body, "best_of") or 1, choices)
    text_tokens, media_tokens = estimated_input(body)
    # If a body has several output limits, a backend may apply any of them. The largest one is used here.
    bounds = [most for name in IN_BODY[api][2] if (most := whole_number(body, name) or 0) > 0]
    return PassthroughRequest(
        api=api,
        way=way,
        body=body,
        model=str(body.get("model") or ""),
        stream=bool(stream),
        tokens=text_tokens + media_tokens,
        # The estimate tends to be too high. A quarter of the text is subtracted, and media are not included, so that no
        # deployment is excluded without need.
        window_tokens=text_tokens * 3 // 4,
        choices=choices,
        sequences=sequences,
        max_tokens=max(bounds, default=None),
        is_usage_requested=wants_usage,
    )


def to_generation_request(
    passthrough: PassthroughRequest,
    model: str,
    caller: Caller,
    request_id: str,
    readable: Mapping[str, Json] | None = None,
) -> GenerationRequest:
    """Return the generation request of a pass-through request to the deployment group `model`.

    For hooks, the conversation of the result contains the texts of the body. `readable` is the body with texts instead
    of files; None if the body has no files.
    """
    field, surface, _ = IN_BODY[passthrough.api]
    return GenerationRequest(
        model=model,
        conversation=Conversation(Preamble(), tuple(_items(readable or passthrough.body, field))),
        passthrough=passthrough,
        answer=AnswerOptions(
            # Every generated answer may use the whole limit.
            max_tokens=None if passthrough.max_tokens is None else passthrough.max_tokens * passthrough.sequences,
            whole=not passthrough.stream,
        ),
        origin=RequestOrigin(tenant=caller.tenant, caller=caller, request_id=request_id, surface=surface),
        prompt=PromptOptions(fields=request_fields(field)),
    )


async def passed_through(
    request: Request,
    service: GenerationService,
    api: Api,
    body: Mapping[str, Json],
    group: str,
    *,
    keep_alive_s: float,
    readable: Mapping[str, Json] | None = None,
) -> Response:
    """Forward a body to the deployment group `group`, and return the answer.

    Hooks see `readable`, the body with texts instead of files; None if the body has no files. Raises InvalidRequest if
    `stream` is not a boolean. Raises the errors of `service` if it refuses the request.
    """
    ignored = {name: value for name, value in body.items() if name in GATEWAY_FIELDS}
    request.scope["state"][NOTES] = (*without_effect("", ignored),)

    def to_requests() -> tuple[PassthroughRequest, GenerationRequest]:
        passthrough = to_passthrough(api, body, AnswerMode.PASSTHROUGH)
        caller, request_id = request.state.caller, request.state.request_id
        return passthrough, to_generation_request(passthrough, group, caller, request_id, readable)

    passthrough, generation_request = await off_loop(to_requests, len(await request.body()))
    stream = service.start(generation_request)
    if passthrough.stream:
        return passthrough_stream(stream, api, keep_alive_s=keep_alive_s)
    answer = await until_disconnect(request, whole(stream))
    return to_whole(answer, backend_header([stream.report]))


async def whole(stream: GenerationStream) -> Mapping[str, Json]:
    """Return the body of a pass-through answer that is not a stream; empty if there is none."""
    body: Mapping[str, Json] = {}
    async with aclosing(stream):
        async for batch in stream:
            body = next((one.body for one in batch if isinstance(one, Passed)), body)
    return body


def passthrough_stream(stream: GenerationStream, api: Api, *, keep_alive_s: float) -> EventStream:
    return EventStream(
        passthrough_source(stream, api),
        headers=lambda: backend_header([stream.report]),
        broken=BROKEN[api],
        keep_alive_s=keep_alive_s,
    )


def passthrough_source(stream: GenerationStream, api: Api) -> EventSource[list[Event]]:
    return EventSource(stream, partial(to_bytes, api=api), lambda: END[api])


def to_bytes(batch: Sequence[Event], api: Api) -> bytes:
    """Return a batch as server-sent events. In the Responses API, each has an `event:` line."""
    named = api is Api.RESPONSES
    return b"".join(_event(one.body, named=named) for one in batch if isinstance(one, Passed))


def _event(body: Mapping[str, Json], *, named: bool) -> bytes:
    kind = body.get("type") if named else None
    head = f"event: {kind}\n".encode() if isinstance(kind, str) and kind.isprintable() else b""
    return head + event(orjson.dumps(body))


def _broken_response(error: UnisonoError) -> bytes:
    error_object: dict[str, Any] = to_body(error)["error"]
    return _event({**error_object, "type": "error"}, named=True)


# Functions that write the last event of a stream that failed after its head was sent, by API.
BROKEN: Final[Mapping[Api, Callable[[UnisonoError], bytes]]] = {
    Api.CHAT: error_event,
    Api.RESPONSES: _broken_response,
}


# Last bytes of a stream: only Chat Completions streams end with `[DONE]`.
END: Final[Mapping[Api, bytes]] = {Api.CHAT: DONE, Api.RESPONSES: b""}


class StartedStream(BatchStream):
    """Generation stream that yields its first batch, which was already read, and then the rest.

    The first batch shows whether the answer is passed through (see `start_stream`).
    """

    def __init__(self, stream: GenerationStream, first: list[Event] | None, rest: AsyncIterator[list[Event]]) -> None:
        self.report = stream.report
        self._stream = stream
        self._first = first
        self._rest = rest

    async def aclose(self) -> None:
        await super().aclose()
        await self._stream.aclose()

    async def _each(self) -> AsyncGenerator[list[Event]]:
        if self._first is not None:
            yield self._first
            async for batch in self._rest:
                yield batch


async def start_whole(stream: GenerationStream) -> tuple[GenerationStream, Mapping[str, Json] | None]:
    """Wait for the first batch, and read the whole body if the answer is passed through.

    Returns the stream, and the body, or None if the answer is not passed through. The stream is closed after its body
    was read, and after a failure.
    """
    try:
        first, passes = await start_stream(stream)
    except BaseException:
        await stream.aclose()
        raise
    return first, await whole(first) if passes else None


async def start_stream(stream: GenerationStream) -> tuple[StartedStream, bool]:
    """Wait for the first batch; return the stream, and whether the answer is passed through."""
    batches = aiter(stream)
    first = await anext(batches, None)
    return StartedStream(stream, first, batches), bool(first) and any(isinstance(one, Passed) for one in first or ())


def either_source(
    stream: GenerationStream, api: Api, otherwise: Callable[[list[Event]], bytes]
) -> EventSource[list[Event]]:
    """Return the event source of a stream whose first batch shows if it is passed through.

    `otherwise` converts a batch to bytes if the answer is not passed through.
    """
    passes: bool | None = None

    def write(batch: list[Event]) -> bytes:
        nonlocal passes
        if passes is None:
            passes = any(isinstance(one, Passed) for one in batch)
        return to_bytes(batch, api) if passes else otherwise(batch)

    return EventSource(stream, write, lambda: END[api] if passes else b"")


# -- readable content of a body


def _items(body: Mapping[str, Json], field: str) -> list[Item]:
    """Return the texts of a body as conversation items, including texts of calls and reasoning."""
    items: list[Item] = [DeveloperMessage(text) for name in AROUND if (text := readable_text(body.get(name)))]
    value = body.get(field)
    if isinstance(value, str):
        return [*items, UserMessage(value)]
    for element in value if isinstance(value, list) else ():
        if isinstance(element, dict):
            text = readable_text(element)
            match element.get("role") or element.get("type"):
                case "system" | "developer":
                    items.append(DeveloperMessage(text))
                case "assistant" | "reasoning" | "function_call" | "custom_tool_call":
                    items.append(AssistantMessage(text))
                case "tool" | "function" | "function_call_output" | "custom_tool_call_output":
                    called = element.get("tool_call_id") or element.get("call_id")
                    items.append(ToolResult(str(called or ""), "", text))
                case _:
                    items.append(UserMessage(text))
        elif isinstance(element, str):
            items.append(UserMessage(element))
    return items


def readable_text(value: Json) -> str:
    """Return the texts in a JSON value of the body, in order, joined by line breaks."""
    found: list[str] = []
    # A stack, because a body may be nested more deeply than Python recurses.
    stack = [value]
    while stack:
        match stack.pop():
            case str() as text:
                found.append(text)
            case list() as many:
                stack += reversed(many)
            case dict() as one if not is_media(one):
                stack += reversed([inner for name, inner in one.items() if name not in STRUCTURE])
    return "\n".join(found)


def with_passthrough(
    request: GenerationRequest, api: Api, body: Mapping[str, Json], way: AnswerMode
) -> GenerationRequest:
    """Return a generation request that a pass-through deployment may answer too."""
    return replace(request, passthrough=to_passthrough(api, body, way))
