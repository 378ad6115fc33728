"""MCP servers as native tools of Pydantic AI: it names the server's address, and the gateway runs the tools."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_ai import Agent, CodeExecutionTool, MCPServerTool, WebSearchTool
from pydantic_ai.capabilities import NativeTool
from pydantic_ai.messages import (
    ModelMessagesTypeAdapter,
    ModelResponse,
    NativeToolCallPart,
    NativeToolReturnPart,
    TextPart,
    ThinkingPart,
)
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings

from conftest import Stage

SAID = "Here is the answer."
ASKED = "script: a tool, then: an answer"


def agent_of(model: OpenAIResponsesModel, *tools: Any, **settings: Any) -> Agent[Any, Any]:
    given: Any = {"temperature": 0, **settings}
    return Agent(model, capabilities=[NativeTool(tool) for tool in tools], model_settings=given)


def docs(stage: Stage, **fields: Any) -> MCPServerTool:
    return MCPServerTool(id="docs", url=stage.tools["docs"], **fields)


def parts_of(messages: Any) -> list[Any]:
    return [part for message in messages if isinstance(message, ModelResponse) for part in message.parts]


def told(messages: Any) -> list[tuple[str, str]]:
    """What the gateway ran, by the tool's name, and a call's return."""
    return [
        (part.tool_name, part.args_as_dict()["tool_name"])
        for part in parts_of(messages)
        if isinstance(part, NativeToolCallPart) and part.args_as_dict().get("action") == "call_tool"
    ]


async def test_a_tool_is_run_within_one_request(scripted: OpenAIResponsesModel, stage: Stage) -> None:
    result = await agent_of(scripted, docs(stage)).run(ASKED)
    assert (result.output, result.usage.requests) == (SAID, 1)
    parts = parts_of(result.all_messages())
    assert [type(part) for part in parts] == [
        *(NativeToolCallPart, NativeToolReturnPart, ThinkingPart),
        *(NativeToolCallPart, NativeToolReturnPart, ThinkingPart, TextPart),
    ]
    listed, called = (part.content for part in parts if isinstance(part, NativeToolReturnPart))
    assert "echo" in [tool["name"] for tool in listed["tools"]]
    assert (called["output"], called["error"]) == ("hello", None)
    assert told(result.all_messages()) == [("mcp_server:docs", "echo")]


async def test_only_the_tools_that_are_allowed_are_listed(scripted: OpenAIResponsesModel, stage: Stage) -> None:
    result = await agent_of(scripted, docs(stage, allowed_tools=["echo"])).run(ASKED)
    parts = parts_of(result.all_messages())
    listed = next(part.content for part in parts if isinstance(part, NativeToolReturnPart))
    assert [tool["name"] for tool in listed["tools"]] == ["echo"]


async def test_a_streamed_run(scripted: OpenAIResponsesModel, stage: Stage) -> None:
    async with agent_of(scripted, docs(stage)).run_stream(ASKED) as result:
        assert await result.get_output() == SAID
        streamed = result.all_messages()
    whole = (await agent_of(scripted, docs(stage)).run(ASKED)).all_messages()
    assert told(streamed) == told(whole)
    assert [type(part) for part in parts_of(streamed)] == [type(part) for part in parts_of(whole)]


# how turns hang together: (settings of the model, whether the gateway hears again of the list of the server's tools)
WAYS: dict[str, tuple[OpenAIResponsesModelSettings, bool]] = {
    "items are named": ({"openai_send_reasoning_ids": True}, True),
    "each answer names the one before": ({"openai_previous_response_id": "auto"}, True),
    "only texts are sent back": ({"openai_send_reasoning_ids": False}, False),
    "nothing is kept": ({"openai_store": False}, False),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_history_with_tools_goes_on(scripted: OpenAIResponsesModel, stage: Stage, way: str) -> None:
    settings, listed = WAYS[way]
    agent = agent_of(scripted, docs(stage), **settings)
    first = (await agent.run(ASKED)).all_messages()
    history = ModelMessagesTypeAdapter.validate_json(ModelMessagesTypeAdapter.dump_json(first))
    second = await agent.run("script: an answer", message_history=history)
    assert second.output == SAID
    kinds = [type(part) for part in parts_of(second.new_messages())]
    assert kinds == [*(() if listed else (NativeToolCallPart, NativeToolReturnPart)), ThinkingPart, TextPart]


async def test_the_web_is_searched(scripted: OpenAIResponsesModel) -> None:
    result = await agent_of(scripted, WebSearchTool()).run("script: a search, then: a page, then: a citation")
    assert result.output == "It is Paris【1†L4】."
    names = [part.tool_name for part in parts_of(result.all_messages()) if isinstance(part, NativeToolCallPart)]
    assert names == ["web_search", "web_search"]


async def test_code_is_run(scripted: OpenAIResponsesModel) -> None:
    result = await agent_of(scripted, CodeExecutionTool()).run("script: a program, then: an answer")
    assert result.output == SAID
    [call] = [part for part in parts_of(result.all_messages()) if isinstance(part, NativeToolCallPart)]
    assert (call.tool_name, call.args_as_dict()["code"]) == ("code_execution", "print(6 * 7)")
