"""The life of one item as events: added, its parts and deltas, done. Which events a kind has is a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO

from unisono.api.responses.items import Wire, annotated, reasoning_part, refusal_part, text_part
from unisono.api.responses.outbound.citations import Citations
from unisono.api.responses.outbound.serializer import DeltaForm
from unisono.core.conversation import Item
from unisono.core.events import Closed
from unisono.core.events import Item as Made


@dataclass(frozen=True, slots=True)
class ItemLifecycle:
    """`event` is what the names of an item's delta and done events begin with, `full` the field of the done event that
    has the whole. `part` makes the content part that holds the text; a call has none. `more` stands in both events,
    and the done event repeats the item's `copied` fields."""

    event: str
    full: str
    part: Callable[[str], Wire] | None = None
    more: Mapping[str, object] | None = None
    copied: tuple[str, ...] = ()


TEXT = ItemLifecycle("response.output_text", "text", text_part, {"logprobs": []})
REFUSAL = ItemLifecycle("response.refusal", "refusal", refusal_part)
REASONING = ItemLifecycle("response.reasoning_text", "text", reasoning_part)
ARGUMENTS = ItemLifecycle("response.function_call_arguments", "arguments", copied=("name",))
"""openai-python 2.x cannot do without the name, although the API's own description lists none."""
HOSTED_ARGUMENTS = ItemLifecycle("response.mcp_call_arguments", "arguments")
INPUT = ItemLifecycle("response.custom_tool_call_input", "input")
CODE = ItemLifecycle("response.code_interpreter_call_code", "code")
WORDLESS = ItemLifecycle("", "")
"""Nothing of it is told piece by piece."""


@dataclass(frozen=True, slots=True)
class ServerItemKind:
    """A kind of what the gateway runs: its item's type, its life, the steps that are told when it is made, and the last
    one where it failed. A `settled` one is shown when all the model said of it is known."""

    type: str
    life: ItemLifecycle
    made: tuple[str, ...] = ()
    failed: str = "completed"
    settled: bool = True


MCP_CALL = ServerItemKind("mcp_call", HOSTED_ARGUMENTS, failed="failed", settled=False)
MCP_LIST = ServerItemKind("mcp_list_tools", HOSTED_ARGUMENTS, failed="failed", settled=False)
WEB_SEARCH = ServerItemKind("web_search_call", WORDLESS, made=("searching",))
CODE_RUN = ServerItemKind("code_interpreter_call", CODE, made=("interpreting",))
HOSTED = {kind.type: kind for kind in (MCP_CALL, WEB_SEARCH, CODE_RUN)}
"""Calls, by the types of their items."""


@dataclass(slots=True)
class ShownItem:
    """An item whose life has begun; one that is `hidden` has no deltas. `unseen` is what the model said before it
    without showing anything."""

    made: Made
    id: str
    place: int
    life: ItemLifecycle
    hidden: bool
    unseen: Sequence[Item] = ()
    # A StringIO holds the text once, at one byte per ASCII character; a list holds an object per delta.
    text: StringIO = field(default_factory=StringIO)
    closed: Closed | None = None
    told: bool = False
    """Whether its whole text was."""
    delta: DeltaForm | None = None
    citations: Citations | None = None
    annotations: list[Wire] = field(default_factory=list)

    @property
    def where(self) -> Wire:
        """What every event of it says."""
        where: Wire = {"item_id": self.id, "output_index": self.place}
        return where if self.life.part is None else where | {"content_index": 0}

    def part(self, text: str) -> Wire:
        """The content part that holds its text."""
        assert self.life.part is not None
        return annotated(self.life.part(text), self.annotations)
