"""LiteLLM custom provider that runs models on the Harmony engine in LiteLLM's own process.

    litellm.custom_provider_map = [{"provider": "unisono", "custom_handler": litellm_provider.handler}]

A model is `unisono/<backend kind>/<the backend's own name for it>`, with the server's `api_base`. Requests and answers
use the same conversion as `/v1/chat/completions`, without HTTP. Only this module imports litellm.
"""

from __future__ import annotations

import asyncio
import atexit
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Final, TypeVar

import litellm
import orjson
from litellm.llms.custom_llm import CustomLLM
from litellm.types.utils import ModelResponse, ModelResponseStream

from unisono.api.body import to_object
from unisono.api.chat.inbound import ChatGeneration, to_generation_request
from unisono.api.chat.outbound import ChatFrame, ChatStreamChunks, to_completion
from unisono.api.chat.schema import ChatRequest
from unisono.api.error_responses import failure_of
from unisono.api.n_choices import chunk_source, collect_all, start_all
from unisono.api.request_options import ReasoningField
from unisono.bootstrap.api_parts import current_date
from unisono.config import GatewaySettings
from unisono.core.access import LOCAL_TENANT, Caller
from unisono.errors import ConfigError, ContextTooLong, InvalidRequest
from unisono.integrations.engines import Site, Where

T = TypeVar("T")

PROVIDER: Final = "unisono"

# Parameters that are not copied into the body: LiteLLM uses them itself, or they are set separately.
LITELLMS_OWN: Final = frozenset({"max_retries", "stream", "stream_options", "extra_body", "model", "messages"})

DATA: Final = b"data: "
ENDED: Final = b"[DONE]"

# Prefix of field names in errors of the configuration. It is removed, because users of LiteLLM have no such file.
OURS: Final = "model_list[0].litellm_params."

# LiteLLM's exceptions by status; any other status is an `InternalServerError`.
ERRORS: Final[Mapping[int, str]] = {
    400: "BadRequestError",
    404: "NotFoundError",
    409: "BadRequestError",
    413: "BadRequestError",
    429: "RateLimitError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "Timeout",
}


@dataclass(frozen=True, slots=True)
class LitellmCall:
    """One request as received from LiteLLM. `timeout_s` limits the whole answer; None: no limit."""

    where: Where
    body: bytes
    timeout_s: float | None

    @property
    def model(self) -> str:
        return self.where.model


class UnisonoProvider(CustomLLM):  # type: ignore[misc]  # litellm is absent during type checks
    """LiteLLM's four completion methods. They raise LiteLLM's exceptions."""

    def __init__(self, site: Site | None = None) -> None:
        super().__init__()
        self._site = site or Site()

    def completion(self, *args: Any, **asked: Any) -> ModelResponse:
        call = to_call(*args, **asked, stream=False)
        return to_response(self._run_blocking(call, self._complete(call)))

    async def acompletion(self, *args: Any, **asked: Any) -> ModelResponse:
        call = to_call(*args, **asked, stream=False)
        return to_response(await self._run(call, self._complete(call)))

    def streaming(self, *args: Any, **asked: Any) -> Iterator[ModelResponseStream]:
        call = to_call(*args, **asked, stream=True)
        stream = Stream(self._site, call)
        try:
            while (chunks := self._run_blocking(call, stream.following())) is not None:
                yield from map(to_chunk, chunks)
        finally:
            self._run_blocking(call, stream.aclose())

    async def astreaming(self, *args: Any, **asked: Any) -> AsyncIterator[ModelResponseStream]:
        call = to_call(*args, **asked, stream=True)
        stream = Stream(self._site, call)
        try:
            while (chunks := await self._run(call, stream.following())) is not None:
                for chunk in chunks:
                    yield to_chunk(chunk)
        finally:
            await self._run(call, stream.aclose())

    def close(self) -> None:
        """Close every engine. An engine is rebuilt at its next use."""
        self._site.close()

    # -- on the engines' loop

    async def _complete(self, call: LitellmCall) -> dict[str, Any]:
        generation, frame = parse_call(call)
        async with asyncio.timeout(call.timeout_s), self._site.engines.at(call.where) as service:
            streams = await start_all(service, generation.requests)
            return to_completion(await collect_all(streams), [stream.report for stream in streams], frame)

    # -- on the caller's side

    def _run_blocking(self, call: LitellmCall, work: Coroutine[Any, Any, T]) -> T:
        running = self._site.loop.run(work)
        try:
            return running.result()
        except Exception as error:
            raise to_litellm(error, call.model) from error
        finally:
            running.cancel()

    async def _run(self, call: LitellmCall, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wrap_future(self._site.loop.run(work))
        except Exception as error:
            raise to_litellm(error, call.model) from error


class Stream:
    """Streamed answer on the engines' loop, read in batches from a different thread or loop.

    A reader that stops reading pauses the stream.
    """

    def __init__(self, site: Site, call: LitellmCall) -> None:
        self._site = site
        self._call = call
        self._next_lock = asyncio.Lock()
        self._batches = self._generated()
        self._deadline: float | None = None

    async def following(self) -> list[dict[str, Any]] | None:
        """Return the next chunks, or None at the end."""
        now = asyncio.get_running_loop().time
        if self._deadline is None and self._call.timeout_s is not None:
            self._deadline = now() + self._call.timeout_s
        async with self._next_lock, asyncio.timeout_at(self._deadline):
            return await anext(self._batches, None)

    async def aclose(self) -> None:
        """Close the stream, which frees the backend.

        Waits until a cancelled reader has released the stream.
        """
        async with self._next_lock:
            await self._batches.aclose()

    async def _generated(self) -> AsyncGenerator[list[dict[str, Any]]]:
        generation, frame = parse_call(self._call)
        async with self._site.engines.at(self._call.where) as service:
            streams = await start_all(service, generation.requests)
            source = chunk_source(streams, ChatStreamChunks(frame, [stream.report for stream in streams]))
            ends: list[dict[str, Any]] = []
            async with aclosing(source.batches):
                async for batch in source.batches:
                    chunks = to_chunks(source.write(batch))
                    ends += (chunk for chunk in chunks if is_end(chunk))
                    if going := [chunk for chunk in chunks if not is_end(chunk)]:
                        yield going
            yield to_final_chunks(ends)


def to_call(
    model: str,
    messages: Sequence[Any],
    api_base: str | None = None,
    *args: Any,
    api_key: str | None = None,
    optional_params: Mapping[str, Any] | None = None,
    timeout: Any = None,
    stream: bool,
    **asked: Any,
) -> LitellmCall:
    """Convert LiteLLM's arguments. Raises BadRequestError if they are not JSON values."""
    del args, asked
    params = dict(optional_params or {})
    body = {name: value for name, value in params.items() if name not in LITELLMS_OWN}
    body |= params.get("extra_body") or {}
    # LiteLLM decides whether its client receives the usage.
    body |= {"model": model, "messages": messages, "stream": stream, "stream_options": {"include_usage": True}}
    try:
        raw = orjson.dumps(body, default=_to_plain, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError as error:
        raise to_litellm(InvalidRequest(f"The request cannot be converted to JSON: {error}"), model) from error
    # httpx has four timeouts; the read timeout limits the answer.
    seconds = getattr(timeout, "read", timeout)
    return LitellmCall(
        Where(model, api_base or None, api_key or None), raw, None if seconds is None else float(seconds)
    )


def _to_plain(value: Any) -> Any:
    """Convert LiteLLM's message objects, such as an answer that a user sends back unchanged."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)
    raise TypeError(type(value).__name__)


def parse_call(call: LitellmCall) -> tuple[ChatGeneration, ChatFrame]:
    """Parse a call as a request of Chat Completions.

    Raises the same exceptions as `/v1/chat/completions` does for an invalid request.
    """
    request = ChatRequest.model_validate(to_object(call.body))
    id = token_hex(16)
    generation = to_generation_request(
        request,
        model=call.model,
        today=current_date(GatewaySettings()),
        caller=Caller(LOCAL_TENANT),
        request_id=f"req_{id}",
    )
    frame = ChatFrame(
        id=f"chatcmpl-{id}",
        created=int(time.time()),
        model=call.model,
        reasoning=ReasoningField.REASONING_CONTENT,
        toolbox=generation.toolbox,
        notes=generation.notes,
        include_usage=generation.include_usage,
    )
    return generation, frame


# -- answers


def to_response(completion: Mapping[str, Any]) -> ModelResponse:
    """Build LiteLLM's response.

    The object `unisono` is moved into the message, because LiteLLM's response has no other place for it.
    """
    choices = completion["choices"]
    fields = {"provider_specific_fields": {"unisono": completion["unisono"]}}
    first = {**choices[0], "message": {**choices[0]["message"], **fields}}
    response = {name: value for name, value in completion.items() if name != "unisono"}
    return ModelResponse(**{**response, "choices": [first, *choices[1:]]})


def to_chunk(chunk: Mapping[str, Any]) -> ModelResponseStream:
    return ModelResponseStream(**chunk)


def to_chunks(data: bytes) -> list[dict[str, Any]]:
    """Parse several server-sent events and return their JSON data."""
    lines = (line.removeprefix(DATA) for line in data.split(b"\n") if line.startswith(DATA))
    return [orjson.loads(line) for line in lines if line != ENDED]


def is_end(chunk: Mapping[str, Any]) -> bool:
    """Return True if the chunk contains a finish reason or the total usage."""
    return not chunk["choices"] or any(choice["finish_reason"] is not None for choice in chunk["choices"])


def to_final_chunks(ends: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the final chunks for LiteLLM.

    LiteLLM ignores everything after the first finish reason, even the usage.
    """
    *finishing, last = ends
    choices = sorted((choice for end in finishing for choice in end["choices"]), key=lambda choice: choice["index"])
    going = {"index": 0, "delta": {}, "finish_reason": None}
    used = {name: value for name, value in last.items() if name != "unisono"}
    return [
        {**used, "choices": [going], "provider_specific_fields": {"unisono": last["unisono"]}},
        {**finishing[-1], "choices": choices, "usage": None},
    ]


# -- failures


def to_litellm(error: Exception, model: str) -> Exception:
    """Map an error to LiteLLM's exception."""
    if isinstance(error, TimeoutError):
        return _to_exception("Timeout", "The answer was not complete within the request's `timeout`; raise it.", model)
    if isinstance(error, ConfigError):
        return _to_exception("BadRequestError", str(error).removeprefix(OURS), model)
    failure = failure_of(error)
    if isinstance(failure, ContextTooLong):
        return _to_exception("ContextWindowExceededError", failure.message, model)
    return _to_exception(
        ERRORS.get(failure.status, "InternalServerError"), f"{failure.message} ({failure.code})", model
    )


def _to_exception(name: str, message: str, model: str) -> Exception:
    error: Exception = getattr(litellm, name)(message=message, model=model, llm_provider=PROVIDER)
    return error


# Handler for `litellm.custom_provider_map`. LiteLLM's proxy refers to it by its import path in
# `litellm_settings.custom_provider_map`.
handler: Final = UnisonoProvider()

atexit.register(handler.close)
