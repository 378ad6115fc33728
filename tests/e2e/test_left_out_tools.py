"""Tools of a server that cannot be offered to the model: left out, noted on every surface, and logged once."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.e2e.gateway import Answer
from tests.e2e.hosting import DOCS
from tests.e2e.responses import ANSWER, Json, Line, line
from tests.e2e.wires import WIRES
from tests.mcp.hostile import TOOL, Hostile, answer, text

ODD = {"name": "odd", "inputSchema": {"type": "object", "properties": {"a\nb": {"type": "string"}}}}
NAMELESS = {"name": "line\nbreak", "inputSchema": {"type": "object"}}
RUN = {"unisono": {"run_tools": True}}


def about(answer: Answer) -> Json:
    """The last `unisono` object of an answer, however it came."""
    found: list[Any] = []

    def search(value: Any) -> None:
        if isinstance(value, dict):
            found.extend([value["unisono"]] if isinstance(value.get("unisono"), dict) else [])
            for inner in value.values():
                search(inner)

    search(answer.body)
    for event in answer.events:
        search(event)
    assert answer.status == 200, answer.raw
    return dict(found[-1])


async def asked(here: Line, surface: str, *, stream: bool) -> Json:
    if surface == "chat":
        return about(await here.gateway.chat(stream=stream, **RUN))
    if surface == "messages":
        return about(await here.gateway.messages(stream=stream, **RUN))
    if surface == "background":
        return about(await here.post(stream=True, background=True, tools=[DOCS]))
    return about(await here.post(stream=stream, tools=[DOCS]))


SURFACES = [("chat", False), ("chat", True), ("messages", False), ("messages", True), ("responses", False)]
SURFACES += [("responses", True), ("background", True)]


async def test_tools_that_cannot_be_declared_are_noted_and_logged_once_per_list(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listed = [TOOL, ODD, NAMELESS, TOOL]
    async with Hostile(lambda seen: [text(seen)], listing=lambda seen: [answer(seen, {"tools": listed})]) as server:
        entry = {"url": f"{server.url}/mcp", "require_approval": "never"}
        with caplog.at_level(logging.WARNING, "unisono.tools"):
            async with line(WIRES["vllm"], mcp_servers={"docs": entry}) as here:
                for surface, stream in SURFACES:
                    here.say(ANSWER)
                    told = await asked(here, surface, stream=stream)
                    assert told["recoveries"] == ["tool-left-out"], surface
                    notes = "\n".join(told["notes"])
                    assert len(told["notes"]) == 3, surface
                    for name in ("'odd'", "'line\\nbreak'", "'act'"):
                        assert f"tool {name} of server 'docs': left out, " in notes, surface
                    assert "docs__act" in here.prompts[-1]
                    assert "docs__odd" not in here.prompts[-1]
    lines = [record for record in caplog.records if record.name == "unisono.tools"]
    assert len(lines) == 1
    assert "odd" in lines[0].getMessage()
    assert lines[0].__dict__["tool_server"] == "docs"


@pytest.mark.slow
async def test_a_changed_list_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    listed = [TOOL, ODD]
    async with Hostile(lambda seen: [text(seen)], listing=lambda seen: [answer(seen, {"tools": listed})]) as server:
        entry = {"url": f"{server.url}/mcp", "require_approval": "never"}
        with caplog.at_level(logging.WARNING, "unisono.tools"):
            async with line(WIRES["vllm"], mcp_servers={"docs": entry}) as here:
                for _ in range(2):
                    await asked(here, "responses", stream=False)
                listed.append(NAMELESS)
                assert here.gateway.app is not None
                here.gateway.app.state.gateway.parts.hosting.value.host._lists.clear()
                for _ in range(2):
                    await asked(here, "responses", stream=False)
    assert len([record for record in caplog.records if record.name == "unisono.tools"]) == 2
