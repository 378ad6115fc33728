"""What a turn asks of the way an answer is given, in the words of the prompt: which tools have to be called, may be
called, with which arguments, and what the answer has to be.

No I/O. Tools are named by their recipients, as headers name them: `functions.NAME`, `python`, `browser.search`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from unisono.core.conversation import AnswerForm, Json
from unisono.core.generation import AnyJson, Constraint, JsonSchema, OneOf
from unisono.core.tools import HostedTool
from unisono.engine.hosted import OfferedServerTools, decided_calls
from unisono.engine.turn import AllowedTools, ForcedCalls, GenerationRequest
from unisono.harmony.builtin_tools import FUNCTIONS_OF, is_builtin
from unisono.harmony.header import COMMENTARY, Header
from unisono.harmony.recipients import FUNCTIONS, Recipient, RecipientKind
from unisono.harmony.tools import ToolSet

Schema: TypeAlias = Mapping[str, Json]

Violation: TypeAlias = Callable[[Schema, str], str | None]
"""Why a text is not JSON that a schema allows; None when it is. It raises for no text and no schema that was let in."""

NO_ARGUMENTS: Final[Schema] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class OutputRequirements:
    """`tools` are the recipients on offer, in the order of their declaration, and `forced` those of them one of which
    has to be called, None when none has to; `allowed` are all that may be called, None for any. `schemas` are those of
    the arguments, where they are JSON."""

    tools: tuple[str, ...] = ()
    forced: tuple[str, ...] | None = None
    allowed: frozenset[str] | None = None
    schemas: Mapping[str, Schema] = field(default_factory=dict)
    texts: frozenset[str] = frozenset()
    """Tools that take any text."""
    strict: frozenset[str] = frozenset()
    told: bool = False
    """Whether the model reads what is wrong with a call that is none of `own`."""
    own: frozenset[str] = frozenset()
    """The client's own tools."""
    form: AnswerForm | None = None
    budget: int | None = None
    unmended: frozenset[str] = frozenset()
    calls_allowed: bool = True
    hold_calls: bool = True
    whole: bool = False
    """Whether nothing is shown before all is there: then what is wrong can be taken back wherever it came from."""

    @property
    def for_backends(self) -> bool:
        """Whether it matters what a backend can constrain."""
        # A broken call of the client's is generated again, where possible under its schema.
        return self.forced is not None or self.form is not None or bool(self.own and self.tools)


def kinds_wanted(wishes: OutputRequirements) -> frozenset[str]:
    """The kinds of constraints that a backend had better keep to."""
    kinds = {constraint_of(wishes.schemas[name]).kind for name in wishes.forced or () if name in wishes.schemas}
    if wishes.forced and len(wishes.forced) > 1:
        kinds.add(OneOf.kind)
    if wishes.form is not None:
        kinds.add(constraint_of(wishes.form.schema).kind)
    return frozenset(kinds)


def wishes_of(turn: GenerationRequest, tools: ToolSet, hosted: OfferedServerTools | None) -> OutputRequirements:
    """What `turn` asks for; `tools` are all that are declared."""
    # A message that the client began itself is what it is.
    free = turn.conversation.prefill is None
    choice = turn.choice if turn.calls_allowed and free else None
    client = {f"{FUNCTIONS}{tools.wire(tool.name)}": tool for tool in turn.conversation.preamble.tools}
    every = {} if hosted is None else {_recipient(name, tools): tool for name, tool in hosted.every.items()}
    schemas: dict[str, Schema] = {
        name: tool.parameters or NO_ARGUMENTS for name, tool in client.items() if not tool.free_text
    }
    # Code is no JSON, and free text need be none.
    schemas |= {name: tool.schema or NO_ARGUMENTS for name, tool in every.items() if name != "python"}
    on_offer = [f"{FUNCTIONS}{declaration.name}" for declaration in tools.declarations]
    on_offer += [name for name in every if is_builtin(name)]
    meant = frozenset[str]() if choice is None else _meant(choice, tools, every, on_offer)
    owed = isinstance(choice, ForcedCalls) and not _is_approved(meant, turn, tools)
    return OutputRequirements(
        tools=tuple(on_offer) if turn.calls_allowed else (),
        forced=tuple(name for name in on_offer if name in meant) if owed else None,
        allowed=meant if isinstance(choice, AllowedTools) else None,
        schemas=schemas,
        texts=frozenset(name for name, tool in client.items() if tool.free_text),
        strict=frozenset(name for name, tool in client.items() if tool.strict and turn.calls_allowed),
        told=hosted is not None,
        own=frozenset(client),
        form=turn.form if free else None,
        budget=turn.reasoning_budget,
        unmended=turn.unmended,
        calls_allowed=turn.calls_allowed,
        hold_calls=turn.hold_calls,
        whole=turn.whole,
    )


def _meant(
    choice: ForcedCalls | AllowedTools, tools: ToolSet, hosted: Mapping[str, HostedTool], on_offer: Iterable[str]
) -> frozenset[str]:
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


def _is_approved(meant: frozenset[str], turn: GenerationRequest, tools: ToolSet) -> bool:
    """Whether one of the calls that are made before anything is generated is one of the `meant`: whoever approves a
    call sends the choice that led to it along, and would be asked for ever."""
    approved, _ = ([], []) if turn.hosting is None else decided_calls(turn.conversation, turn.hosting)
    return any(_recipient(call.name, tools) in meant for call in approved)


def _recipient(name: str, tools: ToolSet) -> str:
    return name if tools.trained(name) else f"{FUNCTIONS}{tools.wire(name)}"


def recipient_of(header: Header) -> str:
    """Whom a message is for; empty for nobody."""
    match header.recipient.kind:
        case RecipientKind.NOBODY:
            return ""
        case RecipientKind.FUNCTION:
            return f"{FUNCTIONS}{header.recipient.name}"
        case RecipientKind.HOSTED | RecipientKind.BUILTIN:
            return header.recipient.name


def header_for(recipient: str) -> Header:
    """The header of a call."""
    if is_builtin(recipient):
        return Header("analysis", Recipient(RecipientKind.HOSTED, recipient))
    return Header(COMMENTARY, Recipient(RecipientKind.FUNCTION, recipient.removeprefix(FUNCTIONS)), "json")


def constraint_of(schema: Schema | None) -> Constraint:
    """What JSON of that schema is to a backend; any object without one."""
    return AnyJson() if schema is None else JsonSchema(schema)
