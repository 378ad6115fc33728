"""Generation requests, generation streams and generation reports."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from time import monotonic
from typing import Protocol, TypeAlias

from unisono.core.access import Caller
from unisono.core.answer_times import Deadline
from unisono.core.choice_group import ChoiceGroup
from unisono.core.conversation import AnswerForm, AssistantCall, Conversation, Json, Tokens
from unisono.core.events import Closed, Event
from unisono.core.frozen import dataclass
from unisono.core.generation import Sampling
from unisono.core.observer import GenerationFacts
from unisono.core.passthrough_request import PassthroughRequest
from unisono.core.quotas import QuotaStatus
from unisono.core.route_protocol import Attempt
from unisono.core.tool_host import ToolSearch, ToolServer, UserAnswer
from unisono.core.trace_context import TraceContext


@dataclass(frozen=True, slots=True)
class ApprovalDecision:
    """A user's decision on a call that required approval.

    `call_id` identifies the call, which is in the conversation without a result. `approval` is the id of the approval
    request. `answer` is set if the tool asked the user a question; it is passed to the tool even if the user declined.
    `arguments` are the arguments for the tool; None for those in the conversation, which hooks may have changed.
    """

    call_id: str
    approval: str
    approved: bool
    reason: str = ""
    answer: UserAnswer | None = None
    arguments: str | None = None

    @property
    def denial(self) -> str:
        """Return the text that the model reads instead of a result if the call was denied."""
        return f"The user did not approve this call. {self.reason}".strip()


@dataclass(frozen=True, slots=True)
class ServerTools:
    """Tools that the gateway runs itself.

    `announced`: labels of servers whose tools were already listed for the client; these tools are not listed again.
    `visible`: labels of servers whose calls the client sees and sends back with their results. `decisions` are applied
    before anything is generated.

    `max_calls` limits the number of calls in the request; None for no limit. `total_s` limits the total time of the
    calls in seconds. With `pause_after`, the answer pauses after that number of rounds of calls, or when this time has
    passed. The client then continues the answer in another request. If `pause_after` is None, the model has to answer
    when a limit is reached.

    If a server cannot list its tools, the request fails with the server's error. If `optional` is set, the request
    instead continues without the server, whose Listed event reports the error. `claim_approval` is called with the
    approval's id before an approved call runs. It raises an error, which ends the request, if a different request owns
    the call. `can_ask`: the client can answer questions of tools. `seal_calls` encrypts calls that wait for the user.
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
    search: ToolSearch | None = None  # search for deferred tools; `servers` contains its server too
    can_ask: bool = False
    seal_calls: Callable[[Sequence[AssistantCall]], Awaitable[str]] | None = None


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """Tools of which the model has to call one before it may answer.

    `tools` are names known to the client, or names of built-in gpt-oss tools: `python`, `browser` for any browser
    function, or a single function such as `browser.search`. `hosted` are server tools as pairs of server label and tool
    name. The tool name is the server's name for the tool; None means any tool of the server. If `tools` is None and
    `hosted` is empty, a call to any offered tool is enough. `exclusive`: later calls must also be to these tools.
    """

    tools: frozenset[str] | None = None
    hosted: frozenset[tuple[str, str | None]] = frozenset()
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """The only tools that the model may call; the prompt still declares all tools.

    Names are as in `ForcedCalls`.
    """

    tools: frozenset[str] = frozenset()
    hosted: frozenset[tuple[str, str | None]] = frozenset()


Choice: TypeAlias = ForcedCalls | AllowedTools


class ForbiddenTools(StrEnum):
    """Handling of the tool declarations in the prompt if the request allows no calls."""

    REMOVE = "remove"
    NOTE = "note"  # keep the declarations, for prompt caches, and forbid calls in a developer message at the end
    KEEP = "keep"  # keep the declarations without a message


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt that is sent unchanged, and options for its output; neither is parsed.

    The prompt is `text`, or `tokens` if `text` is None. Spellings of special tokens in `text` become special tokens.
    `hides_special` removes special tokens from the emitted text. `stop_tokens` end the output in addition to the
    model's own stop tokens. With `shows_stop`, the emitted text includes the stop string or stop token that ended it.
    `has_prompt_logprobs`: report log probabilities of the prompt's tokens too. `is_fixed`: hooks cannot change the
    prompt, because its text may contain spellings of special tokens that a client wrote as text.
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
    """Names of request fields for error messages; None if the API has no such field.

    `tool` is the path of a declared tool; `{index}` is replaced by the tool's index. `tool_schema` is the name of the
    field within the tool that contains its schema.
    """

    conversation: str | None = None
    tools: str | None = None
    tool: str = "{index}"
    tool_schema: str = "schema"
    logit_bias: str | None = None
    logprobs: str | None = None
    sampling: frozenset[str] = field(default=frozenset(), compare=False)  # sampling fields that the client sent


class RequestKey:
    """Identity of a request. Modified copies of a request share the key of the original."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Requirements for the answer, and options for emitting the answer.

    If `max_tokens` is None, the answer may fill the rest of the context window. `stop` are the client's stop strings;
    the gateway searches the visible text for them.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    calls_allowed: bool = True  # False for `tool_choice: none`: no call reaches the client
    forbidden_tools: ForbiddenTools = ForbiddenTools.REMOVE
    parallel_calls: bool = True  # False: emit one call of the answer and drop later calls
    # None leaves the choice to the model. A forced choice applies to one call; afterwards the model chooses.
    choice: Choice | None = None
    form: AnswerForm | None = None  # required form of the final answer, also stated in the prompt
    # Largest number of analysis tokens in the whole answer. After that, the model has to answer or to call a tool.
    reasoning_budget: int | None = None
    disabled_rules: frozenset[str] = frozenset()  # rules of `recovery_rules.SWITCHABLE` that are switched off
    hold_calls: bool = True  # False: emit a call's arguments while they are generated (`stream_tool_arguments`)
    whole: bool = False  # emit the answer as one batch at its end


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Sender and identity of a request."""

    tenant: str = ""
    caller: Caller | None = None  # owner of the API key that is charged; None for requests of the gateway itself
    request_id: str = ""
    surface: str = ""  # API surface, for metrics: `chat`, `responses`, `messages` or `completions`
    is_streamed: bool = True  # False if the client receives the answer only when it is complete
    # trace span of the request, parent of the spans of backends and tool servers; None if the request is not traced
    span: TraceContext | None = None
    recoveries: tuple[str, ...] = ()  # recovery rules that were applied to the request itself
    key: RequestKey = field(default_factory=RequestKey, compare=False, repr=False)
    is_admitted: bool = False  # True for an answer after a compaction: its summary was admitted and counted
    choices: ChoiceGroup | None = field(default=None, compare=False, repr=False)  # None if the request has one choice


RecordAnswer: TypeAlias = Callable[[Sequence[Closed]], None]  # records the items of an answer in the conversation cache


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options for the prompt of a conversation."""

    truncate: bool = False  # drop the oldest items of the conversation if they leave no room for an answer
    counted_window: int | None = None  # window to which `count` truncates the prompt; None to count all items
    for_summary: bool = False  # the last item asks for a summary; with `truncate`, long texts may be shortened too
    keeps_date: bool = False  # keep the preamble's date, even if the conversation cache has a different date
    is_restored: bool = False  # the conversation cache has already restored the conversation and its date
    records_prompts: bool = False  # include the prompts in the facts of the steps
    # called with the function that records the answer; set by a gate that may change the answer before that
    leave_record: Callable[[RecordAnswer], None] | None = field(default=None, compare=False, repr=False)
    fields: RequestFields = field(default_factory=RequestFields)


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """Options for the choice of deployments."""

    # Requests with the same value use the same deployment while it works, for its prefix cache; empty for any.
    sticky: str = ""
    excluded: frozenset[str] = frozenset()  # names of deployments that must not be used
    # Backends share cached prompts only between requests with the same salt; empty for no salt.
    cache_salt: str = ""
    failover: bool = True  # continue on another deployment if a deployment fails after output was emitted
    # If this request fails before any output, the caller sends it to deployments of the other kind (Harmony or
    # pass-through). Before output, failed deployments are not retried, and some time is kept for the other kind.
    has_other_kind: bool = False
    # Deadline shared with other requests: with an earlier request to the other kind, which produced no output, or with
    # the other parts of a request that was split. None for a new deadline.
    deadline: Deadline | None = None


@dataclass(frozen=True, slots=True)
class Resumption:
    """Earlier output that a generation continues, and data for a later continuation."""

    seed: str = ""  # seed of the call ids, so that a replayed journal has the same ids; empty for random ids
    # `GenerationReport.journal` of an earlier stream of this request, which this stream continues; empty for a new
    # answer. With a journal, the first batch contains exactly the events of the journal, and may be empty.
    journal: Tokens = ()
    # False if calls to server tools may have run that are not in the journal. Only idempotent tools are then called.
    is_journal_complete: bool = True
    is_journal_stored: bool = False  # the journal is stored, so that another stream can continue after it
    is_taken_over: bool = False  # another process accepted the request, and may have begun the answer
    is_reported_elsewhere: bool = False  # another process reports the generation to the observers
    # Data of the component that starts the request. It becomes the first entry of a new journal (`journal.noted_in`).
    # The engine ignores the content. A request that continues such a journal without this field is rejected.
    journal_note: Mapping[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request of an API surface to the engine."""

    model: str  # name of the model group, after alias resolution
    conversation: Conversation
    answer: AnswerOptions = field(default_factory=AnswerOptions)
    origin: RequestOrigin = field(default_factory=RequestOrigin)
    prompt: PromptOptions = field(default_factory=PromptOptions)
    routing: RoutingOptions = field(default_factory=RoutingOptions)
    resumption: Resumption = field(default_factory=Resumption)
    server_tools: ServerTools | None = None  # tools that the gateway runs itself in this request
    # The original request, if pass-through deployments may answer it. The engine generates from the other fields.
    passthrough: PassthroughRequest | None = None
    # Prompt that is sent instead of the rendered conversation. `conversation` then contains this prompt as one user
    # message, for observers. The answer is one text item, and `GenerationReport.journal` contains its tokens. Such a
    # request has a token limit, but no tools, no answer form and no earlier journal.
    raw: RawPrompt | None = None
    # Number of alternatives whose log probabilities are reported for each visible token, in `GenerationReport.facts`.
    # None: no log probabilities are reported.
    logprobs: int | None = None

    def with_options(
        self,
        *,
        origin: RequestOrigin | None = None,
        prompt: PromptOptions | None = None,
        routing: RoutingOptions | None = None,
        resumption: Resumption | None = None,
    ) -> GenerationRequest:
        """Return a copy with the given options; None leaves an option unchanged.

        This is five times as fast as `dataclasses.replace`.
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
    """Facts about a generation stream besides its events; updated while the stream runs."""

    backend: str = ""
    failovers: int = 0  # number of attempts that moved to another deployment
    recoveries: list[str] = field(default_factory=list)  # rule names in order of first occurrence, each once
    # All generated tokens, with marks between them and entries for the gateway's own actions (see `journal.py`). After
    # each yielded batch, the journal matches the events so far, so another stream can continue the answer after them.
    # Numbers are only appended.
    journal: list[int] = field(default_factory=list)
    # reason why a forced call or the required answer form is missing; empty if no requirement is violated
    unmet: str = ""
    tries: Sequence[Attempt] = ()  # every attempt in order, with its deployment and failure
    # start of the stream in seconds of the monotonic clock; the times of `facts` are relative to this start
    began: float = field(default_factory=monotonic)
    facts: GenerationFacts = field(default_factory=GenerationFacts)
    standing: QuotaStatus | None = None  # the caller's quota status after the answer; None without limits
    hooks: dict[str, dict[str, Json]] = field(default_factory=dict)  # data of hooks about the answer, by hook name
    notes: list[str] = field(default_factory=list)  # notes for the client about events during the generation
    model: str = ""  # the requested model, after alias resolution

    @property
    def served_model(self) -> str:
        """Return the model that answered; empty before a deployment is assigned."""
        return self.tries[-1].model if self.tries else ""

    def now_s(self) -> float:
        """Return the seconds since `began`."""
        return monotonic() - self.began


# Callback that delivers a batch immediately and returns True. If it cannot do so, it has no effect and returns False.
# An error that the callback raises ends the stream.
BatchSink: TypeAlias = Callable[[list[Event]], bool]


class GenerationStream(Protocol):
    """An answer in progress, as batches of events that follow the backend's network reads.

    No batch is empty, except that the first batch of a stream that continues a journal may be empty. The last batch
    ends with Finished.

    The first `__anext__` raises errors that occur before the first batch; later errors are raised during iteration.
    `aclose`, or cancelling the iterating task, releases the backend immediately.

    A consumer may set `sink` before it iterates. While the consumer waits for the next batch, the stream may then pass
    a batch of one delta to `sink` instead of yielding it. The order of the answer is preserved. This is faster, because
    the batch does not pass through the iterators around the backend's stream.
    """

    report: GenerationReport
    sink: BatchSink | None = None

    def __aiter__(self) -> AsyncIterator[list[Event]]: ...

    async def admit(self) -> None:
        """Acquire the resources that the request needs; raise an error if the request is refused.

        A caller may use this to confirm the request to its client before it iterates. Without `admit`, iterating
        acquires the same resources. After `admit`, the stream must be iterated or closed.
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
        """Return the number of tokens of the request's first prompt, without a request to a backend.

        Raises InvalidRequest or a related error if the conversation or a tool is invalid.
        """
