"""SGLang: token ids in, token ids out, over `/v1/completions`.

SGLang has two endpoints that return ids. `/v1/completions` always sends only the new ids in each event. Events of
`/generate` contain either the new ids or all ids so far, depending on an option of the server that it does not report.
With `no_stop_trim`, the ids include the stop token. A server that removes the stop token nevertheless reports it in
`matched_stop`. This adapter was written from the source of version 0.5.23 and was not tested with a live server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import assert_never

import orjson

from unisono.core.generation import (
    CONSTRAINT_KINDS,
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
from unisono_adapters import _completions
from unisono_adapters._constraints import as_regex, refused_kind, schema_of
from unisono_adapters._events import field_of
from unisono_adapters._http import BackendHttp
from unisono_adapters._load_metrics import LoadPages, amount, by_part, document, part, samples
from unisono_adapters._model_list import examine_served, model_list
from unisono_adapters._probe import Subject
from unisono_adapters._scoring import score_prompt

REMEDIES = {
    Check.MODEL: "Use a name from its model list after `sglang/`, or start SGLang with --served-model-name.",
    Check.IDS_OUT: "Update SGLang to 0.5.23 or newer, and point api_base at SGLang itself.",
    Check.PROMPT_WHOLE: "Start SGLang without --allow-auto-truncate.",
    Check.CONSTRAIN: "Start SGLang with a --grammar-backend other than none.",
    Check.CONTEXT: "Start SGLang with a larger --context-length; gpt-oss supports 131072.",
}


class SglangBackend:
    """SGLang backend.

    The model name must equal `--served-model-name`; without that option, the model path.
    """

    def __init__(self, options: BackendOptions) -> None:
        """Raise ConfigError for invalid options."""
        self._model = options.model
        self._wire = BackendHttp(options)
        self._load = LoadPages(self._wire, {"metrics": _gauges, "v1/loads": _ranks, "get_load": _ranks})

    async def probe(self) -> Probe:
        """Read the model list for the model and its context, then probe the backend."""
        served = await model_list(self._wire)
        length = served.get(self._model)
        claims = Capabilities(
            prompt=OutputForm.IDS,
            output=OutputForm.IDS,
            stop_visible=True,
            # The server rejects a request whose prompt and `max_tokens` together fill the whole context window.
            context=length - 1 if length else None,
            logit_bias=True,
            logprobs=True,
            prompt_logprobs=True,
            scores=True,
            constrain=frozenset((*CONSTRAINT_KINDS, Regex.kind, Gbnf.kind)),
        )
        subject = Subject(
            self.complete, claims, remedies=REMEDIES, encode=self._encode, decode=self._decode, score=self.score
        )
        return await examine_served(subject, self._model, served)

    async def _encode(self, text: str) -> Sequence[int] | None:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return field_of(await self._wire.get_json("v1/tokenize", body), "tokens", list)

    async def _decode(self, ids: Sequence[int]) -> str | None:
        body = {"model": self._model, "tokens": list(ids), "skip_special_tokens": False}
        return field_of(await self._wire.get_json("v1/detokenize", body), "text", str)

    def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        return _completions.complete(self._wire, self._body(job), job, OutputForm.IDS, stop_field="matched_stop")

    async def score(self, job: ScoreJob) -> Sequence[TokenScore | None]:
        return await score_prompt(self.complete, job)

    async def load(self) -> Load | None:
        return await self._load.read()

    async def aclose(self) -> None:
        await self._wire.aclose()

    def _body(self, job: CompletionJob) -> bytes:
        body: dict[str, object] = {
            **_completions.id_request(self._model, job),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if job.sampling.top_k == 0:
            # SGLang uses -1 for no limit, and rejects 0.
            body["top_k"] = -1
        if job.logprobs is not None:
            # With 0, SGLang reports no log probabilities.
            body["logprobs"] = max(job.logprobs, 1)
        if job.prompt_logprobs:
            # With `echo`, the stream begins with the log probabilities of the prompt.
            body["echo"] = True
        if job.cache_salt:
            body["cache_salt"] = job.cache_salt
        if job.constraint is not None:
            body.update(_constrained(job.constraint))
        return orjson.dumps(body)


RUNNING, WAITING = "sglang:num_running_reqs", "sglang:num_queue_reqs"
TOKENS, USED = "sglang:num_used_tokens", "sglang:token_usage"
# Labels that identify a data-parallel scheduler. Several processes may report the same scheduler.
RANK = ("model_name", "dp_rank")


def _gauges(page: bytes) -> Load | None:
    """Read the metrics page, which exists only with the server option `--enable-metrics`."""
    found = samples(page, RUNNING, WAITING, TOKENS, USED)
    if RUNNING not in found:
        return None
    running, waiting, tokens, used = (
        by_part(found.get(name, ()), RANK).values() for name in (RUNNING, WAITING, TOKENS, USED)
    )
    return Load(
        running=round(sum(running)),
        waiting=round(sum(waiting)),
        tokens=round(sum(tokens)) if tokens else None,
        cache_used=part(sum(used) / len(used)) if used else None,
    )


def _ranks(page: bytes) -> Load | None:
    """Read the page with the loads of all schedulers.

    The page is a JSON object since version 0.5.6, and a list in older versions. Older versions report `num_reqs`, the
    sum of running and waiting requests, instead of `num_running_reqs`.
    """
    load = document(page)
    ranks = load.get("loads") if isinstance(load, dict) else load
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
        return None
    waiting = sum(amount(rank.get("num_waiting_reqs")) or 0 for rank in ranks)
    if (requests := _sum(ranks, "num_reqs")) is not None:
        return Load(max(requests - waiting, 0), waiting, _sum(ranks, "num_tokens"))
    if (running := _sum(ranks, "num_running_reqs")) is None:
        return None
    used = [value for rank in ranks if (value := part(rank.get("token_usage"))) is not None]
    return Load(running, waiting, _sum(ranks, "num_used_tokens"), sum(used) / len(used) if used else None)


def _sum(ranks: Sequence[Mapping[str, object]], name: str) -> int | None:
    """Return the sum of the field `name` over all ranks; None if a rank has no such field."""
    amounts = [amount(rank.get(name)) for rank in ranks]
    return sum(known) if len(known := [each for each in amounts if each is not None]) == len(amounts) else None


def _constrained(constraint: Constraint) -> dict[str, object]:
    match constraint:
        case JsonSchema() | AnyJson():
            # SGLang requires the schema as a string of JSON.
            return {"json_schema": orjson.dumps(schema_of(constraint)).decode()}
        case OneOf(texts):
            # All grammar backends of SGLang support regular expressions, but not all support grammars.
            return {"regex": as_regex(texts)}
        case Regex(pattern):
            return {"regex": pattern}
        case Gbnf(grammar):
            return {"ebnf": grammar}
        case Lark():
            raise refused_kind(constraint)
        case _:
            assert_never(constraint)
