"""vLLM: token ids in, token ids out, over `/v1/completions`.

The text in vLLM's answers is ignored: it lags behind the ids, and does not contain the stop token. Measured with
versions 0.32 and 0.33. Older versions that do not return ids are rejected at their first answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import assert_never

import orjson

from unisono.core.generation import (
    CONSTRAINT_KINDS,
    TEXT_KINDS,
    AnyJson,
    Capabilities,
    Chunk,
    CompletionJob,
    Constraint,
    Gbnf,
    JsonSchema,
    Lark,
    Load,
    OneOf,
    OutputForm,
    Regex,
)
from unisono.core.ports import BackendOptions
from unisono.core.probe import Check, Probe
from unisono.core.scoring import ScoreJob, TokenScore
from unisono.errors import ConfigError, ConstraintRefused, Symptom
from unisono_adapters import _completions
from unisono_adapters._constraints import as_tag, schema_of
from unisono_adapters._events import field_of
from unisono_adapters._http import BackendHttp
from unisono_adapters._load_metrics import LoadPages, amount, by_part, document, part, samples
from unisono_adapters._model_list import examine_served, model_list
from unisono_adapters._probe import Subject
from unisono_adapters._scoring import score_prompt

REMEDIES = {
    Check.MODEL: "Use a name from its model list after `vllm/`, or start vLLM with --served-model-name.",
    Check.IDS_OUT: "Update vLLM to 0.32 or newer, which supports return_token_ids, and point api_base at vLLM itself.",
    Check.CONSTRAIN: "Update vLLM to 0.32 or newer, which supports structured_outputs.",
    Check.CONTEXT: "Start vLLM with a larger --max-model-len; gpt-oss supports 131072.",
}


class VllmBackend:
    """vLLM backend. `extra` may contain `stream_interval`, the number of tokens per event.

    The more tokens an event contains, the less work the gateway has per token.
    """

    def __init__(self, options: BackendOptions) -> None:
        """Raise ConfigError for invalid options."""
        self._model = options.model
        self._interval = options.extra.get("stream_interval")
        if self._interval is not None and (type(self._interval) is not int or self._interval < 1):
            raise ConfigError("litellm_params.stream_interval: must be a whole number of tokens, 1 or more")
        self._wire = BackendHttp(options)
        self._load = LoadPages(self._wire, {"metrics": _gauges, "load": self._counted})
        self._counts = False

    async def probe(self) -> Probe:
        """Read the model list for the model and its context, then probe the backend."""
        served = await model_list(self._wire)
        length = served.get(self._model)
        claims = Capabilities(
            prompt=OutputForm.IDS,
            output=OutputForm.IDS,
            stop_visible=True,
            context=length,
            logit_bias=True,
            logprobs=True,
            prompt_logprobs=True,
            scores=True,
            constrain=frozenset((*CONSTRAINT_KINDS, *TEXT_KINDS)),
        )
        subject = Subject(
            self.complete, claims, remedies=REMEDIES, encode=self._encode, decode=self._decode, score=self.score
        )
        return await examine_served(subject, self._model, served)

    async def _encode(self, text: str) -> Sequence[int] | None:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return field_of(await self._wire.get_json("tokenize", body), "tokens", list)

    async def _decode(self, ids: Sequence[int]) -> str | None:
        return field_of(
            await self._wire.get_json("detokenize", {"model": self._model, "tokens": list(ids)}), "prompt", str
        )

    def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        if job.constraint is not None:
            return self._constrained(job, job.constraint)
        return _completions.complete(self._wire, self._body(job), job, OutputForm.IDS)

    async def _constrained(self, job: CompletionJob, constraint: Constraint) -> AsyncIterator[Chunk]:
        tag = as_tag(schema_of(constraint)) if isinstance(constraint, JsonSchema | AnyJson) else None
        ways = [_structured(constraint)] if tag is None else [{"structural_tag": tag}, _structured(constraint)]
        while ways:
            answer = _completions.complete(self._wire, self._body(job, ways.pop(0)), job, OutputForm.IDS)
            try:
                async with aclosing(answer) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except ConstraintRefused as error:
                # Not every grammar engine of vLLM supports structural tags. Such an error always arrives before the
                # first chunk. A disconnect may mean that the grammar crashed the server: do not send it again.
                if not ways or error.symptom is Symptom.DISCONNECTED:
                    raise
            else:
                return

    async def score(self, job: ScoreJob) -> Sequence[TokenScore | None]:
        return await score_prompt(self.complete, job)

    async def load(self) -> Load | None:
        return await self._load.read()

    def _counted(self, page: bytes) -> Load | None:
        """Read the load page, which reports the number of running and waiting requests together.

        On a server that does not count its requests, the number is always 0. The page is therefore ignored until it has
        reported a number other than 0.
        """
        load = document(page)
        requests = amount(load.get("server_load")) if isinstance(load, dict) else None
        # After a number other than 0, a 0 is a real count.
        self._counts = self._counts or bool(requests)
        return Load(requests, 0) if requests is not None and self._counts else None

    async def aclose(self) -> None:
        await self._wire.aclose()

    def _body(self, job: CompletionJob, structured: Mapping[str, object] | None = None) -> bytes:
        body: dict[str, object] = {
            **_completions.id_request(self._model, job),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if job.cache_salt:
            # Hashed, because vLLM limits the salt to 128 characters and forbids some characters.
            body["cache_salt"] = hashlib.sha256(job.cache_salt.encode()).hexdigest()
        if self._interval is not None:
            body["stream_interval"] = self._interval
        if job.logprobs is not None:
            # By default vLLM reports an alternative by its text, and several tokens may have the same text.
            body |= {"logprobs": job.logprobs, "return_tokens_as_token_ids": True}
        if job.prompt_logprobs:
            # vLLM does not support its field `prompt_logprobs` in a stream. With `echo`, the stream begins with the
            # log probabilities of the prompt.
            body["echo"] = True
        if structured is not None:
            body["structured_outputs"] = structured
        return orjson.dumps(body)


RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
USED, SIZE = "vllm:kv_cache_usage_perc", "vllm:cache_config_info"
# Labels that identify one engine of a server. Each engine has its own gauges and its own cache.
ENGINE = ("model_name", "engine")


def _gauges(page: bytes) -> Load | None:
    """Read the metrics page. Returns None if the server was started with `--disable-log-stats`."""
    found = samples(page, RUNNING, WAITING, USED, SIZE)
    if RUNNING not in found:
        return None
    running, waiting, used = (by_part(found.get(name, ()), ENGINE).values() for name in (RUNNING, WAITING, USED))
    # The caches of all engines have the same size. The number of blocks times the block size would be too large,
    # since sliding-window layers use additional blocks for the same tokens.
    sizes = [sample.labels.get("kv_cache_size_tokens", "") for sample in found.get(SIZE, ())]
    size = next((int(size) for size in sizes if size.isdecimal() and len(size) < 16), None)
    return Load(
        running=round(sum(running)),
        waiting=round(sum(waiting)),
        tokens=round(sum(used) * size) if used and size is not None else None,
        cache_used=part(sum(used) / len(used)) if used else None,
    )


def _structured(constraint: Constraint) -> Mapping[str, object]:
    """Return the value of `structured_outputs` for a constraint.

    vLLM silently ignores the older fields, such as `guided_json`.
    """
    match constraint:
        case JsonSchema():
            return {"json": schema_of(constraint)}
        case AnyJson():
            return {"json_object": True}
        case OneOf(texts):
            return {"choice": texts}
        case Regex(pattern):
            return {"regex": pattern}
        case Gbnf(grammar) | Lark(grammar):
            # vLLM's default grammar engine reads GBNF and a part of Lark's notation; llguidance reads both completely.
            return {"grammar": grammar}
        case _:
            assert_never(constraint)
