"""Tools as the model sees them: legal names both ways, and declarations that are safe to print.

Promises that every wire name matches `[A-Za-z0-9_-]{1,64}`, that a legal name stays as it is, that two tools never
share one, and that the same list always gets the same names, so that prompts stay byte-stable. Whatever a client
declares is either printed right or refused with the field that is wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

from unisono.core.conversation import FunctionTool
from unisono.core.surrogates import well_formed
from unisono.errors import InvalidRequest
from unisono.harmony.builtin_tools import is_builtin
from unisono.harmony.limits import MAX_TOOLS, SchemaBudget, breaks_out
from unisono.harmony.lru_cache import LruCache
from unisono.harmony.ts_from_schema import SchemaReading, read_parameters
from unisono.harmony.ts_types import BlockType, LibrarySchema, to_library, without_null

LONGEST_NAME = 64
LONGEST_CLIENT_NAME = 512
_LEGAL = re.compile(rf"[A-Za-z0-9_-]{{1,{LONGEST_NAME}}}")
_ILLEGAL = re.compile(r"[^A-Za-z0-9_-]")
LONGEST_SENT_NAME = 128
_UNSENDABLE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class Declaration:
    """A tool as it is declared: its wire name, the lines above it, and its argument in the form that openai-harmony
    prints right; None for a tool without arguments."""

    name: str
    lines: tuple[str, ...]
    parameters: LibrarySchema | None


class ToolSet:
    """The tools of one request and their names on both sides. Immutable; `digest` stands for all of it."""

    def __init__(
        self,
        names: Mapping[str, str],
        declarations: Iterable[Declaration],
        digest: bytes,
        size: int,
        builtins: frozenset[str] = frozenset(),
    ) -> None:
        self._wire = dict(names)
        self._client = {wire: client for client, wire in names.items()}
        self.declared = frozenset(self._client)
        """Wire names."""
        self.declarations = tuple(declarations)
        self.digest = digest
        self.characters = size
        """Length of the declarations as JSON."""
        self.builtins = builtins
        """The tools of gpt-oss's training that are on offer besides; the digest does not stand for them."""

    def beside(self, builtins: Iterable[str]) -> ToolSet:
        """The same tools beside some that gpt-oss was trained on."""
        return ToolSet(self._wire, self.declarations, self.digest, self.characters, frozenset(builtins))

    def trained(self, client_name: str) -> bool:
        """Whether a call of that name is one of a tool gpt-oss was trained on, which no client's tool is named like."""
        return is_builtin(client_name) and client_name not in self._wire

    def wire(self, client_name: str) -> str:
        """The Harmony name. A tool that is not declared (a call in an old turn) gets a legal name of its own, never
        that of a declared one."""
        known = self._wire.get(client_name)
        return known if known is not None else _legal_name(client_name, self.declared)

    def client(self, wire_name: str) -> str:
        """The client's name. What the model made up comes back as a name that can be sent again: clients repeat every
        call, and here as elsewhere a name has letters, digits, `.`, `_` and `-` only."""
        known = self._client.get(wire_name)
        return known if known is not None else _UNSENDABLE.sub("_", wire_name)[:LONGEST_SENT_NAME]


TOOL_WEIGHT = 100
"""Characters that a tool counts beyond its own, and a set beyond its tools: objects take more memory than short text.
One unit of the bound is then at most 6 bytes."""

_PLANNED: LruCache[bytes, ToolSet] = LruCache(2_000_000)
"""Clients send the same tools with every request; planning is pure, so what it gave is remembered by content."""


def plan_tools(
    tools: Sequence[FunctionTool], *, at: str = "tools.{index}.function", schema_field: str = "parameters"
) -> ToolSet:
    """Name and check the tools of one request. `at` and `schema_field` say where the client wrote them.

    A tool repeated word for word counts once. Raises InvalidRequest with the field: no or two equal names, a schema
    that is no object, is too deep or too big, or whose names or values hold control characters.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"At most {MAX_TOOLS} tools can be declared.", param=at.partition(".")[0])
    budget, digest = SchemaBudget(), hashlib.sha256()
    for index, tool in enumerate(tools):
        with _blamed(f"{at.format(index=index)}.{schema_field}"):
            digest.update(_as_sent(tool, budget))
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
        place = at.format(index=index)
        if distinct.setdefault(tool.name, tool) is not tool:
            if distinct[tool.name] != tool:
                raise InvalidRequest("Two tools have the same name.", param=f"{place}.name")
            continue
        with _blamed(f"{place}.{schema_field}"):
            budget.spend(characters=len(tool.description))
            reading = None if tool.parameters is None else read_parameters(tool.parameters, budget)
        declarations.append(_declare(names[tool.name], tool.description, reading))
        characters += len(_as_sent(tool, SchemaBudget()))
    return ToolSet(names, declarations, digest, characters)


@contextmanager
def _blamed(field: str) -> Iterator[None]:
    """Name the field in what is refused inside."""
    try:
        yield
    except InvalidRequest as refusal:
        raise InvalidRequest(refusal.message, param=field) from refusal


def _as_sent(tool: FunctionTool, budget: SchemaBudget) -> bytes:
    """A tool's content as bytes, different for different tools."""
    parameters = dict(tool.parameters) if isinstance(tool.parameters, Mapping) else tool.parameters
    try:
        sent = json.dumps([tool.name, tool.description, parameters], allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as failure:
        raise InvalidRequest("A tool's parameters hold a value that JSON cannot express.") from failure
    budget.spend(json=len(sent))
    return sent


def _declare(name: str, description: str, reading: SchemaReading | None) -> Declaration:
    lines = tuple(well_formed(description).splitlines())
    if reading is None:
        return Declaration(name, lines, None)
    shape = reading.shape
    if isinstance(shape, BlockType):
        comment = "" if shape.comment == " ".join(description.split()) else shape.comment
        return Declaration(name, lines, to_library(BlockType(shape.fields, comment)))
    # The library has no room for a comment on anything but an object here: behind a last variant it would swallow the
    # rest of the declaration.
    above = (reading.comment,) if reading.comment else ()
    return Declaration(name, lines + above, to_library(without_null(shape)))


def _name_all(tools: Sequence[FunctionTool], at: str) -> dict[str, str]:
    """Wire names by client name. Legal names are taken first, whatever their position, so they never move."""
    for index, tool in enumerate(tools):
        if not tool.name or len(tool.name) > LONGEST_CLIENT_NAME or breaks_out(tool.name):
            raise InvalidRequest(
                f"A tool's name must be 1 to {LONGEST_CLIENT_NAME} characters on one line.",
                param=f"{at.format(index=index)}.name",
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
    """A legal name that resembles `name` and is not taken; the same for the same arguments."""
    stem = _ILLEGAL.sub("_", name)[:LONGEST_NAME] or "_"
    candidate, turn = stem, 0
    while candidate in taken or not candidate.strip("_-"):
        mark = hashlib.sha256(f"{turn}:{well_formed(name)}".encode()).hexdigest()[:8]
        candidate = f"{(stem.strip('_-') or 'tool')[: LONGEST_NAME - 9]}_{mark}"
        turn += 1
    return candidate
