"""Tools that cannot be declared to the model: left out, noted on every API, and logged once."""

from __future__ import annotations

import logging

import pytest

from tests.e2e.hosting import DOCS
from tests.e2e.responses import ANSWER, Json, Line, line
from tests.e2e.surfaces import unisono_object
from tests.e2e.wires import WIRES
from tests.mcp.hostile import TOOL, Hostile, answer, text

UNDECLARABLE = {"name": "odd", "inputSchema": {"type": "object", "properties": {"a" * 300: {"type": "string"}}}}
BAD_NAME = {"name": "line\nbreak", "inputSchema": {"type": "object"}}
RUN = {"unisono": {"run_tools": True}}


async def request_object(harness: Line, surface: str, *, stream: bool) -> Json:
    if surface == "chat":
        return unisono_object(await harness.gateway.chat(stream=stream, **RUN))
    if surface == "messages":
        return unisono_object(await harness.gateway.messages(stream=stream, **RUN))
    if surface == "background":
        return unisono_object(await harness.post(stream=True, background=True, tools=[DOCS]))
    return unisono_object(await harness.post(stream=stream, tools=[DOCS]))


SURFACES = [("chat", False), ("chat", True), ("messages", False), ("messages", True), ("responses", False)]
SURFACES += [("responses", True), ("background", True)]


async def test_undeclarable_tools_are_noted_and_logged_once_per_list(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listed = [TOOL, UNDECLARABLE, BAD_NAME, TOOL]
    async with Hostile(lambda seen: [text(seen)], listing=lambda seen: [answer(seen, {"tools": listed})]) as server:
        entry = {"url": f"{server.url}/mcp", "require_approval": "never"}
        with caplog.at_level(logging.WARNING, "unisono.tools"):
            async with line(WIRES["vllm"], mcp_servers={"docs": entry}) as harness:
                for surface, stream in SURFACES:
                    harness.say(ANSWER)
                    note = await request_object(harness, surface, stream=stream)
                    assert note["recoveries"] == ["tool-left-out"], surface
                    notes = "\n".join(note["notes"])
                    assert len(note["notes"]) == 3, surface
                    for name in ("'odd'", "'line\\nbreak'", "'act'"):
                        assert f"tool {name} of server 'docs': left out, " in notes, surface
                    assert "docs__act" in harness.prompts[-1]
                    assert "docs__odd" not in harness.prompts[-1]
    lines = [record for record in caplog.records if record.name == "unisono.tools"]
    assert len(lines) == 1
    assert "odd" in lines[0].getMessage()
    assert lines[0].__dict__["tool_server"] == "docs"


@pytest.mark.slow
async def test_a_changed_tool_list_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    listed = [TOOL, UNDECLARABLE]
    async with Hostile(lambda seen: [text(seen)], listing=lambda seen: [answer(seen, {"tools": listed})]) as server:
        entry = {"url": f"{server.url}/mcp", "require_approval": "never"}
        with caplog.at_level(logging.WARNING, "unisono.tools"):
            async with line(WIRES["vllm"], mcp_servers={"docs": entry}) as harness:
                for _ in range(2):
                    await request_object(harness, "responses", stream=False)
                listed.append(BAD_NAME)
                assert harness.gateway.app is not None
                harness.gateway.app.state.gateway.parts.server_tools.value.host._lists.clear()
                for _ in range(2):
                    await request_object(harness, "responses", stream=False)
    assert len([record for record in caplog.records if record.name == "unisono.tools"]) == 2
