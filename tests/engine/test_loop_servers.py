"""Tool loop with real MCP servers on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from tests.engine.hosting import ANSWER, ENCODING, FREE, Talk, call, calls_of
from tests.harmony.fold import items_of
from tests.harmony.recoveries import F, R
from tests.mcp.conftest import Upstream
from unisono.core.events import Listed
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.generation import Engine
from unisono.engine.request import ServerTools
from unisono.mcp import McpHost


@pytest.fixture
async def host() -> AsyncIterator[McpHost]:
    host = McpHost()
    yield host
    await host.aclose()


@dataclass
class Hosted:
    """Request and model output with real tool servers."""

    talk: Talk
    host: McpHost

    def engine(self) -> Engine:
        engine_deps = self.talk.engine()._deps
        return Engine(
            EngineDeps(
                encoding=engine_deps.encoding,
                renderer=engine_deps.renderer,
                pool=engine_deps.pool,
                memory=ConversationCache(),
                new_call_id=engine_deps.new_call_id,
                tools=self.host,
            )
        )


def hosted(host: McpHost, upstream: Upstream, transport: str, *steps: str) -> Hosted:
    talk = Talk(steps)
    server = upstream.server(transport, label="up", approval=FREE)
    return Hosted(replace(talk, turn=replace(talk.turn, server_tools=ServerTools((server,)))), host)


@pytest.mark.parametrize("transport", ["modern", "legacy", "sse"])
async def test_a_tool_of_a_real_server_returns_its_result(host: McpHost, upstream: Upstream, transport: str) -> None:
    exchange = hosted(host, upstream, transport, call("up__echo", '{"text":"så ⟂"}'), call("up__broken"), ANSWER)
    stream = exchange.engine().start(exchange.talk.turn)
    events = [event async for batch in stream for event in batch]
    [listed] = [event for event in events if isinstance(event, Listed)]
    assert {"echo", "broken"} <= {tool.name for tool in listed.tools}
    assert calls_of(events)[0] == ("up", "echo", "så ⟂")
    assert "broken" in calls_of(events)[1][2]
    assert items_of(events) == (R("Now."), F("It is so."))
    assert "så ⟂<|end|>" in ENCODING.decode(list(exchange.talk.bases[1].prompt.tokens))


async def test_cancelling_the_stream_cancels_the_call_on_the_server(host: McpHost, upstream: Upstream) -> None:
    exchange = hosted(host, upstream, "modern", call("up__slow", '{"seconds":60,"name":"left"}'), ANSWER)
    run = exchange.engine().start(exchange.talk.turn)

    async def read() -> None:
        async for _ in run:
            pass

    reading = asyncio.create_task(read())
    await upstream.until_noted("slow begins left")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await run.aclose()
    await upstream.until_noted("slow cancelled left")


@pytest.mark.slow
async def test_a_call_of_a_real_server_is_cancelled_at_the_deadline(host: McpHost, upstream: Upstream) -> None:
    exchange = hosted(host, upstream, "modern", call("up__slow", '{"seconds":60,"name":"late"}'), "It is so.<|return|>")
    hosting = exchange.talk.turn.server_tools
    assert hosting is not None
    # The tools are listed in advance, so that the call has the full time.
    await host.list_tools(hosting.servers[0])
    stream = exchange.engine().start(replace(exchange.talk.turn, server_tools=replace(hosting, total_s=1.0)))
    events = [event async for batch in stream for event in batch]
    assert items_of(events) == (F("It is so."),)
    assert stream.report.recoveries == ["tool-deadline", "tools-ended"]
