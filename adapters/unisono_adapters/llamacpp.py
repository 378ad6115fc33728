"""llama.cpp's server: token ids in, token ids out, over `/completion`.

Every event contains one token id and the text that the token completes. For a character that consists of several
tokens, the server sends one event with only the last id; `LostIds` restores the missing ids from the text. The stream
ends with an event with `"stop": true`, without `[DONE]`. The adapter never sends `X-Conversation-Id`, because with this
header the server would go on generating after the gateway disconnects. Measured on the server of llama-cpp-python
0.3.36.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, assert_never

import orjson

from unisono.core.generation import (
    CONSTRAINT_KINDS,
    FIRST_SPECIAL,
    AnyJson,
    Capabilities,
    Chunk,
    CompletionJob,
    Constraint,
    FinishReason,
    Gbnf,
    JsonSchema,
    Lark,
    Load,
    OneOf,
    OutputForm,
    Prompt,
    Regex,
    TokenLogprob,
)
from unisono.core.ports import BackendOptions
from unisono.core.probe import Check, Probe
from unisono.core.scoring import ScoreJob, TokenScore
from unisono.errors import BackendOverloaded, BackendProtocolError, ConstraintRefused
from unisono.harmony.encoding import Encoding, load_encoding
from unisono_adapters._constraints import bias, refused_kind, schema_of
from unisono_adapters._events import count, decoded, field_of, generate, text_of, token_ids
from unisono_adapters._failures import FailureTable, IdsMissing, is_error
from unisono_adapters._gbnf import choice_grammar, client_grammar, regex_grammar
from unisono_adapters._http import BackendHttp
from unisono_adapters._load_metrics import LoadPages, amount, by_part, document, part, samples
from unisono_adapters._probe import Subject, examine
from unisono_adapters._scoring import GREEDY, score_forced, to_logprob


class LostIds:
    """Restoration of the lost ids of one stream.

    The events of the stream must be passed to `restored` in order.
    """

    __slots__ = ("_encoding", "_pending")

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        # Text of ids that have arrived before their text: a server that checks for a stop string holds text back.
        self._pending = b""

    def restored(self, tokens: list[int], content: str) -> list[int]:
        """Return the ids of one event; restore the lost ids if `tokens` do not match `content`."""
        text = content.encode()
        spelled = self._encoding.decode_bytes(tokens)
        if text == spelled and not self._pending:
            return tokens
        plain = [token for token in tokens if token < FIRST_SPECIAL]
        # `content` may leave out the text of a special token, as for the stop token that ended the generation.
        hidden = self._encoding.decode_bytes(plain)
        expected = (self._pending + spelled, self._pending + hidden)
        if text in expected or content in [own.decode("utf-8", errors="replace") for own in expected]:
            self._pending = b""
            return tokens
        if expected[1].startswith(text):
            self._pending = expected[1][len(text) :]
            return tokens
        self._pending = b""
        return self._reencode(tokens, text)

    def _reencode(self, tokens: list[int], text: bytes) -> list[int]:
        """Encode `text` without the special tokens at its end, and append their ids from `tokens`."""
        special = [token for token in tokens if token >= FIRST_SPECIAL]
        body = text.removesuffix(self._encoding.decode_bytes(special)) if special else text
        return [*self._encoding.encode_text(body.decode("utf-8", errors="replace")), *special]


# Finish reasons of llama.cpp; "word" means a stop string, which only the operator can set.
STOP_TYPES: Mapping[str, FinishReason] = {
    "eos": FinishReason.STOP,
    "word": FinishReason.STOP,
    "limit": FinishReason.LENGTH,
}

# Samplers for which the gateway has no setting. They are turned off, because the server's command line may have enabled
# them.
NEUTRAL: Mapping[str, object] = {
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "dynatemp_range": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "ignore_eos": False,
}


# Fields to include in the events. By default the last event repeats the prompt and all settings.
LAST_EVENT = ("content", "tokens", "stop", "stop_type", "tokens_evaluated", "timings")


REMEDIES = {
    Check.GENERATION: "Restart llama-server with a GGUF file of gpt-oss.",
    Check.TOKENIZER: "Convert the GGUF file again from the released model, with its own tokenizer.",
    Check.IDS_OUT: "Update llama.cpp to a version whose server supports return_tokens.",
    Check.MARKERS: "Serve a gpt-oss model: llama-server always returns its markers.",
    Check.PROMPT_WHOLE: "Start llama-server without --context-shift.",
    Check.CONTEXT: "Start llama-server with a larger -c, which is divided among its -np slots.",
}


class LlamaCppBackend:
    """llama.cpp backend. The model name matters only for a server that serves several models."""

    def __init__(self, options: BackendOptions) -> None:
        """Raise ConfigError for invalid options."""
        self._model = options.model
        self._wire = BackendHttp(
            options, {503: (BackendOverloaded, "the backend is loading its model or has no free slot")}
        )
        self._load = LoadPages(self._wire, {"metrics": _gauges, "slots": _slots, "health": _health})

    async def probe(self) -> Probe:
        """Read the server's properties and probe the backend.

        The reported context window is that of one slot of the server.
        """
        properties = await self._wire.get_json("props")
        settings = properties.get("default_generation_settings") if isinstance(properties, dict) else None
        if not isinstance(settings, dict):
            raise BackendProtocolError("the backend's properties are not those of a llama.cpp server")
        context = settings.get("n_ctx")
        claims = Capabilities(
            prompt=OutputForm.IDS,
            output=OutputForm.IDS,
            stop_visible=True,
            context=context if type(context) is int and context > 0 else None,
            logit_bias=True,
            logprobs=True,
            scores=True,
            constrain=frozenset((*CONSTRAINT_KINDS, Regex.kind, Gbnf.kind)),
        )
        subject = Subject(
            self.complete, claims, remedies=REMEDIES, encode=self._encode, decode=self._decode, score=self.score
        )
        return await examine(subject)

    def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        return generate(self._wire, "completion", self._body(job), job, LlamaCppFold(self._wire.failures))

    async def score(self, job: ScoreJob) -> Sequence[TokenScore | None]:
        async def generate(prompt: Sequence[int], tokens: int, more: Mapping[str, object]) -> object:
            request = CompletionJob(Prompt(prompt), tokens, GREEDY, logprobs=job.top)
            body = self._fields(request) | {"stream": False, "response_fields": ["completion_probabilities"], **more}
            return await self._wire.post_whole("completion", orjson.dumps(body), job)

        return await score_forced(generate, job)

    async def load(self) -> Load | None:
        """Return the load.

        The server answers only between two steps of the model, so a long prompt may delay the answer.
        """
        return await self._load.read()

    async def aclose(self) -> None:
        await self._wire.aclose()

    async def _encode(self, text: str) -> Sequence[int] | None:
        body = {"content": text, "add_special": False, "parse_special": True}
        return field_of(await self._wire.get_json("tokenize", body), "tokens", list)

    async def _decode(self, ids: Sequence[int]) -> str | None:
        return field_of(await self._wire.get_json("detokenize", {"tokens": list(ids)}), "content", str)

    def _body(self, job: CompletionJob) -> bytes:
        return orjson.dumps(self._fields(job))

    def _fields(self, job: CompletionJob) -> dict[str, object]:
        sampling = job.sampling
        body: dict[str, object] = {
            "model": self._model,
            "prompt": list(job.prompt.tokens),
            "n_predict": job.max_tokens,
            "stream": True,
            "return_tokens": True,
            "response_fields": LAST_EVENT,
            "cache_prompt": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repeat_penalty": sampling.repetition_penalty,
            **NEUTRAL,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if biased := bias(job):
            body["logit_bias"] = [[token, amount] for token, amount in biased.items()]
        if job.logprobs is not None:
            # With 0, llama-server reports no log probabilities.
            body["n_probs"] = max(job.logprobs, 1)
        if job.constraint is not None:
            body.update(_constrained(job.constraint))
        return body


RUNNING, WAITING = "llamacpp:requests_processing", "llamacpp:requests_deferred"
TOKENS, USED = "llamacpp:kv_cache_tokens", "llamacpp:kv_cache_usage_ratio"
GAUGES = (RUNNING, WAITING, TOKENS, USED)


def _gauges(page: bytes) -> Load | None:
    """Read the page that `--metrics` enables. Only older builds report how full the cache is."""
    found = {name: sum(by_part(values, ()).values()) for name, values in samples(page, *GAUGES).items()}
    if RUNNING not in found:
        return None
    return Load(
        running=round(found[RUNNING]),
        waiting=round(found.get(WAITING, 0.0)),
        tokens=round(found[TOKENS]) if TOKENS in found else None,
        cache_used=part(found.get(USED)),
    )


def _slots(page: bytes) -> Load | None:
    """Read the slots page, which does not report waiting requests.

    `--no-slots` turns the page off. In older builds the page is off unless the server was started with `--slots`.
    """
    slots = document(page)
    if not isinstance(slots, list) or not all(isinstance(slot, dict) for slot in slots):
        return None
    return Load(sum(slot.get("is_processing") is True for slot in slots), 0)


def _health(page: bytes) -> Load | None:
    """Read the health page, which reports the number of busy slots only in builds from 2024."""
    health = document(page)
    running = amount(health.get("slots_processing")) if isinstance(health, dict) else None
    return None if running is None else Load(running, amount(health.get("deferred")) or 0)


def _constrained(constraint: Constraint) -> dict[str, object]:
    match constraint:
        case JsonSchema() | AnyJson():
            schema = schema_of(constraint)
            # An ambiguous pattern would stall the whole server.
            if any(regex_grammar(pattern) is None for pattern in _patterns(schema)):
                raise ConstraintRefused("a `pattern` in the schema cannot be translated into a llama.cpp grammar")
            return {"json_schema": schema}
        case OneOf(texts):
            return {"grammar": choice_grammar(texts)}
        case Regex(pattern):
            if (grammar := regex_grammar(pattern)) is None:
                raise ConstraintRefused("the regular expression cannot be translated into a llama.cpp grammar")
            return {"grammar": grammar}
        case Gbnf(grammar):
            return {"grammar": client_grammar(grammar)}
        case Lark():
            raise refused_kind(constraint)
        case _:
            assert_never(constraint)


def _patterns(schema: object) -> Iterator[str]:
    """Yield every `pattern` in a schema, at any depth."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            if isinstance(pattern := each.get("pattern"), str):
                yield pattern
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each


class LlamaCppFold:
    """Converter from llama.cpp's events to chunks.

    `done` becomes True when `feed` returns the last chunk, which has the finish reason.
    """

    __slots__ = ("_failures", "_has_output", "_last", "_logprobs", "_lost", "done")

    def __init__(self, failures: FailureTable) -> None:
        self._failures = failures
        self._lost = LostIds(load_encoding())
        self._last = Chunk()
        self._has_output = False
        self.done = False

    def feed(self, events: list[bytes]) -> Chunk | None:
        tokens: list[int] = []
        self._logprobs: list[TokenLogprob | None] = []
        for event in events:
            self._add_event(decoded(event), tokens)
            if self.done:
                return Chunk(
                    tokens=tokens,
                    logprobs=self._logprobs,
                    finish=self._last.finish,
                    prompt_tokens=self._last.prompt_tokens,
                    cached_tokens=self._last.cached_tokens,
                )
        return Chunk(tokens=tokens, logprobs=self._logprobs) if tokens else None

    def _add_event(self, data: dict[str, Any], tokens: list[int]) -> None:
        if is_error(data):
            raise self._failures.error_object(data, has_output=self._has_output)
        if "content" not in data:
            raise BackendProtocolError("the backend sent an event without the field `content`")
        content = text_of(data["content"])
        ids = data.get("tokens")
        if ids is None and content:
            raise IdsMissing("the backend sent text without token ids; its version may be too old")
        if ids or content:
            self._has_output = True
            restored = self._lost.restored(token_ids(ids), content)
            tokens += restored
            if (reported := data.get("completion_probabilities")) is not None:
                self._logprobs += _logprobs(reported, restored)
        if data.get("stop") is True:
            self._last = _finish(data)
            self.done = True


def _logprobs(reported: object, tokens: Sequence[int]) -> list[TokenLogprob | None]:
    """Return the log probability of each token in the `completion_probabilities` of an event.

    The result has None for a token without a log probability.
    """
    entries = [entry for entry in (reported if isinstance(reported, list) else ()) if isinstance(entry, dict)]
    known = {entry["id"]: entry for entry in entries if type(entry.get("id")) is int}
    return [_logprob(token, known.get(token, {})) for token in tokens]


def _logprob(token: int, entry: Mapping[str, Any]) -> TokenLogprob | None:
    listed = entry.get("top_logprobs")
    others = [each for each in (listed if isinstance(listed, list) else ()) if isinstance(each, dict)]
    return to_logprob(token, entry.get("logprob"), ((each.get("id"), each.get("logprob")) for each in others))


def _finish(data: dict[str, Any]) -> Chunk:
    """Return the finish reason and the usage in the last event, as a chunk without tokens."""
    kind = data.get("stop_type")
    finish = STOP_TYPES.get(kind) if isinstance(kind, str) else None
    if finish is None:
        raise BackendProtocolError("the backend sent an unknown finish reason")
    timings = data.get("timings")
    return Chunk(
        finish=finish,
        prompt_tokens=count(data.get("tokens_evaluated")),
        # `tokens_cached` is the final size of the slot. The number of reused prompt tokens is in the timings.
        cached_tokens=count(timings.get("cache_n")) if isinstance(timings, dict) else None,
    )
