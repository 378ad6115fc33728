"""Life cycles of items: for each kind of item, the names and fields of its events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from io import StringIO

from unisono.api.client_toolbox import CallForm
from unisono.api.responses.client_tools import TOOLS
from unisono.api.responses.items import Wire, annotated, reasoning_part, refusal_part, text_part
from unisono.api.responses.outbound.citations import Citations
from unisono.api.responses.outbound.reasoning_summary import SummaryEvents
from unisono.api.responses.outbound.serializer import DeltaForm
from unisono.core.conversation import Item
from unisono.core.events import Closed
from unisono.core.events import Item as Made
from unisono.core.frozen import dataclass
from unisono.core.state_store import StoredItem


@dataclass(frozen=True, slots=True)
class ItemLifecycle:
    """Event names and fields of one kind of item.

    `event` is the prefix of the names of the delta and done events. `full` is the field of the done event that contains
    the complete text. `part` builds the content part from a text; it is None for calls. `more` contains additional
    fields of the delta and done events. `copied` names the fields of the item that the done event repeats.
    """

    event: str
    full: str
    part: Callable[[str], Wire] | None = None
    more: Mapping[str, object] | None = None
    copied: tuple[str, ...] = ()


TEXT = ItemLifecycle("response.output_text", "text", text_part, {"logprobs": []})
REFUSAL = ItemLifecycle("response.refusal", "refusal", refusal_part)
REASONING = ItemLifecycle("response.reasoning_text", "text", reasoning_part)
# Arguments of a function call. openai-python 2.x requires the name, although the API's own description omits it.
ARGUMENTS = ItemLifecycle("response.function_call_arguments", "arguments", copied=("name",))
HOSTED_ARGUMENTS = ItemLifecycle("response.mcp_call_arguments", "arguments")
INPUT = ItemLifecycle("response.custom_tool_call_input", "input")
CODE = ItemLifecycle("response.code_interpreter_call_code", "code")
# Life cycle without deltas.
WORDLESS = ItemLifecycle("", "")
# Life cycles of the client's calls.
CALLS = {
    CallForm.FUNCTION: ARGUMENTS,
    CallForm.LEGACY: ARGUMENTS,
    CallForm.CUSTOM: INPUT,
    CallForm.SEARCH: WORDLESS,
    **dict.fromkeys(TOOLS, WORDLESS),
}


@dataclass(frozen=True, slots=True)
class ServerItemKind:
    """Kind of server tool item.

    `type` is the item type. `made` are the events emitted when a call starts to run, and `failed` is the last event of
    a failed call. If `is_added_at_end` is True, the item is added to the answer when the model has finished writing the
    call; otherwise, when the model begins the call.
    """

    type: str
    lifecycle: ItemLifecycle
    made: tuple[str, ...] = ()
    failed: str = "completed"
    is_added_at_end: bool = True
    # False if no events report the progress of the call.
    has_steps: bool = True


MCP_CALL = ServerItemKind("mcp_call", HOSTED_ARGUMENTS, failed="failed", is_added_at_end=False)
MCP_LIST = ServerItemKind("mcp_list_tools", HOSTED_ARGUMENTS, failed="failed", is_added_at_end=False)
WEB_SEARCH = ServerItemKind("web_search_call", WORDLESS, made=("searching",))
CODE_RUN = ServerItemKind("code_interpreter_call", CODE, made=("interpreting",))
TOOL_SEARCH_CALL = ServerItemKind("tool_search_call", WORDLESS, has_steps=False)
# Kinds of calls by item type.
HOSTED = {kind.type: kind for kind in (MCP_CALL, WEB_SEARCH, CODE_RUN, TOOL_SEARCH_CALL)}


def has_server_calls(output: Iterable[StoredItem]) -> bool:
    """Return True if an answer contains server tool calls, so that it must not be repeated."""
    return any(item.wire.get("type") in HOSTED for item in output)


@dataclass(slots=True)
class OpenItem:
    """Item that was started and has not ended.

    A `hidden` item has no delta events. `silent_items` holds earlier output of the model that was not emitted.
    """

    made: Made
    id: str
    index: int
    lifecycle: ItemLifecycle
    hidden: bool
    silent_items: Sequence[Item] = ()
    # A StringIO holds the text once, at one byte per ASCII character; a list holds an object per delta.
    text: StringIO = field(default_factory=StringIO)
    closed: Closed | None = None
    # True if the event with the complete text was emitted.
    is_text_emitted: bool = False
    delta: DeltaForm | None = None
    plain_delta: DeltaForm | None = None  # `delta`; None if a delta needs other events too
    citations: Citations | None = None
    annotations: list[Wire] = field(default_factory=list)
    summary: SummaryEvents | None = None
    # Log probabilities of the text's tokens so far.
    logprobs: list[Wire] = field(default_factory=list)

    @property
    def more(self) -> Mapping[str, object]:
        """Additional fields of the done event."""
        return {**(self.lifecycle.more or {}), **({"logprobs": self.logprobs} if self.logprobs else {})}

    @property
    def place(self) -> Wire:
        """Fields that locate the item."""
        return {"item_id": self.id, "output_index": self.index}

    @property
    def location(self) -> Wire:
        """Fields that locate the text of the item. They are the same in all events of the text."""
        return self.place if self.lifecycle.part is None else self.place | {"content_index": 0}

    def part(self, text: str) -> Wire:
        """Return the item's content part with `text` and its annotations."""
        assert self.lifecycle.part is not None
        part = annotated(self.lifecycle.part(text), self.annotations)
        return {**part, "logprobs": self.logprobs} if self.logprobs else part
