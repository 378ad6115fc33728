"""Other providers, through the `litellm` package; the only module that calls it.

Loading the package takes seconds and much memory, so the first request that needs it loads it in a thread. It is used
only as a translator. Its retries, caches, callbacks and logs are off, and it does not fetch a price list. Only OpenAI's
own fields in a client's body become arguments of litellm. All other fields are added to the body that litellm sends. If
such fields were arguments, they could change the address to which litellm sends the provider's key.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import re
import warnings
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from pydantic_core import to_jsonable_python

from unisono.core.error_texts import incomplete, no_first_token, read_counts, silent
from unisono.core.generation import Capabilities, Load, OutputForm, Timeouts
from unisono.core.json_syntax import all_well_formed
from unisono.core.passthrough_request import BYTE_APIS, TEXT_APIS, AnswerPart, Api, PassthroughJob, has_output, named
from unisono.core.ports import BackendOptions
from unisono.core.probe import Probe, is_permanent
from unisono.core.secrecy import secret_spellings
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendProtocolError,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    ContextTooLong,
    InvalidRequest,
    UnsupportedValue,
)
from unisono.passthrough.provider_calls import FIELDS, FUNCTIONS, form_body, is_streamed, to_bytes

log = logging.getLogger("unisono.passthrough")

# Maximum characters of a provider's error message in the error that the client receives.
MAX_DETAIL_LENGTH: Final = 300
# Names of exception classes that litellm puts in front of a message.
_PREFIX: Final = re.compile(r"^(?:(?:litellm\.)?\w+Error: )*(?:\w+Exception - )?")

# Errors for the status codes that litellm assigns to failures; every other code is a BackendError.
STATUSES: Final[Mapping[int, tuple[type[BackendError], str]]] = {
    400: (BackendRejected, "the provider rejected the request"),
    401: (BackendUnavailable, "the provider rejected the gateway's credentials; the operator must check them"),
    403: (BackendUnavailable, "the provider rejected the gateway's credentials; the operator must check them"),
    404: (BackendError, "the provider does not know the requested model"),
    408: (BackendTimeout, "the provider reports that it timed out (HTTP 408); try again later"),
    413: (BackendRejected, "the request is too large for the provider; shorten it"),
    422: (BackendRejected, "the provider rejected the request"),
    429: (BackendOverloaded, "the provider's rate limit is reached; try again later"),
    503: (BackendOverloaded, "the provider is overloaded; try again later"),
    504: (BackendTimeout, "the provider reports that it timed out (HTTP 504); try again later"),
}

# Name of litellm's error for a prompt that exceeds the context window.
TOO_LONG: Final = "ContextWindowExceededError"
# Attributes of a litellm stream that contain the provider's finish reason.
REASONS: Final = ("received_finish_reason", "intermittent_finish_reason")
# Name that litellm gives to all unknown errors, including its own failures.
UNKNOWN_ERROR: Final = "APIConnectionError"
# Classes of Python, httpx and aiohttp that include every connection error.
CONNECTION: Final = frozenset({"OSError", "TransportError", "ClientConnectionError"})

# Minimum characters of a setting that is hidden from clients. Shorter values may be ordinary words.
MIN_REDACTED_LENGTH: Final = 8
# Libraries used by litellm that log request bodies or addresses.
QUIET: Final = ("openai", "anthropic", "httpx", "httpcore", "boto3", "botocore", "urllib3")


class LitellmProvider:
    """One model of one provider.

    The provider is treated as healthy until a request fails, since probes cost money. `params` are the settings of the
    model's entry except the address. With `drop_params`, fields that the provider does not support are dropped instead
    of rejected. `environment` contains the environment variables for providers.
    """

    def __init__(
        self,
        options: BackendOptions,
        *,
        params: Mapping[str, Any] | None = None,
        drop_params: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._model = options.model
        self._environment = environment or {}
        self._params: dict[str, Any] = {
            **(params or {}),
            **({"api_base": options.api_base} if options.api_base else {}),
            **({"api_key": options.api_key} if options.api_key else {}),
            **({"drop_params": True} if drop_params else {}),
        }
        texts = {*_texts(self._params), *self._environment.values()}
        hidden = {text for text in texts if len(text) >= MIN_REDACTED_LENGTH}
        # Longest first, since one value may be a prefix of another.
        self._hidden = sorted({*hidden, *secret_spellings(hidden)}, key=len, reverse=True)

    async def probe(self) -> Probe:
        return Probe(Capabilities(OutputForm.TEXT, OutputForm.TEXT, stop_visible=False))

    async def answer(self, job: PassthroughJob) -> AsyncGenerator[Sequence[AnswerPart]]:
        if job.api not in FUNCTIONS:
            raise UnsupportedValue(
                f"'model': the provider of this model has no `/v1/{job.api}`; use another model.", param="model"
            )
        if is_streamed(job.body.get("stream")) and job.api not in TEXT_APIS:
            raise UnsupportedValue(
                "'stream' is not supported by the provider of this model; remove it.", param="stream"
            )
        litellm = await _LOADED.get(self._environment)
        call = getattr(litellm, FUNCTIONS[job.api])
        times = job.timeouts
        first_s = min(times.first_token_s, times.total_s) if job.stream else times.total_s
        if job.upload is not None:
            job = replace(job, body=await form_body(job.upload))
        arguments = self._call_arguments(job, litellm)
        # Three limits apply: to the first output, to each pause between events, and to the whole answer.
        now = asyncio.get_running_loop().time
        ends_at = now() + times.total_s
        first_at = now() + first_s
        has_started = has_received_output = False
        try:
            async with asyncio.timeout_at(first_at):
                answer = await call(**arguments)
            has_started = True
            if not job.stream:
                is_bytes = job.api in BYTE_APIS
                yield [
                    await to_bytes(answer, job.api, job.body.get("response_format")) if is_bytes else _to_json(answer)
                ]
                return
            async with aclosing(_Closing(answer)) as events:
                while True:
                    due_at = now() + times.silence_s if has_received_output else first_at
                    async with asyncio.timeout_at(min(due_at, ends_at)):
                        litellm_event = await anext(events, None)
                    if litellm_event is None:
                        return
                    event = _event(litellm_event, answer, job.api)
                    has_received_output = has_received_output or has_output(job.api, event)
                    yield [event]
        except TimeoutError as error:
            raise _late(times, has_received_output=has_received_output, has_ended=now() >= ends_at) from error
        except BackendError:
            raise
        except Exception as error:
            raise self._failure(error, has_started=has_started, has_output=has_received_output) from error

    async def load(self) -> Load | None:
        return None

    async def aclose(self) -> None:
        """Do nothing; litellm owns the connections."""

    def _call_arguments(self, job: PassthroughJob, litellm: Any) -> dict[str, Any]:
        """Return the arguments of the litellm call.

        Raises InvalidRequest for a body that cannot be sent to the provider.
        """
        fields = FIELDS[job.api]
        model = named(self._model, job.requested_model)
        if job.api is Api.RESPONSES and job.body.get("input") is None:
            raise InvalidRequest("'input' is required.", param="input")
        known = {name: value for name, value in job.body.items() if name in fields and value is not None}
        rest = {name: value for name, value in job.body.items() if name not in fields | {"model", "stream"}}
        extra_body = self._params.get("extra_body")
        # For speech, litellm silently drops other fields.
        if rest and (job.api is Api.SPEECH or not _accepts_any_field(litellm, model, self._params)):
            if not self._params.get("drop_params"):
                name = next(iter(rest))
                raise UnsupportedValue(
                    f"'{name[:64]}' is not supported by the provider of this model; remove the field.", param=name[:64]
                )
            rest = {}
        more = {**(extra_body if isinstance(extra_body, dict) else {}), **rest}
        return {
            # The client's fields override settings of the entry. They never include the model, the address and the key.
            **self._params,
            **known,
            **({"extra_body": more} if more else {}),
            # These arguments follow last, so that neither settings nor the client can replace them.
            "model": model,
            **({"stream": job.stream} if job.api in TEXT_APIS else {}),
            "timeout": job.timeouts.total_s,
            # The failover policy decides on retries.
            "num_retries": 0,
            "max_retries": 0,
        }

    def _failure(self, error: Exception, *, has_started: bool, has_output: bool) -> BackendError | ContextTooLong:
        reason = self._cleaned(str(getattr(error, "message", "") or ""))
        name = type(error).__name__
        if name == TOO_LONG:
            tokens, limit = read_counts(reason)
            return ContextTooLong(
                f"the request is longer than the model's context: {reason}", tokens=tokens, limit=limit
            )
        status = getattr(error, "status_code", None)
        log.warning("provider failed", extra={"kind": name, "status": status})
        if status not in STATUSES and _is_connection_error(error):
            return BackendUnavailable("the connection to the provider failed")
        if not has_started and (name == UNKNOWN_ERROR or status is None):
            # A client's unusual request must not open the circuit of the provider for all clients.
            return BackendRejected("the request cannot be converted to the API of this model's provider")
        kind, message = STATUSES.get(status if isinstance(status, int) else 0, (BackendError, "the provider failed"))
        if has_output and kind is BackendRejected:
            # A provider that has begun its answer has accepted the request.
            kind, message = BackendError, "the provider failed during its answer"
        failure = kind(f"{message}: {reason}" if kind is BackendRejected and reason else message)
        failure.permanent = isinstance(status, int) and is_permanent(status)
        return failure

    def _cleaned(self, text: str) -> str:
        """Return the text as one printable line, without secret settings of the operator."""
        text = _PREFIX.sub("", text[: MAX_DETAIL_LENGTH * 8])
        # Secrets are replaced before the truncation, which could otherwise leave a part of a secret.
        for hidden in self._hidden:
            text = text.replace(hidden, "[hidden]")
        return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:MAX_DETAIL_LENGTH]


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in a setting. For a URL, also yield its host without scheme and path."""
    match value:
        case str():
            yield value
            if "://" in value:
                yield value.partition("://")[2].partition("/")[0]
        case Mapping():
            yield from chain.from_iterable(map(_texts, value.values()))
        case list():
            yield from chain.from_iterable(map(_texts, value))


def _is_connection_error(error: BaseException | None) -> bool:
    """Return whether the error was caused by a connection that failed or broke."""
    seen: set[int] = set()
    # Chains of causes can be circular.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # Compared by name, because httpx and aiohttp need not be imported here.
        if any(kind.__name__ in CONNECTION for kind in type(error).__mro__):
            return True
        error = error.__cause__ or error.__context__
    return False


def _late(times: Timeouts, *, has_received_output: bool, has_ended: bool) -> BackendTimeout:
    """Return the error for an expired time limit."""
    if has_ended:
        return BackendTimeout(incomplete(times))
    text = silent if has_received_output else no_first_token
    return BackendTimeout(text("the provider", times))


def _event(litellm_event: Any, stream: Any, api: Api) -> dict[str, Any]:
    """Return a stream event as JSON.

    Raises BackendProtocolError if the provider aborted the stream. litellm hides this by adding a regular end.
    """
    data = _to_json(litellm_event, chunk=api is Api.CHAT)
    # For a provider without the Responses API, litellm builds the events from Chat chunks.
    chunks = getattr(stream, "litellm_custom_stream_wrapper", stream)
    if getattr(chunks, "sent_last_chunk", False) and all(getattr(chunks, name, "") is None for name in REASONS):
        raise BackendProtocolError("the provider ended its answer without a finish reason")
    usage = (data if api is Api.CHAT else data.get("response") or {}).get("usage") or {}
    if "cost" in usage and not any(
        getattr(getattr(chunk, "usage", None), "cost", None) for chunk in getattr(chunks, "chunks", ())
    ):
        # The cost is from litellm's own price list, not from the provider.
        del usage["cost"]
    return data


def _accepts_any_field(litellm: Any, model: str, params: Mapping[str, Any]) -> bool:
    """Return whether the provider's API is OpenAI's, so that any field of a body can be sent."""
    provider = params.get("custom_llm_provider") or (model.partition("/")[0] if "/" in model else "openai")
    return provider in {"openai", "azure", *litellm.openai_compatible_providers}


class _Closing:
    """Wrapper that can close any litellm stream, even one without `aclose`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._events: AsyncIterator[Any] = aiter(stream)

    async def __anext__(self) -> Any:
        return await anext(self._events)

    async def aclose(self) -> None:
        for closable in (self._stream, getattr(self._stream, "response", None)):
            if (close := getattr(closable, "aclose", None)) is not None:
                with suppress(Exception):
                    await close()
                return


def _to_json(answer: Any, *, chunk: bool = False) -> dict[str, Any]:
    """Convert a litellm object to JSON. With `chunk`, fields that are None are omitted."""
    # Litellm passes on unpaired surrogates of a provider, which some kinds of answers cannot represent as JSON.
    dumped = all_well_formed(answer.model_dump(exclude_none=chunk, warnings=False))
    plain: dict[str, Any] = to_jsonable_python(dumped)
    plain.pop("provider_specific_fields", None)
    for choice in plain.get("choices") or ():
        choice.setdefault("finish_reason", None)
    return plain


class _Loaded:
    """Loader of the litellm package; it loads the package once."""

    def __init__(self) -> None:
        self._package: Any = None

    async def get(self, environment: Mapping[str, str]) -> Any:
        """Return the package.

        Raises BackendError if it cannot be loaded.
        """
        if self._package is None:
            try:
                self._package = await asyncio.to_thread(_load, dict(environment))
            except Exception as error:
                log.exception("litellm cannot be loaded", exc_info=error)
                raise BackendError("the gateway cannot load litellm; its log contains the cause") from error
        return self._package


_LOADED: Final = _Loaded()


def _load(environment: Mapping[str, str]) -> Any:
    # Litellm reads this variable when it is imported. Without the variable, it fetches a price list, with three
    # attempts if there is no network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.update(environment)
    package: Any = importlib.import_module("litellm")
    # Litellm itself causes these warnings when it serializes an answer of an unknown kind.
    warnings.filterwarnings("ignore", message="Pydantic serializer warnings")
    package.suppress_debug_info = True
    package.turn_off_message_logging = True
    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logger = logging.getLogger(name)
        # The log messages of litellm contain request and answer texts.
        logger.handlers.clear()
        logger.setLevel(logging.CRITICAL)
        logger.propagate = False
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        _preload(package)
    except Exception as error:
        # The first requests are then slower, and block other requests.
        log.warning("warming up litellm failed", exc_info=error)
    return package


def _preload(package: Any) -> None:
    """Load the modules that litellm would load for its first answers, in this thread.

    These modules are more than half of all that litellm loads. Later, loading them would block the event loop. No
    request is sent.
    """
    arguments = {"model": "openai/-", "messages": [{"role": "user", "content": "-"}], "mock_response": "-"}
    for stream in (False, True):
        answer = package.completion(**arguments, stream=stream)
        if stream:
            deque(answer, maxlen=0)
    client = importlib.import_module("openai").AsyncOpenAI(api_key="-", base_url="http://127.0.0.1:9")
    for surface in (client.chat.completions, client.responses):
        getattr(surface, "with_raw_response", None)
