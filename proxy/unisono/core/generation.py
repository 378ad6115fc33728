"""One generation: what a backend is asked and what it gives back, in token ids wherever the backend knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, TypeAlias

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
FIRST_SPECIAL = 199998
"""Ids from here up are special tokens; below are ordinary text (o200k_harmony)."""
VOCABULARY = 201088
"""Rows of the model's embedding: ids in range(VOCABULARY) are legal input."""

STOP_TOKENS = (RETURN, CALL)
"""Ids that end an assistant turn; always sent to the backend. Source: openai-harmony's
`stop_tokens_for_assistant_actions`."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class OutputForm(StrEnum):
    """How a backend speaks in one direction."""

    IDS = "ids"
    TEXT = "text"
    """Text in which special tokens are spelled out."""
    MARKERLESS = "markerless"
    """Text from which special tokens are stripped; output only, a last resort."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, as data. `context` is its window in tokens (prompt + output), None when unknown."""

    prompt: OutputForm
    output: OutputForm
    stop_visible: bool
    """Whether the stop token itself arrives (as an id or as text)."""
    context: int | None = None
    logit_bias: bool = False
    constrain: frozenset[str] = frozenset()
    """The kinds of `Constraint` it keeps to, by their names: a subset of CONSTRAINT_KINDS."""
    prefill: bool = True
    """Whether it goes on inside a message that another backend began."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt. `tokens` is always there; `text` only when the backend takes text, and then it has passed the
    gate: tokenised with special tokens allowed, it holds exactly the structural markers that were rendered."""

    tokens: Sequence[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sent explicitly, every field, every time: engines have defaults of their own. `top_k` 0 means off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. `silence_s` is the longest gap between chunks after the first; `total_s` the whole answer."""

    connect_s: float = 10.0
    first_token_s: float = 300.0
    silence_s: float = 120.0
    total_s: float = 600.0


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that the schema allows. It is sent as it is, so it should be one that `unisono.schemas` has checked."""

    schema: Mapping[str, object]
    kind: ClassVar[str] = "json_schema"


@dataclass(frozen=True, slots=True)
class AnyJson:
    """A JSON object, whatever it holds."""

    kind: ClassVar[str] = "json_object"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of these texts, to the letter; none of them empty, and at least one."""

    texts: tuple[str, ...]
    kind: ClassVar[str] = "choice"


Constraint: TypeAlias = JsonSchema | AnyJson | OneOf
"""What the whole generation has to be, from its first token to the stop token behind it: the prompt ends where a
message's body begins, and no marker can be written but the one that ends the turn."""

CONSTRAINT_KINDS = (JsonSchema.kind, AnyJson.kind, OneOf.kind)


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """A job for a backend. Stop tokens are STOP_TOKENS, always; client stop strings never reach a backend.

    `constraint` is for a backend whose capabilities hold its kind; any other refuses the job.
    """

    prompt: Prompt
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    timeouts: Timeouts = field(default_factory=Timeouts)
    request_id: str = ""
    cache_salt: str = ""
    """Separates tenants in a backend's prefix cache; empty for none."""
    constraint: Constraint | None = None
    trace: TraceContext | None = None
    """The span it is generated in, for the backend to go on below it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one network read brought: several server events are merged into one chunk.

    Exactly one of `tokens` (ids backends; a delta, the stop id included where visible) and `text` (text backends; a
    delta) is used. The last chunk has `finish`. `stop_token` is the id that ended generation where the backend names
    it although it is not in `tokens`. Counts are the backend's own claim, None when it makes none.
    """

    tokens: Sequence[int] = ()
    text: str = ""
    finish: FinishReason | None = None
    stop_token: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, counted by the gateway from ids. `prompt_tokens` are those of an answer's first prompt,
    `completion_tokens` what was generated in all of its steps; `reasoning_tokens` are the bodies of reasoning items;
    control tokens count in `completion_tokens` only. `tool_output_tokens` are results of hosted tools that later
    prompts of the answer held."""

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


@dataclass(frozen=True, slots=True)
class Load:
    """What a server says of its own load at one moment, requests of others included. `running` are the requests it is
    generating for, `waiting` those that it has taken and not begun. `tokens` are what those that run hold in its KV
    cache, and `cache_used` the part of that cache which this is, from 0 to 1; None where it does not say."""

    running: int
    waiting: int
    tokens: int | None = None
    cache_used: float | None = None


def __getattr__(name: str) -> object:
    return renamed(__name__, name, {"Generation": CompletionJob, "Form": OutputForm})
