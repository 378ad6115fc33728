"""Completion jobs for backends, and the resulting output, as token ids or as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from typing import ClassVar, Final, TypeAlias

from unisono.core.frozen import dataclass
from unisono.core.renamed import renamed
from unisono.core.trace_context import TraceContext

RETURN = 200002
CONSTRAIN = 200003
CHANNEL = 200005
START = 200006
END = 200007
MESSAGE = 200008
CALL = 200012
ENDOFTEXT = 199999
# First special token id; smaller ids are ordinary text (o200k_harmony).
FIRST_SPECIAL = 199998
# Number of rows of the model's embedding: ids in range(VOCABULARY) are valid input.
VOCABULARY = 201088
# Number of possible seeds. Backends receive seeds below this number, because some backends accept at most 31 bits.
SEEDS = 2**31 - 1
# Below this temperature, some engines choose the most likely token. Other engines overflow when they divide by the
# temperature.
MIN_TEMPERATURE = 1e-5
# Context window of gpt-oss in tokens, for backends that do not report their context window.
DEFAULT_CONTEXT = 131_072

# Ids that end an assistant turn; always sent to the backend. Source: openai-harmony's
# `stop_tokens_for_assistant_actions`.
STOP_TOKENS = (RETURN, CALL)
# Ids that end every generation, whether they are sent to the backend or not.
ALL_STOP_TOKENS = frozenset({*STOP_TOKENS, ENDOFTEXT})


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class OutputForm(StrEnum):
    """Representation that a backend uses for prompts or for output."""

    IDS = "ids"
    # Text in which special tokens are spelled out.
    TEXT = "text"
    # Text from which special tokens are stripped; output only, a last resort.
    MARKERLESS = "markerless"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a backend, as data.

    `context` is its context window in tokens, for prompt and output together; None if unknown.
    """

    prompt: OutputForm
    output: OutputForm
    # True if the stop token itself arrives (as an id or as text).
    stop_visible: bool
    context: int | None = None
    logit_bias: bool = False
    # Names of the supported kinds of `Constraint`: a subset of CONSTRAINT_KINDS and TEXT_KINDS.
    constrain: frozenset[str] = frozenset()
    # True if the backend can continue a message that another backend began.
    prefill: bool = True
    # True if the backend reports log probabilities.
    logprobs: bool = False
    # True if the backend also reports log probabilities of the prompt's tokens.
    prompt_logprobs: bool = False
    # True if the backend scores given tokens (`core.scoring.ScoringBackend`).
    scores: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """Rendered prompt; `tokens` is always set.

    `text` is set only for backends that accept only text. The text was verified: a server that tokenizes it reads
    exactly the control tokens that were rendered.
    """

    tokens: Sequence[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters.

    `top_k` 0 means off. `top_p` 0 permits only the most likely token. `seed` may be negative. Every field is sent with
    every job, because inference engines have different defaults.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def with_next_seed(self, number: int) -> Sampling:
        """Return the parameters with `number` added to the seed, modulo `SEEDS`.

        Several generations for one request need different seeds: with equal seeds, they would draw the same random
        numbers. Without a seed, the parameters are unchanged.
        """
        return self if self.seed is None or not number else replace(self, seed=(self.seed + number) % SEEDS)

    def for_backends(self) -> Sampling:
        """Return parameters with the same effect that every backend accepts.

        For some extreme values, engines crash, reject the request or generate random text. Engines calculate with
        32-bit floats, in which very small values become 0 or lose their precision.
        """
        # With a `top_p` of at most 1 / VOCABULARY, only the most likely token remains.
        is_greedy = self.temperature < MIN_TEMPERATURE or self.top_p * VOCABULARY <= 1
        has_usual_seed = self.seed is None or 0 <= self.seed < SEEDS
        if not is_greedy and 0 <= self.top_k < VOCABULARY and has_usual_seed:
            return self
        return replace(
            self,
            temperature=0.0 if is_greedy else self.temperature,
            top_p=1.0 if is_greedy else self.top_p,
            # The generation thread of mlx_lm.server ends if `top_k` excludes no token.
            top_k=self.top_k if 0 < self.top_k < VOCABULARY else 0,
            # For -1 (or 2**32 - 1, the same in 32 bits), vLLM, llama.cpp and Ollama choose a random seed. mlx_lm.server
            # fails for any negative seed.
            seed=None if self.seed is None else self.seed % SEEDS,
        )


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits in seconds.

    `silence_s` limits the gap between two chunks; `total_s` limits the whole answer.
    """

    connect_s: float = 10.0
    first_token_s: float = 300.0
    silence_s: float = 120.0
    total_s: float = 600.0


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """Constraint that permits only JSON that matches the schema.

    The schema is sent unchanged, so `unisono.schemas` should have checked it.
    """

    schema: Mapping[str, object]
    kind: ClassVar[str] = "json_schema"


@dataclass(frozen=True, slots=True)
class AnyJson:
    """Constraint that permits any JSON object, but no other text."""

    kind: ClassVar[str] = "json_object"


@dataclass(frozen=True, slots=True)
class OneOf:
    """Constraint that permits only these texts; there is at least one text, and none is empty."""

    texts: tuple[str, ...]
    kind: ClassVar[str] = "choice"


@dataclass(frozen=True, slots=True)
class Regex:
    """Constraint that permits only texts that match this regular expression as a whole."""

    pattern: str
    kind: ClassVar[str] = "regex"


@dataclass(frozen=True, slots=True)
class Gbnf:
    """Constraint that permits only texts of this grammar, in the notation of llama.cpp.

    vLLM and SGLang call this notation EBNF. `lark` is the same grammar in Lark notation.
    """

    grammar: str
    lark: str
    kind: ClassVar[str] = "gbnf"


@dataclass(frozen=True, slots=True)
class Lark:
    """Constraint that permits only texts of this grammar, in Lark notation."""

    grammar: str
    kind: ClassVar[str] = "lark"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a token, and of the most likely tokens at the same position (`top`).

    Logarithms are natural. vLLM, SGLang and llama.cpp report the model's own probabilities. mlx reports probabilities
    to which biases, penalties and constraints were applied.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# Constraint on the whole generation, from its first token up to the stop token. The prompt ends where a message body
# begins. The only control token that can be generated is the one that ends the turn.
Constraint: TypeAlias = JsonSchema | AnyJson | OneOf | Regex | Gbnf | Lark

CONSTRAINT_KINDS = (JsonSchema.kind, AnyJson.kind, OneOf.kind)
# Constraint kinds that few backends support. They are used only for free texts with a grammar.
TEXT_KINDS = (Regex.kind, Gbnf.kind, Lark.kind)


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """Job for a backend.

    Stop tokens are always STOP_TOKENS; client stop strings never reach a backend. `constraint` requires a backend
    whose capabilities include its kind; any other backend refuses the job.
    """

    prompt: Prompt
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    timeouts: Timeouts = field(default_factory=Timeouts)
    request_id: str = ""
    # Salt of the backend's prefix cache. Jobs share cached prompts only if they have the same salt.
    cache_salt: str = ""
    constraint: Constraint | None = None
    # Number of alternatives whose log probabilities are reported for each token; None for no log probabilities.
    logprobs: int | None = None
    # Report log probabilities of the prompt's tokens too. Requires `logprobs` and `Capabilities.prompt_logprobs`.
    prompt_logprobs: bool = False
    # Parent span for the spans of the backend.
    trace: TraceContext | None = None
    # Callback for each chunk before the chunk is yielded. If it returns True, it has processed the chunk, which must
    # not be yielded. A backend may call it from a network callback, which saves a task switch per token. A backend need
    # not call it at all.
    on_chunk: Callable[[Chunk], bool] | None = None


# Not frozen, because creating a frozen instance takes three times as long, and one is created per network read.
@dataclass(slots=True)
class Chunk:
    """Content of one network read: several server events are merged into one chunk.

    Exactly one of `tokens` and `text` is used, and contains only what is new. Backends that return ids use `tokens`,
    which includes the stop token if the backend returns the stop token. Other backends use `text`. `finish` is set in
    the last chunk. `stop_token` is the id that ended the generation, if the backend reports this id separately.
    `prompt_tokens` and `cached_tokens` are counts that the backend reports, else None.

    If the job requests log probabilities, `logprobs` has an entry for each of the `tokens`, None if unknown.
    `prompt_logprobs` has an entry for each token of the prompt, None for the first token. It is part of the chunk with
    the first tokens, or of an earlier chunk.
    """

    tokens: Sequence[int] = ()
    text: str = ""
    finish: FinishReason | None = None
    stop_token: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    logprobs: Sequence[TokenLogprob | None] = ()
    prompt_logprobs: Sequence[TokenLogprob | None] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer, which the gateway counts itself.

    `prompt_tokens` counts the first prompt only. `completion_tokens` counts the tokens generated in all steps,
    including control tokens. `reasoning_tokens` counts the bodies of reasoning items, without control tokens.
    `tool_output_tokens` counts the results of server tools in later prompts of the answer.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    tool_output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.cached_tokens + other.cached_tokens,
            self.tool_output_tokens + other.tool_output_tokens,
        )


NO_USAGE: Final = Usage()


@dataclass(frozen=True, slots=True)
class Load:
    """Load that a server reports at one moment, including the requests of other clients.

    `running` counts the requests that are being answered. `waiting` counts accepted requests that the server has not
    begun to answer. `tokens` is the number of tokens of the running requests in the KV cache, and `cache_used` is their
    share of that cache, from 0 to 1. `tokens` and `cache_used` are None if the server does not report them.
    """

    running: int
    waiting: int
    tokens: int | None = None
    cache_used: float | None = None


def __getattr__(name: str) -> object:
    return renamed(__name__, name, {"Generation": CompletionJob, "Form": OutputForm})
