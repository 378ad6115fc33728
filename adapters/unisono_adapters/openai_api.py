"""Pass-through to the OpenAI-compatible API of a server, for models other than gpt-oss.

Requests and responses are forwarded unchanged. The same class serves all kinds of backends that have such an API;
`ServerTraits` describes how the kinds differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import orjson

from unisono.core.conversation import Json
from unisono.core.frozen import dataclass
from unisono.core.generation import Capabilities, Load, OutputForm
from unisono.core.passthrough_request import (
    TEXT_APIS,
    AnswerBytes,
    AnswerPart,
    Api,
    PassthroughJob,
    Upload,
    answers_bytes,
    has_output,
    named,
    whole_number,
)
from unisono.core.ports import BackendOptions, PassthroughFactory
from unisono.core.probe import Check, Finding, Probe, Severity
from unisono.errors import BackendProtocolError, UnsupportedValue
from unisono_adapters._failures import is_error
from unisono_adapters._http import LINGER_S, BackendAnswer, BackendHttp
from unisono_adapters._model_list import model_list

DONE = b"[DONE]"
# Names of the token limit in Chat Completions.
TOKEN_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
# Last events of a Responses API stream.
LAST = frozenset({"response.completed", "response.failed", "response.incomplete", "error"})


@dataclass(frozen=True, slots=True)
class ServerTraits:
    """Properties of a kind of server.

    `model` is set if the server accepts only one fixed model name, and is that name. Otherwise it is empty, and the
    configured name is sent. `apis` are the APIs that the server supports. `polite` is passed to `BackendHttp`.
    """

    model: str = ""
    apis: frozenset[Api] = frozenset(Api)
    polite: bool = False


class OpenAiApi:
    """Pass-through backend.

    It parses responses only to detect errors, and to see whether a stream is complete.
    """

    def __init__(self, options: BackendOptions, server: ServerTraits) -> None:
        """Raise ConfigError for invalid options."""
        self._wire = BackendHttp(options, polite=server.polite)
        self._server = server
        self._model = server.model or options.model
        self._kind = options.kind
        self._defaults = options.defaults

    async def probe(self) -> Probe:
        """Check that the server has a model list, and that the list contains the model."""
        served = await model_list(self._wire)
        can = Capabilities(OutputForm.TEXT, OutputForm.TEXT, stop_visible=False, context=served.get(self._model))
        listed = self._server.model or not served or any(_is_same_model(name, self._model) for name in served)
        # Only a warning, since some servers accept any model name.
        return Probe(can, (Finding(Check.MODEL, ok=bool(listed), severity=Severity.WARNING),))

    def answer(self, job: PassthroughJob) -> AsyncIterator[Sequence[AnswerPart]]:
        if job.api not in self._server.apis:
            raise UnsupportedValue(
                f"'model': the {self._kind} server of this model does not support `/v1/{job.api}`; request a chat "
                "completion, or use a model on another server.",
                param="model",
            )
        if job.upload is not None:
            return self._answer_bytes(job, job.upload)
        has_defaults = self._defaults and job.api in TEXT_APIS
        fields = with_defaults(job.body, self._defaults, job.api) if has_defaults else job.body
        body = orjson.dumps({**fields, "model": named(self._model, job.requested_model)})
        if answers_bytes(job.api, job.body):
            return self._answer_bytes(job, body)
        return self._answer_stream(job, body) if job.stream else self._answer_whole(job, body)

    async def load(self) -> Load | None:
        return None

    async def aclose(self) -> None:
        await self._wire.aclose()

    async def _answer_whole(self, job: PassthroughJob, body: bytes) -> AsyncGenerator[list[Mapping[str, Json]]]:
        answer = await self._wire.post_whole(f"v1/{job.api}", body, job)
        if job.api is Api.RERANK and isinstance(answer, list):
            answer = {"results": [_to_result(one) for one in answer]}
        if not isinstance(answer, dict):
            raise BackendProtocolError("the backend's answer is not a JSON object")
        if is_error(answer) and not answer.get("output") and "status" not in answer:
            raise self._wire.failures.error_object(answer)
        yield [answer]

    async def _answer_bytes(self, job: PassthroughJob, body: bytes | Upload) -> AsyncGenerator[list[AnswerBytes]]:
        path, model = f"v1/{job.api}", named(self._model, job.requested_model)
        answer = await self._wire.post_bytes(path, body, job, model)
        try:
            while data := await answer.read():
                yield [AnswerBytes(data, answer.media_type)]
            yield [AnswerBytes(b"", answer.media_type, is_last=True)]
        finally:
            answer.close()

    async def _answer_stream(self, job: PassthroughJob, body: bytes) -> AsyncGenerator[list[Mapping[str, Json]]]:
        answer = await self._wire.post(f"v1/{job.api}", body, job)
        choices, finished, has_usage, has_begun = whole_number(job.body, "n") or 1, set[int](), False, False
        try:
            while (events := await _next_events(answer, has_usage=has_usage)) is not None:
                objects: list[Mapping[str, Json]] = []
                ended = False
                for data in events:
                    if ended := data == DONE:
                        break
                    one = self._object(data, job.api, has_output=has_begun)
                    objects.append(one)
                    has_begun = has_begun or has_output(job.api, one)
                    if ended := job.api is Api.RESPONSES and one.get("type") in LAST:
                        break
                    finished.update(_finished_choices(one))
                    # llama.cpp sends the usage of each choice after the choice.
                    is_usage = one.get("choices") == [] and bool(one.get("usage"))
                    has_usage = has_usage or (is_usage and len(finished) >= choices)
                if has_begun:
                    answer.delivered()
                if objects:
                    yield objects
                if ended:
                    await answer.settle()
                    return
            if job.api is Api.CHAT and len(finished) < choices:
                raise BackendProtocolError("the backend ended its answer before it was complete")
        finally:
            answer.close()

    def _object(self, data: bytes, api: Api, *, has_output: bool) -> dict[str, Any]:
        try:
            one = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise BackendProtocolError("the backend sent an event that is not JSON") from None
        if not isinstance(one, dict):
            raise BackendProtocolError("the backend sent an event that is not a JSON object")
        if is_error(one) and (api is Api.CHAT or "type" not in one):
            raise self._wire.failures.error_object(one, has_output=has_output)
        return one


async def _next_events(answer: BackendAnswer, *, has_usage: bool) -> list[bytes] | None:
    """Return the next events of a stream, or None at its end.

    After the usage (`has_usage`), usually only `[DONE]` follows. A server may delay `[DONE]`, so the stream then also
    ends if nothing arrives for `LINGER_S` seconds.
    """
    if not has_usage:
        return await answer.read()
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            return await answer.read()
    return None


def _finished_choices(chunk: Mapping[str, Any]) -> Iterator[int]:
    """Yield the indices of the choices that a chunk ends."""
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("finish_reason") and isinstance(choice.get("index", 0), int):
            yield choice.get("index", 0)


def with_defaults(body: Mapping[str, Json], defaults: Mapping[str, Json], api: Api) -> dict[str, Json]:
    """Return the body with `defaults` for the fields that the body does not contain.

    `defaults` are named as in Chat Completions. For the Responses API they are translated.
    """
    given = {name: value for name, value in body.items() if value is not None}
    limit = next((defaults[name] for name in TOKEN_LIMITS if name in defaults), None)
    fields = {name: value for name, value in defaults.items() if name not in TOKEN_LIMITS}
    if api is Api.RESPONSES:
        if limit is not None:
            fields["max_output_tokens"] = limit
        if (effort := fields.pop("reasoning_effort", None)) is not None:
            fields["reasoning"] = {"effort": effort}
        if isinstance(form := fields.pop("response_format", None), Mapping):
            inner = form.get("json_schema")
            fields["text"] = {"format": {**(inner if isinstance(inner, Mapping) else {}), "type": form.get("type")}}
    elif limit is not None and TOKEN_LIMITS.isdisjoint(given):
        fields["max_tokens"] = limit
    for name in ("reasoning", "text"):
        # Merge these objects, since the request may set other fields of the object than the defaults do.
        if isinstance(default := fields.get(name), Mapping) and isinstance(own := given.get(name), Mapping):
            given[name] = {**default, **own}
    return {**body, **fields, **given}


def _to_result(one: Any) -> Any:
    """Return a rerank result with `relevance_score`, which SGLang calls `score`.

    `relevance_score` is Cohere's name.
    """
    return {**one, "relevance_score": one["score"]} if isinstance(one, dict) and "score" in one else one


def _is_same_model(listed: str, model: str) -> bool:
    """Return whether a listed model is `model`.

    Ollama lists its models with a tag, such as `:latest`. A `model` with a wildcard matches every name.
    """
    return "*" in model or listed in (model, f"{model}:latest")


def _factory(server: ServerTraits) -> PassthroughFactory:
    return partial(OpenAiApi, server=server)


vllm = _factory(ServerTraits())
sglang = _factory(ServerTraits())
llamacpp = _factory(ServerTraits())
ollama = _factory(ServerTraits())
mlx_server = _factory(ServerTraits(model="default_model", apis=frozenset({Api.CHAT}), polite=True))
