"""Server tools on scripted backends: a test double of the tool host, and its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.engine.scripted import CONVERSATION, IDS, Line
from tests.engine.test_resuming import Continuing, tokens_of
from unisono.core.conversation import Json
from unisono.core.events import Closed, Delta, Event, Finished, HostedCall, Item, Listed, Listing, Opened, Ran, ToolCall
from unisono.core.generation import Capabilities, CompletionJob
from unisono.core.server_tool_arguments import ToolArguments
from unisono.core.tool_approvals import Approval
from unisono.core.tool_host import HostedTool, Progress, ToolHost, ToolList, ToolOutcome, ToolServer, UserAnswer
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.generation import Engine
from unisono.engine.request import GenerationReport, GenerationRequest, RequestOrigin, Resumption, ServerTools
from unisono.errors import UnisonoError
from unisono.harmony.encoding import load_encoding
from unisono.harmony.render import Renderer

ENCODING = load_encoding()
RENDERER = Renderer(ENCODING)

FREE = Approval(otherwise=False)
SCHEMA: dict[str, Json] = {"type": "object", "properties": {"q": {"type": "string"}}}


def tool(server: str, name: str) -> HostedTool:
    return HostedTool(server, name, f"The tool {name}.", SCHEMA)


DOCS = ToolServer("docs", "http://127.0.0.1:9/mcp", approval=FREE, idempotent=frozenset({"fetch"}))
FILES = ToolServer("files", "http://127.0.0.1:9/mcp")  # each of its tools needs approval
OFFERED: Mapping[str, Sequence[HostedTool] | UnisonoError] = {
    "docs": (tool("docs", "search"), tool("docs", "fetch")),
    "files": (tool("files", "delete"),),
}


def result_of(text: str) -> ToolOutcome:
    return ToolOutcome(text)


@dataclass
class Servers(ToolHost):
    """Tool host with scripted results that records every call it starts."""

    offered: Mapping[str, Sequence[HostedTool] | UnisonoError] = field(default_factory=lambda: OFFERED)
    answer: Callable[[str, Mapping[str, Json]], ToolOutcome] = lambda name, arguments: result_of(
        f"{name} of {arguments.get('q', '')}"
    )
    takes_s: float = 0.0
    # Started calls: server, tool and arguments.
    made: list[tuple[str, str, Mapping[str, Json]]] = field(default_factory=list)
    # Servers whose tools were listed.
    asked: list[str] = field(default_factory=list)
    # Tools whose calls were cancelled.
    cancelled: list[str] = field(default_factory=list)

    async def start(self) -> None:
        """Do nothing, since there is nothing to load."""

    async def list_tools(self, server: ToolServer, *, deadline: float | None = None) -> ToolList:
        self.asked.append(server.label)
        offered = self.offered[server.label]
        if isinstance(offered, UnisonoError):
            raise offered
        return ToolList(tuple(offered), "digest")

    async def call(
        self,
        server: ToolServer,
        tool: str,
        arguments: ToolArguments,
        *,
        deadline: float | None = None,
        progress: Progress | None = None,
        answer: UserAnswer | None = None,
        can_ask: bool = False,
    ) -> ToolOutcome:
        self.made.append((server.label, tool, arguments.members))
        try:
            await asyncio.sleep(self.takes_s)
        except asyncio.CancelledError:
            self.cancelled.append(tool)
            raise
        return self.answer(tool, arguments.members)

    async def aclose(self) -> None:
        pass


def call(name: str, arguments: str = "{}", *, thought: str = "") -> str:
    """Return the output of a step that ends with a call."""
    thoughts = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{thoughts}{header}{arguments}<|call|>"


SEARCH = call("docs__search", '{"q":"one"}', thought="I look.")
ANSWER = "<|channel|>analysis<|message|>Now.<|end|><|start|>assistant<|channel|>final<|message|>It is so.<|return|>"
HOSTING = ServerTools((DOCS,))


@dataclass
class Talk:
    """Request with server tools that is sent several times, each time to a new engine."""

    outputs: Sequence[str]
    host: Servers = field(default_factory=Servers)
    caps: Capabilities = IDS
    per_chunk: int = 4
    turn: GenerationRequest = field(
        default_factory=lambda: GenerationRequest(
            "m",
            CONVERSATION,
            server_tools=HOSTING,
            resumption=Resumption(seed="a seed"),
            origin=RequestOrigin(tenant="team"),
        )
    )
    bases: list[CompletionJob] = field(default_factory=list)

    def backend(self, **differing: object) -> Continuing:
        outputs = [tokens_of(output) for output in self.outputs]
        backend = Continuing(outputs, caps=self.caps, per_chunk=self.per_chunk, bases=self.bases)
        return replace(backend, **differing)  # type: ignore[arg-type]

    def engine(self, *backends: Continuing) -> Engine:
        return Engine(
            EngineDeps(
                encoding=ENCODING,
                renderer=RENDERER,
                pool=Line(backends or [self.backend()]),
                memory=ConversationCache(),
                new_call_id=lambda: "call_random",
                tools=self.host,
            )
        )

    async def batches(
        self, journal: Sequence[int] = (), *, cut: int | None = None, backends: Sequence[Continuing] = ()
    ) -> tuple[list[list[Event]], GenerationReport]:
        """Return the batches up to number `cut`, without requesting later ones, and the report."""
        run = self.engine(*backends).start(
            replace(self.turn, resumption=replace(self.turn.resumption, journal=tuple(journal)))
        )
        batches: list[list[Event]] = []
        async for batch in run:
            batches.append(batch)
            if len(batches) == cut:
                break
        await run.aclose()
        return batches, run.report

    async def events(self) -> tuple[list[Event], GenerationReport]:
        batches, report = await self.batches()
        assert all(batches)
        events = [event for batch in batches for event in batch]
        check_server_lifecycle(events)
        assert isinstance(events[-1], Finished)
        return events, report


def check_server_lifecycle(events: Sequence[Event]) -> None:
    """Check the lifecycle of items.

    - Only one item is open at a time.
    - The indexes of items, calls and listings count up.
    - A result follows its call.
    """
    open_item: Item | None = None
    counts = {"item": 0, "call": 0, "listing": 0}
    texts: list[str] = []
    waiting: HostedCall | None = None
    for event in events:
        match event:
            case Opened(Listing() as listing) | Listed(listing):
                assert open_item is None
                assert listing.index == counts["listing"]
                counts["listing"] += isinstance(event, Listed)
            case Opened(item):
                assert open_item is None
                assert waiting is None
                assert not isinstance(item, Listing)
                assert item.index == counts["item"]
                if isinstance(item, ToolCall):
                    assert item.call_index == counts["call"]
                    counts["call"] += 1
                open_item, texts = item, []
                counts["item"] += 1
            case Delta(item, text):
                assert item == open_item
                assert text
                texts.append(text)
            case Closed(item, text):
                assert item == open_item
                assert "".join(texts) == text
                open_item = None
                waiting = item if isinstance(item, HostedCall) and not item.needs_approval else None
            case Ran(item):
                assert item == waiting
                waiting = None
            case _:
                pass
    assert open_item is None
    assert waiting is None


def calls_of(events: Sequence[Event]) -> list[tuple[str, str, str]]:
    """Return server, tool and result of each server tool call; "?" is a request for approval."""
    found = []
    for event in events:
        if isinstance(event, Ran):
            found.append((event.item.server, event.item.tool, event.text_for_model))
        elif isinstance(event, Closed) and isinstance(event.item, HostedCall) and event.item.needs_approval:
            found.append((event.item.server, event.item.tool, "?"))
    return found


async def each(batches: AsyncIterator[list[Event]]) -> list[list[Event]]:
    return [batch async for batch in batches]
