"""Requirements of a request for its answer, and the obligations that follow from them.

The requirements state which tools must or may be called, which schemas their arguments must match, and which form the
answer must have. Tools are named by their recipients: `functions.NAME`, `python`, `browser.search`. No I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from enum import Enum, auto
from functools import cached_property, lru_cache
from typing import Final

from unisono.core.conversation import AnswerForm, TextGrammar
from unisono.core.frozen import dataclass
from unisono.core.generation import AnyJson, Constraint, Gbnf, JsonSchema, Lark, OneOf, Regex
from unisono.core.ports import Schema
from unisono.core.recovery_rules import DANGLING_PREAMBLE, REPETITION, UNDECLARED_TOOL
from unisono.core.tool_host import SEARCH_LABEL, SEPARATOR, HostedTool
from unisono.engine.interventions.policy import CALLS, MessageKind, Obligation
from unisono.engine.request import AllowedTools, Choice, ForcedCalls, GenerationRequest
from unisono.harmony.builtin_tools import FUNCTIONS_OF, is_builtin
from unisono.harmony.header import ANALYSIS, COMMENTARY, Header
from unisono.harmony.recipients import FUNCTIONS
from unisono.harmony.tool_declarations import ToolSet

NO_ARGUMENTS: Final[Schema] = {"type": "object", "properties": {}, "additionalProperties": False}

UNMET_CALL: Final = "The model did not call a tool that it had to call."
UNMET_NONE: Final = "None of the tools that had to be called is available."
UNMET_ARGUMENTS: Final = "The arguments of a call do not match the tool's schema."
UNMET_FORM: Final = "The answer does not have the form that was asked for."


@dataclass(frozen=True, slots=True)
class ToolRequirements:
    """Tools of one answer, and the calls that the client requires or allows.

    `offered` are the offered recipients, in the order of their declaration. One of the recipients in `forced` must be
    called; None if no call is required. Only recipients in `allowed` may be called; None if any may be called.
    `schemas` are the argument schemas of the tools that take JSON, by recipient.
    """

    offered: tuple[str, ...] = ()
    forced: tuple[str, ...] | None = None
    allowed: frozenset[str] | None = None
    schemas: Mapping[str, Schema] = field(default_factory=dict)
    # Tools that take free text instead of JSON, with the grammar of the text or None.
    texts: Mapping[str, TextGrammar | None] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()  # tools whose arguments must match their schema
    # Functions that exist, including those that the model must find by a search first. A call to any other function is
    # never emitted as a call. None: calls of other functions are emitted too.
    declared: frozenset[str] | None = None
    # Labels of the tool servers; None without server tools. If an invalid call addresses a tool that is not in `own`,
    # the model gets an error result.
    servers: frozenset[str] | None = None
    buffered: frozenset[str] = frozenset()  # client tools whose calls are emitted only when complete
    own: frozenset[str] = frozenset()  # the client's own tools
    calls_allowed: bool = True
    # removed functions, whose calls are refused like calls to undeclared functions, even in requests with server tools
    removed: frozenset[str] = frozenset()

    @property
    def constraint_kinds(self) -> set[str]:
        """Return the constraint kinds that a backend should enforce for the forced calls."""
        forced = self.forced
        if not forced:
            return set()
        kinds = {constraint_of(self.schemas[name]).kind for name in forced if name in self.schemas}
        kinds |= {text_constraint(grammar).kind for name in forced if (grammar := self.texts.get(name)) is not None}
        if len(forced) > 1:
            kinds.add(OneOf.kind)
        return kinds

    @property
    def needs_constraints(self) -> bool:
        """Return whether the choice of the backend depends on the constraints that it can enforce."""
        # An invalid call to a client tool is generated again, under the tool's schema if the backend can enforce it.
        return self.forced is not None or bool(self.own and self.offered)

    def call_kind(self, recipient: str, *, is_call_owed: bool) -> MessageKind:
        """Return the kind of a call; `is_call_owed`: a required call is still missing."""
        if is_call_owed and recipient in (self.forced or ()):
            return MessageKind.WANTED
        if recipient in self.removed or self._is_undeclared(recipient):
            return MessageKind.UNDECLARED
        # While a required call is missing, no other tool may be called.
        if is_call_owed or (self.allowed is not None and recipient not in self.allowed):
            return MessageKind.BARRED
        return MessageKind.STRICT if recipient in self.strict else MessageKind.CALL

    def _is_undeclared(self, recipient: str) -> bool:
        """Return whether a call's function is unknown and its name has no known server's label."""
        if self.declared is None or not recipient.startswith(FUNCTIONS) or recipient in self.declared:
            return False
        # For an unknown tool of a server, the model gets an error result, as for any invalid call to a server tool.
        label, separator, _ = recipient.removeprefix(FUNCTIONS).partition(SEPARATOR)
        return not (separator and label in (self.servers or ()))


@dataclass(frozen=True)  # without slots, because `cached_property` needs a `__dict__`
class OutputRequirements:
    """Requirements for the output of one answer: its calls, its form and its limits."""

    tools: ToolRequirements = field(default_factory=ToolRequirements)
    form: AnswerForm | None = None
    budget: int | None = None  # limit of reasoning tokens
    disabled_rules: frozenset[str] = frozenset()
    hold_form: bool = False  # an answer with the required form is emitted only when it is complete
    hold_calls: bool = True  # a call is emitted only when it is complete

    @cached_property
    def constraint_kinds(self) -> frozenset[str]:
        """Return the constraint kinds that a backend should enforce."""
        kinds = self.tools.constraint_kinds
        if self.form is not None:
            kinds.add(self.form_constraint.kind)
        return frozenset(kinds)

    @cached_property
    def needs_constraints(self) -> bool:
        """Return whether the choice of the backend depends on the constraints that it can enforce."""
        return self.form is not None or self.tools.needs_constraints

    @cached_property
    def accepts_texts(self) -> bool:
        """Return whether every message that is not a call is accepted without a check."""
        return not self.tools.forced and self.form is None and self.budget is None

    @cached_property
    def detects_repetition(self) -> bool:
        """Return whether the gateway ends output that repeats itself."""
        return REPETITION not in self.disabled_rules

    @cached_property
    def rejects_dangling_preambles(self) -> bool:
        """Return whether a turn that ends after a preamble is continued."""
        # Without tools, nothing can follow a preamble, so the preamble is the answer.
        return bool(self.tools.offered) and DANGLING_PREAMBLE not in self.disabled_rules

    @property
    def form_constraint(self) -> Constraint:
        """Return the constraint for the answer; any JSON object if no form is required."""
        form = self.form
        if form is None:
            return AnyJson()
        if form.choices:
            return OneOf(form.choices)
        return constraint_of(form.schema) if form.grammar is None else text_constraint(form.grammar)

    def constraint_for(self, header: Header) -> Constraint | None:
        """Return the constraint for the body of a message; None if the body is unconstrained."""
        recipient = header.recipient.full_name
        if not recipient:
            return self.form_constraint
        if (grammar := self.tools.texts.get(recipient)) is not None:
            return text_constraint(grammar)
        schema = self.tools.schemas.get(recipient)
        return None if schema is None else constraint_of(schema)

    def message_kind(self, header: Header, *, is_call_owed: bool, is_late: bool) -> MessageKind:
        """Return the kind of a message; `is_late`: the reasoning budget is used up."""
        recipient = header.recipient.full_name
        if header.is_call and self.tools.calls_allowed:
            return self.tools.call_kind(recipient, is_call_owed=is_call_owed)
        if recipient or header.channel == ANALYSIS:
            return MessageKind.LATE_THOUGHT if is_late else MessageKind.THOUGHT
        # Without tools and a form, nothing has to follow a commentary text, so the text is the answer.
        is_preamble = header.channel == COMMENTARY and (self.tools.offered or self.form is not None)
        return MessageKind.PREAMBLE if is_preamble else MessageKind.ANSWER


class Duty(Enum):
    """State of a required call or form."""

    NONE = auto()  # nothing is required, or the answer meets the requirement
    OWED = auto()  # the answer does not meet the requirement yet
    MISSED = auto()  # the model did not meet the requirement, and no further attempt is made


class Obligations:
    """Obligations of one answer under its requirements.

    `call` and `form` are the states of the required call and of the required form of the answer. `unmet` is a text for
    the client about the violated requirement; empty if all are met.
    """

    # Rules.
    # - A required call comes before a required form. If the model answers instead, the answer must have the form.
    # - A call to a required tool meets the requirement, even if its arguments are invalid after all retries.
    # - Only the first answer message must have the required form. A preamble is taken as the answer only if the output
    #   ends without an answer message.
    # - A call is required in the first step only. If the step ends without the call, the call is missing.

    def __init__(self, requirements: OutputRequirements) -> None:
        self._requirements = requirements
        self.call = Duty.OWED if requirements.tools.forced else Duty.NONE
        self.form = Duty.OWED if requirements.form is not None else Duty.NONE
        self.is_late = False  # the reasoning budget is used up
        self._preamble, self._is_preamble_valid = "", False  # the last preamble of the step
        self.unmet = UNMET_NONE if requirements.tools.forced == () else ""

    @property
    def next(self) -> Obligation:
        """Return the obligation that the next message has to meet."""
        if self.call is Duty.OWED:
            return Obligation.CALL
        return Obligation.FORM if self.form is Duty.OWED else Obligation.NOTHING

    def message_kind(self, header: Header) -> MessageKind:
        """Return the kind of a message in the answer."""
        is_call_owed = self.call is not Duty.NONE
        return self._requirements.message_kind(header, is_call_owed=is_call_owed, is_late=self.is_late)

    def has_form(self, message: MessageKind) -> bool:
        """Return whether a message has to have the required form."""
        return message is MessageKind.ANSWER and self.form is Duty.OWED

    def record_message(self, message: MessageKind, *, is_faulty: bool) -> None:
        """Record a message that was accepted; `is_faulty`: it is invalid, but has no retries left."""
        if message in CALLS:
            if is_faulty and message is not MessageKind.CALL:
                self.unmet = UNMET_ARGUMENTS
            if message is MessageKind.WANTED:
                self._discharge_call()
        elif self.has_form(message):
            self.form = Duty.MISSED if is_faulty else Duty.NONE
            self.unmet = UNMET_FORM if is_faulty else self.unmet

    def record_preamble(self, text: str, *, is_valid: bool) -> None:
        """Record a preamble; `is_valid`: it has the required form."""
        self._preamble, self._is_preamble_valid = text, is_valid

    def last_resort(self, *, is_answering: bool) -> str:
        """Return the preamble to take as the answer, or an empty text if there is none.

        An invalid preamble is taken only if the model wrote no answer although the gateway opened it (`is_answering`).
        """
        return self._preamble if self._is_preamble_valid or is_answering else ""

    def drop_call(self) -> None:
        """Stop requiring a call, because the model made none in all of its attempts."""
        self.call, self.unmet = Duty.MISSED, self.unmet or UNMET_CALL

    def _discharge_call(self) -> None:
        """Record that a required tool was called, possibly after the requirement was dropped."""
        if self.call is Duty.MISSED and self.unmet == UNMET_CALL:
            self.unmet = ""
        self.call = Duty.NONE

    def end_step(self) -> None:
        """Require no calls in the next steps, and forget the preamble of this step."""
        self._preamble, self._is_preamble_valid = "", False
        if self.call is Duty.OWED:
            self.drop_call()

    def finish(self, *, has_call: bool, handed: bool, is_stopped: bool) -> None:
        """Record which requirements the finished answer does not meet.

        A missing form is not recorded if the client has to act first, because the answer to the next request may have
        the form. With `has_call`, the client has to run a call. With `handed`, the client has to approve a call, or to
        continue a paused answer. With `is_stopped`, a stop string ended the answer, and no missing form is recorded.
        """
        if self.call is Duty.OWED:
            self.drop_call()
        elif self.form is Duty.OWED and not (has_call or handed or is_stopped):
            self.unmet = self.unmet or UNMET_FORM


def requirements_of(
    request: GenerationRequest,
    tools: ToolSet,
    server_tools: Mapping[str, HostedTool] | None,
    approved: Collection[str] = (),
    not_found_yet: Collection[str] = (),
) -> OutputRequirements:
    """Return the requirements of `request`; `tools` are all declared tools.

    `server_tools` are the offered server tools, by the names that the model knows; None if the request has no server
    tools. `approved` are the tool names of approved calls, which run before the first generation. `not_found_yet` are
    the names of tools that are declared only after a search finds them.
    """
    answer, conversation = request.answer, request.conversation
    # If the client began the answer itself (prefill), no call and no form is required. If the model
    # calls a tool, it must still be one of the tools that the request names.
    free = conversation.prefill is None
    choice = answer.choice if answer.calls_allowed else None
    if not free and isinstance(choice, ForcedCalls):
        choice = None if choice == ForcedCalls() else AllowedTools(choice.tools or frozenset(), choice.hosted)
    is_plain = choice is None and server_tools is None and not (tools.declared or conversation.removed)
    form = answer.form if free else None
    hold_form = answer.whole or not request.origin.is_streamed
    if is_plain and not conversation.all_tools:
        plain = _without_tools(answer.calls_allowed, answer.disabled_rules, answer.hold_calls)
        if form is None and answer.reasoning_budget is None:
            return plain
        return replace(plain, form=form, budget=answer.reasoning_budget, hold_form=hold_form)
    return OutputRequirements(
        tools=_tool_requirements(request, tools, server_tools, choice, approved, not_found_yet),
        form=form,
        budget=answer.reasoning_budget,
        disabled_rules=answer.disabled_rules,
        hold_form=hold_form,
        hold_calls=answer.hold_calls,
    )


@lru_cache(maxsize=64)
def _without_tools(calls_allowed: bool, disabled_rules: frozenset[str], hold_calls: bool) -> OutputRequirements:
    """Return the requirements of a request without tools; most requests share a cached value."""
    is_passed_on = UNDECLARED_TOOL in disabled_rules
    tools = ToolRequirements(calls_allowed=calls_allowed, declared=None if is_passed_on else frozenset())
    return OutputRequirements(tools, disabled_rules=disabled_rules, hold_calls=hold_calls)


def _tool_requirements(
    request: GenerationRequest,
    tools: ToolSet,
    server_tools: Mapping[str, HostedTool] | None,
    choice: Choice | None,
    approved: Collection[str],
    not_found_yet: Collection[str],
) -> ToolRequirements:
    """Return the requirements for calls; see `requirements_of` for the arguments."""
    client = {f"{FUNCTIONS}{tools.wire(tool.name)}": tool for tool in request.conversation.all_tools}
    every = {_recipient(name, tools): tool for name, tool in (server_tools or {}).items()}
    schemas: dict[str, Schema] = {
        name: tool.parameters or NO_ARGUMENTS for name, tool in client.items() if not tool.free_text
    }
    # The arguments of `python` are code, not JSON.
    schemas |= {name: tool.schema or NO_ARGUMENTS for name, tool in every.items() if name != "python"}
    on_offer = [*_functions_on_offer(request, tools, not_found_yet), *(name for name in every if is_builtin(name))]
    meant = frozenset[str]() if choice is None else _meant(choice, tools, every, on_offer)
    # A client that approves a call sends the same tool choice again. The approved call meets the requirement; otherwise
    # the client would have to approve calls forever.
    owed = isinstance(choice, ForcedCalls) and not any(_recipient(name, tools) in meant for name in approved)
    is_passed_on = UNDECLARED_TOOL in request.answer.disabled_rules
    return ToolRequirements(
        offered=tuple(on_offer) if request.answer.calls_allowed else (),
        forced=tuple(name for name in on_offer if name in meant) if owed else None,
        allowed=meant if isinstance(choice, AllowedTools) or (choice is not None and choice.exclusive) else None,
        schemas=schemas,
        texts={name: tool.grammar for name, tool in client.items() if tool.free_text},
        strict=frozenset(name for name, tool in client.items() if tool.strict and request.answer.calls_allowed),
        buffered=frozenset(name for name, tool in client.items() if tool.kind or tool.free_text),
        own=frozenset(client),
        calls_allowed=request.answer.calls_allowed,
        declared=None if is_passed_on else frozenset(tools.recipients),
        servers=None if server_tools is None else _server_labels(request),
        removed=_removed(request, tools),
    )


def _functions_on_offer(request: GenerationRequest, tools: ToolSet, not_found_yet: Collection[str]) -> Sequence[str]:
    """Return the recipients of the functions that the model knows from the start and may call."""
    deferred = (*(tool.name for tool in request.conversation.deferred), *not_found_yet)
    hidden = _removed(request, tools).union(f"{FUNCTIONS}{tools.wire(name)}" for name in deferred)
    return [recipient for recipient in tools.recipients if recipient not in hidden] if hidden else tools.recipients


def _removed(request: GenerationRequest, tools: ToolSet) -> frozenset[str]:
    """Return the recipients of removed functions; none if the rule `undeclared-tool` is off."""
    if UNDECLARED_TOOL in request.answer.disabled_rules:
        return frozenset()
    return frozenset(f"{FUNCTIONS}{tools.wire(name)}" for name in request.conversation.removed)


def _meant(choice: Choice, tools: ToolSet, hosted: Mapping[str, HostedTool], on_offer: Iterable[str]) -> frozenset[str]:
    if choice.tools is None and not choice.hosted:
        return frozenset(on_offer)
    meant: set[str] = set()
    for name in choice.tools or ():
        meant |= FUNCTIONS_OF.get(name, frozenset()) if tools.trained(name) else set()
        meant.add(_recipient(name, tools))
    for name, tool in hosted.items():
        if not choice.hosted.isdisjoint({(tool.server, tool.name), (tool.server, None)}):
            meant.add(name)
    return frozenset(meant)


def _recipient(name: str, tools: ToolSet) -> str:
    return name if tools.trained(name) else f"{FUNCTIONS}{tools.wire(name)}"


def _server_labels(request: GenerationRequest) -> frozenset[str]:
    servers = () if request.server_tools is None else request.server_tools.servers
    return frozenset(server.label for server in servers if server.label != SEARCH_LABEL)


def text_constraint(grammar: TextGrammar) -> Constraint:
    """Return the backend constraint for a grammar."""
    if grammar.gbnf:
        return Gbnf(grammar.gbnf, grammar.definition)
    return Regex(grammar.definition) if grammar.syntax == "regex" else Lark(grammar.definition)


def constraint_of(schema: Schema | None) -> Constraint:
    """Return the backend constraint for a schema; without a schema, any JSON object."""
    return AnyJson() if schema is None else JsonSchema(schema)
