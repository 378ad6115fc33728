"""Ollama: text in, text out, over `/api/generate`, by a route that a probe selects.

The route `raw` uses `raw: true`. The answer is the generated text, in which special tokens are spelled out. It works
with Ollama below 0.30, and with any later version that returns markers in raw text.

The route `template` is for Ollama 0.30 and later, where raw text may lack its markers. The request contains a template
that consists only of the prompt. Then Ollama passes the markers to its own parser. The streamed output of that parser
is not used, because it does not distinguish a preamble from an answer, and lacks the recipients of calls. Instead, the
answer is taken from the field `context` of the last line, which holds the ids of the prompt and of the whole answer.
So nothing reaches the client before the end of the answer: exactness matters more than early tokens.

Neither route returns the stop token. If both routes lack markers, the output is parsed without markers, as a last
resort. Written from the source of versions up to 0.34 and not tested with a live server.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from enum import StrEnum
from typing import Any, assert_never

import orjson

from unisono.core.frozen import dataclass
from unisono.core.generation import (
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
    Prompt,
    Regex,
    Sampling,
)
from unisono.core.ports import BackendOptions
from unisono.core.probe import Check, Finding, Probe, Severity
from unisono.errors import BackendError, BackendOverloaded, BackendProtocolError, BackendRejected, ConfigError
from unisono.harmony.encoding import load_encoding
from unisono_adapters._constraints import refused_kind, schema_of
from unisono_adapters._events import generate
from unisono_adapters._failures import IdsMissing
from unisono_adapters._framing import NDJSON
from unisono_adapters._http import BackendHttp
from unisono_adapters._ollama_lines import RawFold, TemplateFold
from unisono_adapters._probe import REQUEST_ID, Subject, examine

# Context size in tokens if neither `num_ctx` nor the Modelfile sets a context size. It needs less memory than the
# 131,072 tokens that the model supports.
MAX_DEFAULT_NUM_CTX = 32_768

PROBE_PROMPT = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n\nReasoning: low\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
    "<|start|>user<|message|>Say hello.<|end|><|start|>assistant"
)
# Tokens to generate: enough for the header that begins every answer.
PROBE_TOKENS = 8


class OllamaRoute(StrEnum):
    RAW = "raw"
    TEMPLATE = "template"
    MARKERLESS = "markerless"


ROUTE_FIELDS: Mapping[OllamaRoute, Mapping[str, object]] = {
    OllamaRoute.RAW: {"raw": True},
    OllamaRoute.TEMPLATE: {"template": "{{ .Prompt }}"},
    OllamaRoute.MARKERLESS: {"raw": True},
}

# Supported constraints: schemas, but no grammars. A choice cannot be written as a schema: an `enum` gives a text in
# quotes. There is no token bias either, so a marker may still appear inside a string.
CONSTRAINED = frozenset({JsonSchema.kind, AnyJson.kind})

# Markers of which one is among the first tokens of every answer.
HEADER_MARKERS = ("<|channel|>", "<|message|>")


@dataclass(frozen=True, slots=True)
class _Plan:
    """Settings with which requests are sent to the server.

    `num_ctx` is the context size in tokens. `version` is the server's version, or empty if it is unknown.
    """

    route: OllamaRoute
    num_ctx: int
    version: str = ""


LATE = Finding(
    Check.MARKERS,
    ok=False,
    detail="Raw text has no markers. The template route has them, but returns an answer only when it is complete.",
    remedy="Serve the model with llama.cpp's own server to stream answers.",
    severity=Severity.WARNING,
)
REMEDIES = {
    Check.GENERATION: "Run the model once with `ollama run`: it must fit into memory with this num_ctx.",
    Check.TOKENIZER: "Use the gpt-oss model of Ollama's own library.",
    Check.MARKERS: "Use the gpt-oss model of Ollama's own library, or serve it with llama.cpp's own server.",
    Check.PROMPT_WHOLE: "Update Ollama, and check that CONTEXT in the output of `ollama ps` equals num_ctx.",
    Check.CONTEXT: "Set unisono.backend.num_ctx: gpt-oss supports 131072 if memory permits.",
}

# Time limit in seconds for the first token of a probe, for which Ollama may have to load the model.
LOADING_S = 300.0
# Length in tokens of a prompt that the probe expects Ollama to read completely: more than Ollama's default num_ctx.
LONG_PROMPT = 4_200


class OllamaBackend:
    """Ollama backend with optional settings in `extra`.

    `num_ctx` is the context size in tokens; use the same value for all deployments of a model on a server, because
    Ollama reloads the model when the value changes. `keep_alive` is in seconds, or a duration such as "30m". `route`
    is `raw` or `template`; by default the probe selects the route.
    """

    def __init__(self, options: BackendOptions) -> None:
        """Raise ConfigError for invalid options."""
        self._model = options.model
        self._num_ctx = _num_ctx(options.extra.get("num_ctx"))
        self._keep_alive = options.extra.get("keep_alive")
        if self._keep_alive is not None and type(self._keep_alive) not in (int, float, str):
            raise ConfigError("litellm_params.keep_alive: must be a number of seconds, or a duration such as 30m")
        route = options.extra.get("route")
        if route not in (None, OllamaRoute.RAW, OllamaRoute.TEMPLATE):
            raise ConfigError("litellm_params.route: must be raw or template")
        self._route = None if route is None else OllamaRoute(str(route))
        self._wire = BackendHttp(options)
        self._plan = _Plan(self._route, self._num_ctx) if self._route and self._num_ctx else None
        self._found: Probe | None = None
        self._planned_for = ("", "")

    async def probe(self) -> Probe:
        """Select the route for the server's version and the model, and probe the backend.

        A good result is reused until the server's version or the model changes, or a generation fails. The probe would
        otherwise load the model again and keep it in memory.
        """
        plan, of = await self._make_plan()
        if self._found is not None and self._planned_for == of:
            return self._found
        found = await self._probe_plan(plan)
        self._plan, self._planned_for = plan, of
        self._found = None if found.fatal else found
        return found

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        if self._plan is None:
            await self.probe()
        plan = self._plan
        assert plan is not None, "the probe made no plan"
        constraint = job.constraint
        if constraint and (constraint.kind not in CONSTRAINED or plan.route is OllamaRoute.TEMPLATE):
            raise refused_kind(constraint)
        try:
            async with aclosing(self._generated(job, plan)) as chunks:
                async for chunk in chunks:
                    await _check_whole(chunk, job.prompt, plan)
                    yield chunk
        except BackendError as error:
            if not isinstance(error, BackendOverloaded | BackendRejected):
                self._found = None
            raise

    async def load(self) -> Load | None:
        """Return None, because Ollama's `/api/ps` lists the loaded models but not their requests."""
        return None

    async def aclose(self) -> None:
        await self._wire.aclose()

    def _generated(self, job: CompletionJob, plan: _Plan) -> AsyncGenerator[Chunk]:
        failures = self._wire.failures
        fold = RawFold(failures, plan.version)
        if plan.route is OllamaRoute.TEMPLATE:
            fold = TemplateFold(failures, plan.version, job.prompt)
        return generate(self._wire, "api/generate", self._body(job, plan), job, fold, NDJSON)

    def _body(self, job: CompletionJob, plan: _Plan) -> bytes:
        sampling = job.sampling
        assert job.prompt.text is not None, "a text backend was given a prompt without text"
        options: dict[str, object] = {
            "num_ctx": plan.num_ctx,
            "num_predict": job.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "typical_p": 1.0,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repeat_penalty": sampling.repetition_penalty,
            # Turn off the stop strings of the Modelfile. Since Ollama hides the stop, it must be the model's own.
            "stop": [],
        }
        if sampling.seed is not None:
            options["seed"] = sampling.seed
        body: dict[str, object] = {
            "model": self._model,
            "prompt": job.prompt.text,
            "stream": True,
            "truncate": False,
            "shift": False,
            "options": options,
            **ROUTE_FIELDS[plan.route],
        }
        if self._keep_alive is not None:
            body["keep_alive"] = self._keep_alive
        if job.constraint is not None:
            body["format"] = _format(job.constraint)
        return orjson.dumps(body)

    async def _make_plan(self) -> tuple[_Plan, tuple[str, str]]:
        """Return the plan for requests, and the state of the server for which it was made.

        The state is a pair: the server's version, and the model's modification time.
        """
        response = await self._wire.get_json("api/version")
        version = response.get("version") if isinstance(response, dict) else None
        if not isinstance(version, str):
            raise BackendProtocolError("the backend does not report an Ollama version")
        model = await self._wire.get_json("api/show", {"model": self._model})
        if not isinstance(model, dict):
            raise BackendProtocolError("the backend's description of the model has an unknown format")
        num_ctx = self._num_ctx or _context_of(model)
        of = (version, str(model.get("modified_at")))
        if self._route is not None:
            return _Plan(self._route, num_ctx, version), of
        if self._plan is not None and self._found is not None and self._planned_for == of:
            return self._plan, of
        return _Plan(await self._choose_route(num_ctx, version), num_ctx, version), of

    async def _choose_route(self, num_ctx: int, version: str) -> OllamaRoute:
        """Generate a few tokens on each route; return the first route whose output contains markers."""
        prompt = Prompt(load_encoding().encode_marked(PROBE_PROMPT), PROBE_PROMPT)
        job = CompletionJob(prompt, PROBE_TOKENS, Sampling(temperature=0.0), request_id=REQUEST_ID)
        for route in (OllamaRoute.RAW, OllamaRoute.TEMPLATE):
            try:
                texts = [chunk.text async for chunk in self._generated(job, _Plan(route, num_ctx, version))]
            except IdsMissing:
                # This version of Ollama no longer returns `context`.
                continue
            if any(marker in "".join(texts) for marker in HEADER_MARKERS):
                return route
        return OllamaRoute.MARKERLESS

    async def _probe_plan(self, plan: _Plan) -> Probe:
        output = OutputForm.MARKERLESS if plan.route is OllamaRoute.MARKERLESS else OutputForm.TEXT
        subject = Subject(
            lambda job: self._generated(job, plan),
            Capabilities(
                prompt=OutputForm.TEXT,
                output=output,
                stop_visible=False,
                context=plan.num_ctx,
                # On the route `template`, Ollama's own parser would misread a prompt that ends inside a message.
                constrain=frozenset() if plan.route is OllamaRoute.TEMPLATE else CONSTRAINED,
                prefill=plan.route is not OllamaRoute.TEMPLATE,
            ),
            remedies=REMEDIES,
            long_prompt=LONG_PROMPT if plan.num_ctx > LONG_PROMPT + PROBE_TOKENS else 0,
            first_token_s=LOADING_S,
        )
        found = await examine(subject)
        if plan.route is not OllamaRoute.TEMPLATE:
            return found
        findings = (LATE if finding.check is Check.MARKERS and finding.ok else finding for finding in found.findings)
        return replace(found, findings=tuple(findings))


def _format(constraint: Constraint) -> object:
    match constraint:
        case JsonSchema():
            return schema_of(constraint)
        case AnyJson():
            return "json"
        case OneOf() | Regex() | Gbnf() | Lark():
            raise refused_kind(constraint)
        case _:
            assert_never(constraint)


def _num_ctx(setting: object) -> int | None:
    if setting is None:
        return None
    if type(setting) is not int or setting < 1:
        raise ConfigError("litellm_params.num_ctx: must be a whole number of tokens, 1 or more")
    return setting


def _context_of(model: Mapping[str, Any]) -> int:
    """Return the context size in tokens.

    The size is `num_ctx` in the Modelfile. If the Modelfile does not set `num_ctx`, the size is the one that the model
    supports, but at most `MAX_DEFAULT_NUM_CTX`.
    """
    parameters = model.get("parameters")
    setting = re.search(r"(?m)^num_ctx\s+(\d{1,9})\s*$", parameters) if isinstance(parameters, str) else None
    if setting is not None and int(setting[1]) > 0:
        return int(setting[1])
    info = model.get("model_info")
    lengths = [value for name, value in info.items() if name.endswith(".context_length")] if info else []
    length = lengths[0] if lengths and type(lengths[0]) is int and lengths[0] > 0 else MAX_DEFAULT_NUM_CTX
    return min(length, MAX_DEFAULT_NUM_CTX)


async def _check_whole(chunk: Chunk, prompt: Prompt, plan: _Plan) -> None:
    """Raise BackendProtocolError if Ollama has truncated the prompt.

    Ollama may need fewer tokens for the text of the prompt than the gateway rendered. So if Ollama has read fewer
    tokens, the gateway encodes the text as Ollama does and compares the numbers.
    """
    read = chunk.prompt_tokens
    if not read or read >= len(prompt.tokens):
        return
    sent = await asyncio.to_thread(load_encoding().encode_as_server, prompt.text or "")
    if read < len(sent):
        raise BackendProtocolError(
            f"the backend silently truncated the prompt: it read {read} of {len(sent)} tokens although num_ctx is "
            f"{plan.num_ctx}; use a shorter prompt, or update Ollama"
        )
