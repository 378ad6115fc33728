"""Tools as the model sees them: declarations, and wire names in place of the client's names.

Every wire name (name in the prompt) matches `[A-Za-z0-9_-]{1,64}`. A client's name that matches already is used
unchanged. Two tools never share a name. The same list of tools always gets the same names, so that prompts stay
byte-stable. A client's declaration is either printed correctly or rejected with the name of the wrong field.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import Final

from unisono.core.conversation import AddedTools, Conversation, FunctionTool
from unisono.core.frozen import dataclass
from unisono.core.lru_cache import LruCache
from unisono.errors import InvalidRequest, well_formed
from unisono.harmony.builtin_tools import is_builtin
from unisono.harmony.declaration_limits import MAX_TOOLS, SchemaBudget, breaks_out
from unisono.harmony.misspelled_tool_names import ILLEGAL, marked_name
from unisono.harmony.recipients import FUNCTIONS
from unisono.harmony.ts_from_schema import SchemaReading, read_parameters
from unisono.harmony.ts_types import BlockType, Shape, without_null

MAX_NAME_LENGTH = 64
MAX_CLIENT_NAME_LENGTH = 512
_LEGAL = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_LENGTH}}}")
MAX_SENT_NAME_LENGTH = 128
_UNSENDABLE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class Declaration:
    """Declaration of a tool in the prompt.

    `name` is the wire name, and `lines` are the comment lines above the declaration. `argument` is the type of the
    tool's argument; None for a tool without arguments. `digest` identifies this definition if the conversation contains
    several definitions of the tool; otherwise `digest` is empty.
    """

    name: str
    lines: tuple[str, ...]
    argument: Shape | None
    digest: bytes = b""


class ToolSet:
    """Tools of one request, with their names for the client and in the prompt.

    A tool set is immutable, and `digest` identifies it.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        declarations: Iterable[Declaration],
        digest: bytes,
        size: int,
        builtins: frozenset[str] = frozenset(),
        texts: frozenset[str] = frozenset(),
    ) -> None:
        self._wire = dict(names)
        self._client = {wire: client for client, wire in names.items()}
        # Wire names: the names in the prompt.
        self.declared = frozenset(self._client)
        self.declarations = tuple(declarations)
        self.digest = digest
        # Length of the declarations as JSON.
        self.characters = size
        # Client names of tools whose argument is free text instead of JSON.
        self.texts = texts
        # Offered tools that gpt-oss was trained on; they are not part of the digest.
        self.builtins = builtins

    @cached_property
    def recipients(self) -> tuple[str, ...]:
        """Recipients of the declared functions, in the order of their declaration."""
        return tuple(f"{FUNCTIONS}{each.name}" for each in self.declarations)

    def with_builtins(self, builtins: Iterable[str]) -> ToolSet:
        """Return the same client tools, with `builtins` as the offered tools gpt-oss was trained on."""
        return ToolSet(self._wire, self.declarations, self.digest, self.characters, frozenset(builtins), self.texts)

    def trained(self, client_name: str) -> bool:
        """Return whether gpt-oss was trained on the tool, and no tool of the client has its name."""
        return is_builtin(client_name) and client_name not in self._wire

    def wire(self, client_name: str) -> str:
        """Return the wire name of a client's tool.

        A tool that is not declared (it was called in an earlier message) gets a legal name that no declared tool has.
        """
        known = self._wire.get(client_name)
        return known if known is not None else _legal_name(client_name, self.declared)

    def client(self, wire_name: str) -> str:
        """Return the client's name for a wire name.

        A name that the model invented is reduced to letters, digits, `.`, `_` and `-`, because the client will send the
        call back and its name must then be valid.
        """
        known = self._client.get(wire_name)
        return known if known is not None else _UNSENDABLE.sub("_", wire_name)[:MAX_SENT_NAME_LENGTH]


# Characters that are added to the cache weight of each tool and of each set, because Python objects take more memory
# than short text. One unit of weight is then at most 6 bytes of memory.
TOOL_WEIGHT = 100

# Cache of planned tools by content: planning is pure, and clients repeat the same tools.
_PLANNED: LruCache[bytes, ToolSet] = LruCache(2_000_000)


def plan_tools(
    tools: Sequence[FunctionTool], *, at: str = "tools.{index}.function", schema_field: str = "parameters"
) -> ToolSet:
    """Name and check the tools of one request.

    Errors name the field that caused them. `at` is the path in the client's request of tools that have no `path`; it
    contains `{index}` for the position of the tool. `schema_field` is the field of the tool that contains its schema.
    Identical tools are declared once. Raises InvalidRequest for a missing name, two different tools with the same name,
    a schema that is not an object or is too deep or too big, and names or values with control characters.
    """
    if not tools:
        return NO_TOOLS
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"At most {MAX_TOOLS} tools can be declared.", param=at.partition(".")[0])
    budget, digest = SchemaBudget(), hashlib.sha256()
    for index, tool in enumerate(tools):
        try:
            digest.update(_as_sent(tool, budget))
        except InvalidRequest as refusal:
            raise _blamed(refusal, f"{_path(tool, at, index)}.{schema_field}") from refusal
    planned = _PLANNED.get(digest.digest())
    if planned is None:
        planned = _plan(tools, at, schema_field, budget, digest.digest())
        _PLANNED.put(planned.digest, planned, planned.characters + TOOL_WEIGHT * (1 + len(planned.declared)))
    return planned


def _plan(tools: Sequence[FunctionTool], at: str, schema_field: str, budget: SchemaBudget, digest: bytes) -> ToolSet:
    names = _name_all(tools, at)
    distinct: dict[str, FunctionTool] = {}
    declarations: list[Declaration] = []
    characters = 0
    for index, tool in enumerate(tools):
        place = _path(tool, at, index)
        if distinct.setdefault(tool.name, tool) is not tool:
            if distinct[tool.name] != tool:
                raise InvalidRequest("Two different tools have the same name; rename one.", param=f"{place}.name")
            continue
        try:
            budget.spend(characters=len(tool.description))
            reading = None if tool.parameters is None else read_parameters(tool.parameters, budget)
        except InvalidRequest as refusal:
            raise _blamed(refusal, f"{place}.{schema_field}") from refusal
        declarations.append(_declare(names[tool.name], tool.description, reading))
        characters += len(_as_sent(tool, SchemaBudget()))
    texts = frozenset(tool.name for tool in tools if tool.free_text)
    return ToolSet(names, declarations, digest, characters, texts=texts)


NO_TOOLS: Final = ToolSet({}, (), hashlib.sha256().digest(), 0)


def _path(tool: FunctionTool, at: str, index: int) -> str:
    return tool.path or at.format(index=index)


def _blamed(refusal: InvalidRequest, field: str) -> InvalidRequest:
    """Return the same error with `field` as the field that caused it."""
    return InvalidRequest(f"'{field}': {refusal.message[:1].lower()}{refusal.message[1:]}", param=field)


_JSON: Final = json.JSONEncoder(allow_nan=False)


def _as_sent(tool: FunctionTool, budget: SchemaBudget) -> bytes:
    """Return bytes unique to the content of a tool, and charge their number to `budget`."""
    parameters = tool.parameters
    if not isinstance(parameters, dict) and isinstance(parameters, Mapping):
        parameters = dict(parameters)
    try:
        sent = _JSON.encode([tool.name, tool.description, parameters, tool.free_text]).encode()
    except (ValueError, TypeError, RecursionError) as failure:
        raise InvalidRequest("A tool's parameters contain a value that JSON cannot represent; remove it.") from failure
    budget.spend(json=len(sent))
    return sent


def _declare(name: str, description: str, reading: SchemaReading | None) -> Declaration:
    lines = tuple(well_formed(description).splitlines())
    if reading is None:
        return Declaration(name, lines, None)
    shape = reading.shape
    if isinstance(shape, BlockType):
        comment = "" if shape.comment == " ".join(description.split()) else shape.comment
        return Declaration(name, lines, BlockType(shape.fields, comment))
    # A comment after the last variant of a union would comment out the rest of the declaration.
    above = (reading.comment,) if reading.comment else ()
    return Declaration(name, lines + above, without_null(shape))


def _name_all(tools: Sequence[FunctionTool], at: str) -> dict[str, str]:
    """Return wire names by client name; legal names are assigned first, so they never change."""
    for index, tool in enumerate(tools):
        if not tool.name or len(tool.name) > MAX_CLIENT_NAME_LENGTH or breaks_out(tool.name):
            raise InvalidRequest(
                f"A tool's name must have 1 to {MAX_CLIENT_NAME_LENGTH} characters on one line.",
                param=f"{_path(tool, at, index)}.name",
            )
    names = {tool.name: tool.name for tool in tools if _LEGAL.fullmatch(tool.name)}
    taken = set(names)
    for tool in tools:
        if tool.name not in names:
            names[tool.name] = _legal_name(tool.name, taken)
            taken.add(names[tool.name])
    # In the client's order, so that equal lists give equal maps.
    return {tool.name: names[tool.name] for tool in tools}


def _legal_name(name: str, taken: Set[str]) -> str:
    """Return a legal name that resembles `name` and is not in `taken`; deterministic."""
    candidate, turn = ILLEGAL.sub("_", name)[:MAX_NAME_LENGTH], 0
    while candidate in taken or not candidate.strip("_-"):
        candidate = marked_name(name, turn)
        turn += 1
    return candidate


def _replaced(conversation: Conversation, tools: ToolSet) -> Set[str]:
    """Return the wire names of client tools whose definition changes during a conversation."""
    first = {tools.wire(tool.name): tool for tool in conversation.preamble.tools}
    added = (tool for item in conversation.items if isinstance(item, AddedTools) for tool in item.tools)
    named = ((tools.wire(tool.name), tool) for tool in added if not tool.server)
    return {name for name, tool in named if not _is_same(first.setdefault(name, tool), tool)}


def _is_same(one: FunctionTool | None, other: FunctionTool) -> bool:
    """Return whether two definitions of a tool lead to the same declaration."""
    return one is not None and (
        (one.description, one.parameters, one.free_text) == (other.description, other.parameters, other.free_text)
    )


def _definition(tool: FunctionTool, name: str) -> Declaration:
    """Return the declaration of one of several definitions of a tool in the conversation."""
    planned = plan_tools((tool,))
    return replace(planned.declarations[0], name=name, digest=planned.digest)


def declarations_by_message(
    conversation: Conversation, tools: ToolSet
) -> tuple[tuple[Declaration, ...], dict[int, tuple[Declaration, ...]]]:
    """Return the declarations of the first developer message, and of `AddedTools` items.

    The second value maps the index of each `AddedTools` item to its declarations. An item declares only tools that no
    earlier message declared, and tools with a new definition.
    """
    if not conversation.deferred and AddedTools not in map(type, conversation.items):
        return tools.declarations, {}
    added = {index: item for index, item in enumerate(conversation.items) if isinstance(item, AddedTools)}
    deferred = {tools.wire(tool.name) for tool in conversation.deferred}
    newest = {each.name: each for each in tools.declarations}
    latest = {tools.wire(tool.name): tool for tool in conversation.preamble.tools}
    later = {tools.wire(tool.name) for item in added.values() for tool in item.tools} - latest.keys()
    replaced = _replaced(conversation, tools)
    # Server tools are in the first message too, except deferred ones: those are declared where a search found them.
    first = tuple(
        _definition(latest[each.name], each.name) if each.name in replaced else each
        for each in tools.declarations
        if each.name not in later and each.name not in deferred
    )
    undeclared = {name: newest[name] for name in later if name in newest}
    by_position = {}
    for index, item in added.items():
        here: list[Declaration] = []
        for name, tool in {tools.wire(tool.name): tool for tool in item.tools}.items():
            if name in replaced and not _is_same(latest.get(name), tool):
                here.append(_definition(tool, name))
                latest[name] = tool
            elif name not in replaced and name in undeclared:
                here.append(undeclared.pop(name))
        by_position[index] = tuple(here)
    return first, by_position
