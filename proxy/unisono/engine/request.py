"""Generation requests, generation streams and generation reports."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from time import monotonic
from typing import Protocol, TypeAlias

from unisono.core.access import Caller
from unisono.core.conversation import AnswerForm, Conversation, Json, Tokens
from unisono.core.deadline import Deadline
from unisono.core.elicitation import UserAnswer
from unisono.core.events import Event
from unisono.core.frozen import dataclass
from unisono.core.generation import Sampling
from unisono.core.observer import GenerationFacts
from unisono.core.passthrough_request import PassthroughRequest
from unisono.core.quotas import QuotaStatus
from unisono.core.route_protocol import Attempt
from unisono.core.tools import ToolSearch, ToolServer
from unisono.core.trace_context import TraceContext


@dataclass(frozen=True, slots=True)
class ApprovalDecision:
    """A user's decision on a call that required approval.

    `call_id` identifies the call, which is in the conversation without a result. `approval` is the id of the approval
    request. A decision with an `answer` is one on a question of the tool, which is told any answer.
    """

    call_id: str
    approval: str
    approved: bool
    reason: str = ""
    answer: UserAnswer | None = None

    @property
    def denial(self) -> str:
        """Return the text that the model reads instead of a result if the call was denied."""
        return f"The user did not approve this call. {self.reason}".strip()


@dataclass(frozen=True, slots=True)
class ServerTools:
    """Tools that the gateway runs itself.

    `announced`: labels of servers whose tools were already listed for the client; they are not listed again. `visible`:
    labels of servers whose calls the client sees and sends back with their results. `decisions` are applied before
    anything is generated.

    `max_calls` limits the calls of the request, and `total_s` its total time in seconds. With `pause_after`, the answer
    ends after that number of rounds of calls, or when its time has passed. The client then continues it in another
    request. Without `pause_after`, the model has to answer when a limit is reached.

    If a server cannot list its tools, the request fails with that error. If `optional` is set, the request continues
    without the server, and its Listed event reports the error. `claim_approval` is called with the approval's id
    before an approved call is made. It raises the error that ends the request if another request owns the call.
    `can_ask`: the client can answer questions of tools.
    """

    servers: tuple[ToolServer, ...] = ()
    announced: frozenset[str] = frozenset()
    decisions: tuple[ApprovalDecision, ...] = ()
    max_calls: int | None = None
    pause_after: int | None = None
    total_s: float = 1800.0
    optional: bool = True
    visible: frozenset[str] = frozenset()
    claim_approval: Callable[[str], Awaitable[None]] | None = None
    search: ToolSearch | None = None  # its server is one of `servers`
    can_ask: bool = False
    # False: calls of an earlier stream may be missing from the journal, so that only idempotent tools are called.
    is_journal_complete: bool = True


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """Tools of which the model has to call one first.

    `tools` are names known to the client, or names of built-in gpt-oss tools: `python`, `browser` for any of its
    functions, or `browser.search`. `hosted` are server tools as (server label, tool name). The tool name is the
    server's own; None stands for any tool of the server. If `tools` is None and `hosted` is empty, any offered tool
    satisfies the request.
    """

    tools: frozenset[str] | None = None
    hosted: frozenset[tuple[str, str | None]] = frozenset()


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """The only tools that the model may call, although all stay declared.

    Names are given as in `ForcedCalls`.
    """

    tools: frozenset[str] = frozenset()
    hosted: frozenset[tuple[str, str | None]] = frozenset()


Choice: TypeAlias = ForcedCalls | AllowedTools


class ForbiddenTools(StrEnum):
    """Treatment of the tool declarations in the prompt of a request that allows no calls."""

    REMOVE = "remove"
    NOTE = "note"  # keep the declarations, for prompt caches, and forbid calls in a developer message at the end
    KEEP = "keep"  # keep the declarations without a message


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt that is not rendered here, and options for its output; neither is parsed.

    The prompt is `text`, in which special tokens are encoded as such, or `tokens` if `text` is None. `hides_special`
    removes special tokens from the emitted text. `stop_tokens` end the output in addition to the model's own stop
    tokens. With `shows_stop`, the emitted text includes the stop string or stop token that ended it.
    `has_prompt_logprobs` adds the prompt's tokens to the log probabilities that the request asks for. A prompt that
    `is_fixed` cannot be changed by hooks: its text may contain special tokens that a client wrote as text.
    """

    text: str | None = None
    tokens: Tokens = ()
    hides_special: bool = True
    stop_tokens: frozenset[int] = frozenset()
    shows_stop: bool = False
    has_prompt_logprobs: bool = False
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class RequestFields:
    """Fields of a request as the client knows them, for errors; the API surface states them.

    `tool` is the path of a declared tool, with its `{index}`. `tool_schema` is the field of the schema in it.
    """

    conversation: str | None = None
    tools: str | None = None
    tool: str = "{index}"
    tool_schema: str = "schema"
    logit_bias: str | None = None
    logprobs: str | None = None


class RequestKey:
    """Identity of a request, shared by its modified copies."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Requirements on the answer, and how it is emitted.

    `max_tokens` None stands for the rest of the context window. `stop` are the client's stop strings; the gateway
    matches them against visible text.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    calls_allowed: bool = True  # False for `tool_choice: none`: no call reaches the client
    forbidden_tools: ForbiddenTools = ForbiddenTools.REMOVE
    parallel_calls: bool = True  # False: emit one call of the answer and drop the later ones
    # None leaves the choice to the model. A forced choice applies to one call; afterwards the model chooses.
    choice: Choice | None = None
    form: AnswerForm | None = None  # required form of the final answer, also stated in the prompt
    # Limit of analysis tokens over the whole answer; then the model has to answer or to call a tool.
    reasoning_budget: int | None = None
    disabled_rules: frozenset[str] = frozenset()  # rules of `recovery_rules.SWITCHABLE` that are switched off
    hold_calls: bool = True  # False: emit a call's arguments while they are generated (`stream_tool_arguments`)
    whole: bool = False  # emit the answer as one batch at its end


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Sender and identity of a request."""

    tenant: str = ""
    # owner of the API key that usage is charged to; None for requests of the gateway itself
    caller: Caller | None = None
    request_id: str = ""
    surface: str = ""  # API surface, for metrics: `chat`, `responses`, `messages` or `completions`
    # The request's trace span, parent of the spans sent to backends and tool servers; None if the request is not
    # traced.
    span: TraceContext | None = None
    recoveries: tuple[str, ...] = ()  # recovery rules that were applied to the request itself
    key: RequestKey = field(default_factory=RequestKey, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options for the prompt of a conversation."""

    truncate: bool = False  # drop whole oldest conversation turns if they leave no room for an answer
    keeps_date: bool = False  # keep the preamble's date, even if the conversation cache has another one
    records_prompts: bool = False  # include the prompts in the facts of the steps
    fields: RequestFields = field(default_factory=RequestFields)


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """Options for the choice of deployments."""

    # Requests with the same value use the same deployment while it works, so that its prefix cache is reused; empty for
    # any deployment.
    sticky: str = ""
    excluded: frozenset[str] = frozenset()  # names of deployments that must not be used
    cache_salt: str = ""  # salt that separates its prompts from equal ones in backend caches; empty for none
    failover: bool = True  # continue on another deployment if one fails after output was emitted
    # A deployment of the other kind (engine or pass-through) answers if this request fails before any output. Then
    # failed deployments are not retried, and an unresponsive deployment leaves time for the other kind.
    has_other_kind: bool = False
    # deadline shared with the attempt of the other kind that produced no output; None for a deadline of its own
    deadline: Deadline | None = None


@dataclass(frozen=True, slots=True)
class Resumption:
    """Earlier output that a generation continues, and data for a later continuation."""

    seed: str = ""  # seed of the call ids, so that a replayed journal has the same ids; empty for random ids
    # `GenerationReport.journal` of an earlier stream of this request; this stream continues after it. The first batch
    # then contains all events of the journal and nothing else. That batch may be empty, since no backend generates for
    # it.
    journal: Tokens = ()
    is_journal_stored: bool = False  # the journal is stored, so that another stream can continue after it
    # Data of the component that starts the request, stored as the first entry of a new journal (`journal.noted_in`).
    # The engine ignores the content. A stream that continues such a journal must have it too: without it the journal is
    # rejected.
    journal_note: Mapping[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request of an API surface to the engine.

    `model` is the model group's name after alias resolution.
    """

    model: str
    conversation: Conversation
    answer: AnswerOptions = field(default_factory=AnswerOptions)
    origin: RequestOrigin = field(default_factory=RequestOrigin)
    prompt: PromptOptions = field(default_factory=PromptOptions)
    routing: RoutingOptions = field(default_factory=RoutingOptions)
    resumption: Resumption = field(default_factory=Resumption)
    server_tools: ServerTools | None = None  # tools that the gateway runs itself in this request
    # The original request, if pass-through deployments may answer it. The engine generates from the other fields.
    passthrough: PassthroughRequest | None = None
    # Replaces the rendered conversation, which then contains the prompt as one user message for observers. The answer
    # is one text item, and `GenerationReport.journal` contains its tokens. Such a request has a token limit, but no
    # tools, no answer form and no earlier journal.
    raw: RawPrompt | None = None
    # Number of alternatives to report the log probability of, for each visible token; None for no log probabilities.
    # They are in `GenerationReport.facts`.
    logprobs: int | None = None

    def with_options(
        self,
        *,
        origin: RequestOrigin | None = None,
        prompt: PromptOptions | None = None,
        routing: RoutingOptions | None = None,
        resumption: Resumption | None = None,
    ) -> GenerationRequest:
        """Return a copy with the given options; None keeps the present ones.

        `dataclasses.replace` takes five times as long.
        """
        return GenerationRequest(
            self.model,
            self.conversation,
            self.answer,
            origin or self.origin,
            prompt or self.prompt,
            routing or self.routing,
            resumption or self.resumption,
            self.server_tools,
            self.passthrough,
            self.raw,
            self.logprobs,
        )


@dataclass(slots=True)
class GenerationReport:
    """Facts about a generation stream besides its events; updated while it runs."""

    backend: str = ""
    failovers: int = 0  # number of attempts that moved to another deployment
    recoveries: list[str] = field(default_factory=list)  # rule names in order of first occurrence, each once
    # All generated tokens, with `STEP_ENDED` between steps, marks for tokens made from text, and entries for the
    # gateway's own actions (see `journal.py`). After each yielded batch, the journal matches the events so far: with
    # both, another stream can continue the answer. It only grows.
    journal: list[int] = field(default_factory=list)
    # Reason why a forced call or the required answer form is missing; empty if the requirements are met or there are
    # none.
    unmet: str = ""
    tries: Sequence[Attempt] = ()  # every deployment that was assigned, in order, with its error
    # monotonic clock, in seconds; the times of `facts` are relative to it
    began: float = field(default_factory=monotonic)
    facts: GenerationFacts = field(default_factory=GenerationFacts)
    standing: QuotaStatus | None = None  # the caller's quota status after the answer; None without limits
    # data that hooks report about the answer, by hook name
    hooks: dict[str, dict[str, Json]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # notes for the client that do not follow from its request
    model: str = ""  # the requested model, after alias resolution

    @property
    def served_model(self) -> str:
        """Return the model that answered, which differs from `model` after a fallback.

        The value is empty before a deployment is assigned.
        """
        return self.tries[-1].model if self.tries else ""

    def now_s(self) -> float:
        """Return the seconds since `began`."""
        return monotonic() - self.began


# Takes a batch and returns True; or returns False, without any effect, if it cannot deliver the batch at once. An error
# that it raises ends the stream.
BatchSink: TypeAlias = Callable[[list[Event]], bool]


class GenerationStream(Protocol):
    """An answer in progress, as batches of events.

    Iterating yields one batch per network read of the backend, unless `sink` takes it. No batch is empty, except the
    first one after a journal, which needs no backend. The last batch ends with Finished.

    The first `__anext__` raises errors that occur before the first batch; later errors are raised during iteration.
    `aclose`, or cancelling the iterating task, releases the backend immediately.

    A consumer may set `sink` before it iterates. Batches of one delta may then go there instead, in the order of the
    answer, while the consumer waits for the next batch. They skip the iterators around the stream of the backend.
    """

    report: GenerationReport
    sink: BatchSink | None = None

    def __aiter__(self) -> AsyncIterator[list[Event]]: ...

    async def admit(self) -> None:
        """Acquire the resources that the request needs, and raise the error if it is refused.

        Callers use it to promise an answer before they iterate; iterating does the same. After `admit` the stream must
        be iterated or closed.
        """
        return

    async def aclose(self) -> None: ...


class BatchStream(GenerationStream):
    """A stream whose batches come from one generator; `aclose` closes the generator."""

    _batches: AsyncGenerator[list[Event]] | None = None

    def __aiter__(self) -> AsyncIterator[list[Event]]:
        self._batches = self._each()
        return self._batches

    async def aclose(self) -> None:
        if self._batches is not None:
            await self._batches.aclose()

    @abstractmethod
    def _each(self) -> AsyncGenerator[list[Event]]:
        """Yield the batches."""


class GenerationService(Protocol):
    """Interface of the engine for API surfaces."""

    def start(self, request: GenerationRequest) -> GenerationStream: ...

    async def count(self, request: GenerationRequest) -> int:
        """Return the number of tokens of the request's first prompt, without asking a backend.

        Raises the errors of an invalid conversation or invalid tools.
        """
        ...
