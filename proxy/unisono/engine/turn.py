"""One turn: from a conversation to a stream of events, whatever the backend does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic
from typing import Protocol, TypeAlias

from unisono.core.access import Caller
from unisono.core.conversation import AnswerForm, Conversation, Json, Tokens
from unisono.core.deadline import Deadline
from unisono.core.events import Closed, Event, HostedCall
from unisono.core.generation import Sampling
from unisono.core.observer import GenerationFacts
from unisono.core.passthrough_request import PassthroughRequest
from unisono.core.quotas import QuotaStatus
from unisono.core.route_protocol import Attempt
from unisono.core.tools import ToolServer
from unisono.core.trace_context import TraceContext
from unisono.engine.counted import PromptCache


@dataclass(frozen=True, slots=True)
class ApprovalDecision:
    """What somebody said to a call that needed approval. `call_id` is that of the call, which stands in the
    conversation without a result; `approval` the id of the request for it."""

    call_id: str
    approval: str
    approved: bool
    reason: str = ""

    @property
    def denial(self) -> str:
        """What the model reads where a result would stand, when it was not approved."""
        return f"The user did not approve this call. {self.reason}".strip()


@dataclass(frozen=True, slots=True)
class ServerTools:
    """Tools the gateway runs itself. `announced` are labels of servers whose tools the client has been told: those are
    not told again. `shown` are labels of servers whose calls the client sees, and sends back with what came of them.
    `decisions` are made before anything is generated. `max_calls` bounds the calls of the turn, `total_s` the time of
    all of it, in seconds. With `pause_after` the turn ends behind so many rounds of calls, or where its time is over,
    and its client has it go on behind what it was shown; without, the model has to answer where a bound is reached. A
    server that cannot list its tools ends the turn with its error, unless it is `optional`: then the turn goes on
    without it and says so in its Listed. `take` is called with the approval's id before an approved call is made; it
    raises what the turn ends with where the call is another turn's."""

    servers: tuple[ToolServer, ...] = ()
    announced: frozenset[str] = frozenset()
    decisions: tuple[ApprovalDecision, ...] = ()
    max_calls: int | None = None
    pause_after: int | None = None
    total_s: float = 1800.0
    optional: bool = True
    shown: frozenset[str] = frozenset()
    take: Callable[[str], Awaitable[None]] | None = None
    # False: calls of an earlier run may be missing from the journal, so that only idempotent tools are called.
    is_journal_complete: bool = True


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """The model has to call one of these first, whatever it would do. `tools` are names as the client knows them, or
    those of tools gpt-oss was trained on (`python`, `browser` for any of its functions, `browser.search`); `hosted` are
    tools the gateway runs: a server's label and the tool's own name there, None for any of the server's. With neither
    it is any tool on offer."""

    tools: frozenset[str] | None = None
    hosted: frozenset[tuple[str, str | None]] = frozenset()


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """The model may call these and no others, though all stay declared. Names as in `ForcedCalls`."""

    tools: frozenset[str] = frozenset()
    hosted: frozenset[tuple[str, str | None]] = frozenset()


Choice: TypeAlias = ForcedCalls | AllowedTools


class ForbiddenTools(StrEnum):
    """Treatment of the tools' declarations in the prompt of a turn that allows no call."""

    REMOVE = "remove"
    NOTE = "note"
    """They stay, for prompt caches, and a developer message at the end forbids calls."""
    KEEP = "keep"
    """They stay without a note."""


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt that is not rendered here, and how what comes behind it is told; nothing is read into either. It is
    `text`, in which special tokens are what they spell, and without one `tokens`. `hides_special` keeps special tokens
    out of the text that is told. `stop_tokens` end it besides those that always do; `shows_stop` has the text end in
    what ended it."""

    text: str | None = None
    tokens: Tokens = ()
    hides_special: bool = True
    stop_tokens: frozenset[int] = frozenset()
    shows_stop: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a surface asks of the engine. `model` is the group's name after aliases; `max_tokens` None means what the
    context still holds. `stop` are the client's stop strings, matched against visible text by the gateway."""

    model: str
    conversation: Conversation
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    calls_allowed: bool = True
    """False for `tool_choice: none`: no call reaches the client."""
    forbidden_tools: ForbiddenTools = ForbiddenTools.REMOVE
    parallel_calls: bool = True
    """False keeps one call of the answer and drops the later ones."""
    hold_calls: bool = True
    """False shows a call's arguments while they are generated (`stream_tool_arguments`)."""
    whole: bool = False
    """The client sees nothing before the end: the answer is one batch."""
    tenant: str = ""
    caller: Caller | None = None
    """Whose key the turn counts for; None where nobody asked for it."""
    request_id: str = ""
    surface: str = ""
    """Which API it came through, for whoever counts: `chat`, `responses`, `messages` or `completions`."""
    span: TraceContext | None = None
    """The turn's span; backends and tool servers are told of those below it. None for a turn that is not traced."""
    recorded: bool = False
    """Whether the facts of its steps hold their prompts."""
    seed: str = ""
    """What the ids of calls are derived from, so that a replayed journal has the same ones; empty for random ids."""
    journal: Tokens = ()
    """`GenerationReport.journal` of an earlier stream of this very request: this one continues after it. Its first
    batch then holds all that the journal says, and nothing else. It may be empty; no backend was asked for it."""
    lasting: bool = False
    """Whether its journal is kept, for another run to go on behind."""
    noted: Mapping[str, Json] | None = None
    """What a journal that is new begins with, for whoever starts the turn (`journal.noted_in`); nothing to a run. One
    that goes on behind such a journal has it too: without it the journal is not read."""
    truncate: bool = False
    """Whether whole oldest turns are left out of a conversation that leaves no room for an answer."""
    dated: bool = False
    """The preamble's date is the conversation's own and stands, whatever is remembered of stateless ones."""
    sticky: str = ""
    """Turns of one value go to one deployment while it works, so that its prefix cache is of use; empty for any."""
    cache_salt: str = ""
    """What keeps its prompts apart from equal ones in backends' caches; empty for nothing."""
    failover: bool = True
    """Whether another deployment goes on where one failed behind something that was shown."""
    has_other_kind: bool = False
    """Whether a deployment of the other kind answers if this turn fails before any output. Then no deployment that
    failed is asked again, and a deployment that hangs leaves time for the other one."""
    deadline: Deadline | None = None
    """The time that this turn shares with one that answered nothing; None for a time of its own."""
    hosting: ServerTools | None = None
    """Tools the gateway runs itself in this turn."""
    choice: Choice | None = None
    """None leaves it to the model. A forced choice is kept once; behind the call the choice is the model's."""
    form: AnswerForm | None = None
    """What the final answer has to be; the model is told so too."""
    reasoning_budget: int | None = None
    """Tokens of analysis after which the model has to come to something, over the whole turn."""
    unmended: frozenset[str] = frozenset()
    """Rules of `plan.SWITCHABLE` that are switched off."""
    passage: PassthroughRequest | None = None
    """The request as it came, where deployments that answer in OpenAI's own API may answer it; the engine looks at
    everything but that."""
    tools_at: str = "tools.{index}.function"
    """Where a tool stands in the request, for errors that name it."""
    schema_field: str = "parameters"
    """What its schema is called there."""
    history_at: str = "messages"
    """The request's field that holds the conversation, for errors that name it."""
    raw: RawPrompt | None = None
    """Replaces the rendered conversation, which then holds the prompt as one user message for observers. The answer
    is one text item, and `GenerationReport.journal` holds its tokens. Such a request has a token limit, and no tools,
    no answer form and no earlier journal."""
    counted: PromptCache = field(default_factory=PromptCache, compare=False, repr=False)
    """What its prompt was when it was counted, if it was."""


STEP_ENDED = 0xFFFF_FFFF
"""Stands in a journal behind the last token of a step that another one followed; no token has this id."""


def must_be_kept(batch: Sequence[Event]) -> bool:
    """Whether a batch's journal is to be kept before the next batch is asked for, by whoever keeps it: a call of a
    hosted tool is made then, and a run that goes on behind an older journal would make it again."""
    return any(
        isinstance(event, Closed) and isinstance(event.item, HostedCall) and not event.item.needs_approval
        for event in batch
    )


@dataclass(slots=True)
class GenerationReport:
    """What is known of a run besides its events; grows while it runs."""

    backend: str = ""
    failovers: int = 0
    """How often another deployment was turned to."""
    recoveries: list[str] = field(default_factory=list)
    """Rule names in order of first occurrence, each once."""
    journal: list[int] = field(default_factory=list)
    """Every token the model generated, with `STEP_ENDED` between steps, a mark where text is read for tokens, and notes
    of what the gateway did itself (see `journal.py`). Whenever a batch was yielded, all events of what is in it have
    been yielded too: kept together they let another run go on behind both. It only grows."""
    prompted: int = 0
    """Tokens of the prompt that was rendered first; 0 before that."""
    left_out: int = 0
    """Oldest turns left out of the conversation because it was too long."""
    unmet: str = ""
    """Why a forced call was not had, or an answer of the form that was asked for; empty when both were, or none was."""
    tries: Sequence[Attempt] = ()
    """Every deployment that was given, in order, with what it failed with."""
    began: float = field(default_factory=monotonic)
    """By the monotonic clock, in seconds; the times of `facts` count from it."""
    facts: GenerationFacts = field(default_factory=GenerationFacts)
    standing: QuotaStatus | None = None
    """How the caller's account stands behind it; None where it has no limits."""
    hooks: dict[str, dict[str, Json]] = field(default_factory=dict)
    """What hooks say of the answer, by their names."""
    notes: list[str] = field(default_factory=list)
    """What a client should know about this run besides what follows from its request."""
    model: str = ""
    """The requested model, after aliases."""

    @property
    def served_model(self) -> str:
        """The model that answered; empty before a deployment was given. A fallback is another one than `model`."""
        return self.tries[-1].model if self.tries else ""

    def now_s(self) -> float:
        """Seconds since it began."""
        return monotonic() - self.began


class GenerationStream(Protocol):
    """A turn in progress. Iterating yields one batch of events per network read of the backend, none empty (but the
    first behind a journal, for which no backend was asked); the last batch ends with Finished. Errors before the first
    batch are raised by the first `__anext__`, later ones in the middle. `aclose` (or cancelling the iterating task)
    frees the backend at once."""

    report: GenerationReport

    def __aiter__(self) -> AsyncIterator[list[Event]]: ...

    async def let_in(self) -> None:
        """Take what a turn needs before it begins, and raise what it is refused with, for whoever promises an answer
        before iterating, which does the same. A run that was let in is iterated or closed."""
        return

    async def aclose(self) -> None: ...


class BatchStream(GenerationStream):
    """A run whose batches come from one generator, which is closed with it."""

    _batches: AsyncGenerator[list[Event]] | None = None

    def __aiter__(self) -> AsyncIterator[list[Event]]:
        self._batches = self._each()
        return self._batches

    async def aclose(self) -> None:
        if self._batches is not None:
            await self._batches.aclose()

    @abstractmethod
    def _each(self) -> AsyncGenerator[list[Event]]:
        """The batches."""


class GenerationService(Protocol):
    """What surfaces see of the engine."""

    def start(self, turn: GenerationRequest) -> GenerationStream: ...

    async def count(self, turn: GenerationRequest) -> int:
        """Tokens of the prompt `turn` begins with; no backend is asked. Raises what the conversation and its tools are
        refused with."""
        ...
