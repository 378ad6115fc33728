"""Facts about generations, and outputs of live answers, for telemetry and viewers.

Times are seconds of the monotonic clock since the generation began. Only `GenerationStarted.at` is a time of the wall
clock. The answer waits while an observer is called, so an observer only stores the facts and does its work elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Final, Protocol

from unisono.core.billed_units import NO_UNITS, BilledUnits
from unisono.core.conversation import Conversation, Json
from unisono.core.emitted_logprobs import LogprobLog
from unisono.core.events import Closed, Repaired
from unisono.core.frozen import dataclass
from unisono.core.generation import NO_USAGE, Sampling, Usage
from unisono.core.route_protocol import Attempt
from unisono.core.trace_context import RequestIdentity, TraceContext


class GenerationOutcome(StrEnum):
    """Outcome of a generation."""

    COMPLETED = "completed"
    FAILED = "failed"
    # The client left before the end.
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """Start of a generation.

    `key` is the public id of a virtual key, and `key_name` its alias. `model` is the name of a model group in the
    configuration. `at` is the time in seconds since 1970. `span` is the trace span of the generation, and `span_parent`
    the id of the parent span. `recorded_request` is the request in the format of `engine.replay`, if the generation is
    recorded. Requests with the same `workload` come from one client and have the same tools and answer form. The value
    is a hash that is valid only within this process. `influences` is None unless the prompts of the steps are recorded.
    """

    request_id: str
    tenant: str
    key: str
    surface: str
    model: str
    background: bool
    at: float
    # True if this generation continues an interrupted generation.
    resumed: bool = False
    span: TraceContext | None = None
    span_parent: str = ""
    recorded_request: Mapping[str, Json] | None = None
    key_name: str = ""
    details: RequestDetails | None = None
    workload: int = 0
    influences: TokenInfluences | None = None


@dataclass(frozen=True, slots=True)
class TokenInfluences:
    """Options of a request that can change which tokens the model chooses."""

    sampling: Sampling
    is_raw_prompt: bool
    has_form: bool
    has_tool_choice: bool
    has_strict_tools: bool
    has_reasoning_budget: bool


@dataclass(frozen=True, slots=True)
class RequestDetails:
    """Request of a traced generation.

    `conversation` is None unless traces include the content of requests.
    """

    identity: RequestIdentity
    sampling: Sampling
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True)
class SlotWait:
    """Wait for a slot; `failure` is the error code if no slot was available."""

    started_s: float
    ended_s: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class StepDone:
    """One generation on one deployment.

    A step of the answer has several generations if one failed, or if the gateway inserted tokens. `step` is the 0-based
    number of the step. `prompt_tokens` counts the whole prompt. `cached_tokens` is the number of these tokens that the
    backend reports as cached, None if not reported. `finish` is the finish reason, empty if the gateway stopped the
    generation. `failure` is the error code, empty without a failure. `gaps` counts the times between tokens in the
    buckets of `GAPS_S`; `gaps_s` is the sum of these times. `prompt` are the tokens of the prompt, if the generation is
    recorded.
    """

    step: int
    deployment: str
    started_s: float
    first_token_s: float | None
    ended_s: float
    prompt_tokens: int
    cached_tokens: int | None
    generated: int
    finish: str = ""
    failure: str = ""
    gaps: Sequence[int] = ()
    gaps_s: float = 0.0
    prompt: Sequence[int] = ()
    # Billed units other than tokens, such as images.
    units: BilledUnits = NO_UNITS


@dataclass(frozen=True, slots=True)
class RefusedConstraint:
    """Constraint that was left out of a generation, because the backend had failed on it.

    `reason` is `rejected`, a symptom of the failure (`server_error`, `disconnected`), or `remembered`. `remembered`
    means that the constraint was not sent, because the backend had failed on the same constraint before.
    """

    deployment: str
    reason: str


class ToolEnd(StrEnum):
    """Outcome of a server tool call."""

    OK = "ok"
    ERROR = "error"
    # The call may have been carried out.
    UNKNOWN = "unknown"
    # The client left during the call.
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class ToolDone:
    """One server tool call that ended, with its outcome.

    `server` is the label of the tool server, `call_id` the id of the model's call.
    """

    server: str
    name: str
    call_id: str
    started_s: float
    ended_s: float
    outcome: ToolEnd


@dataclass(slots=True)
class GenerationFacts:
    """Facts about a running generation; they are updated with each step, not with each token."""

    waits: list[SlotWait] = field(default_factory=list)
    steps: list[StepDone] = field(default_factory=list)
    tools: list[ToolDone] = field(default_factory=list)
    refused_constraints: list[RefusedConstraint] = field(default_factory=list)
    # Tokens of the first rendered prompt, or of all inputs of an embeddings request; 0 if unknown.
    prompt_tokens: int = 0
    # Reasoning tokens of the answer so far, including those in its journal. Set when the stream ends.
    reasoning_tokens: int = 0
    tool_output_tokens: int = 0  # tokens of the results of server tools in rendered prompts
    left_out: int = 0  # oldest items dropped because the conversation was too long
    shortened: int = 0  # texts shortened because the newest items alone were too long for a summary
    logprobs: LogprobLog | None = None  # set if the request asks for log probabilities
    replaced_prompt: str | None = None  # the raw prompt, if a hook has replaced it
    # Number of tokens at which the answer has filled the context window; None if `max_tokens` ends it earlier.
    window_limit: int | None = None
    cost: int = 0  # price of the usage, in the unit of `quotas.TokenUsage`; 0 before the end
    part_backends: Sequence[str] = ()  # all deployments, if several answered parts of the request
    is_masked: bool = False  # a hook has changed the text of the answer, so that its tokens must not be emitted
    sibling_failure: Exception | None = None  # error of another choice of the request, which ended this generation

    @property
    def usage(self) -> Usage:
        """Usage so far, for a generation that does not complete."""
        if not self.steps:
            return Usage()
        generated = sum(step.generated for step in self.steps)
        return Usage(
            # The prompt of the first step may be only one part of the inputs, or include the tokens of a journal.
            prompt_tokens=self.prompt_tokens or self.steps[0].prompt_tokens,
            completion_tokens=generated,
            # `reasoning_tokens` includes the tokens of a journal, but the steps do not.
            reasoning_tokens=min(self.reasoning_tokens, generated),
            cached_tokens=self.steps[0].cached_tokens or 0,
            tool_output_tokens=self.tool_output_tokens,
        )


@dataclass(frozen=True, slots=True)
class GenerationDone:
    """End of a generation.

    `first_s` is the time at which the first events reached the API surface. `error` is an error code, empty without an
    error. `channels` counts the tokens in the bodies of complete messages, by kind: `analysis`, `commentary`, `final`,
    `call` for calls that the client runs, `hosted_call` for calls that the gateway runs. `recoveries` are rule names,
    each once; `repairs` are the individual repairs in the emitted part of the answer. `journal` is the journal of the
    stream (`GenerationReport.journal`). If the generation is recorded, `output` contains all items and repairs in
    order, including those of an earlier interrupted generation. `cut_off` is the item inside which the answer ended; it
    is not part of `output`, because a replay of the journal does not yield it. `usage` is None if the generation did
    not complete; `usage_so_far` is then the usage until the generation ended.
    """

    start: GenerationStarted
    ended_s: float
    outcome: GenerationOutcome
    first_s: float | None = None
    error: str = ""
    finish: str = ""
    usage: Usage | None = None
    channels: Mapping[str, int] = field(default_factory=dict)
    recoveries: Sequence[str] = ()
    repairs: Sequence[Repaired] = ()
    waits: Sequence[SlotWait] = ()
    steps: Sequence[StepDone] = ()
    tools: Sequence[ToolDone] = ()
    refused_constraints: Sequence[RefusedConstraint] = ()
    tries: Sequence[Attempt] = ()
    backend: str = ""
    failovers: int = 0
    left_out: int = 0
    unmet: str = ""
    journal: Sequence[int] = ()
    output: Sequence[Closed | Repaired] = ()
    cut_off: Closed | None = None
    usage_so_far: Usage = field(default_factory=Usage)
    cost: int = 0

    @property
    def charged_usage(self) -> Usage:
        """Charged usage: zero if the generation failed before a server had begun an answer."""
        usage = self.usage or self.usage_so_far
        is_free = self.outcome is GenerationOutcome.FAILED and not has_begun(usage, self.steps)
        return NO_USAGE if is_free else usage

    @property
    def waited_s(self) -> float:
        """Total time spent waiting for slots."""
        waited_s = 0.0
        for wait in self.waits:
            waited_s += wait.ended_s - wait.started_s
        return waited_s


def has_begun(usage: Usage, steps: Sequence[StepDone]) -> bool:
    """Return whether a server has begun an answer. If so, the prompt is always charged."""
    return usage.completion_tokens > 0 or any(
        step.first_token_s is not None or step.units is not NO_UNITS for step in steps
    )


class Observer(Protocol):
    """Observer of all generations. Both methods return immediately and raise no exception."""

    def generation_started(self, began: GenerationStarted) -> None: ...

    def ended(self, done: GenerationDone) -> None: ...


# Number of ended answers that can still be found.
MAX_ENDED: Final = 16


@dataclass(slots=True, eq=False)
class LiveOutput:
    """Journal of an answer, which grows until `is_ended`; `key` is the public id of its API key."""

    tenant: str
    key: str
    journal: Sequence[int]
    is_ended: bool = False


class LiveOutputs:
    """Answers in progress in this process, and the latest ended answers, by request id."""

    def __init__(self) -> None:
        self._outputs: dict[str, LiveOutput] = {}
        self._ended: deque[str] = deque()

    def add(self, id: str, output: LiveOutput) -> None:
        self._outputs[id] = output

    def end(self, id: str) -> None:
        """Mark an answer as ended; if more than `MAX_ENDED` have ended, forget the oldest."""
        if (output := self._outputs.get(id)) is None or output.is_ended:
            return
        output.is_ended = True
        self._ended.append(id)
        if len(self._ended) > MAX_ENDED:
            self._outputs.pop(self._ended.popleft(), None)

    def find(self, id: str, tenant: str, key: str) -> LiveOutput | None:
        """Return the answer with the request id `id` if it belongs to this tenant and key, or None."""
        output = self._outputs.get(id)
        return output if output is not None and (output.tenant, output.key) == (tenant, key) else None
