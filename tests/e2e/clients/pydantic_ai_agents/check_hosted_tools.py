"""Server tools in Pydantic AI: MCP servers by address, web search and code execution."""

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

ANSWER = "Here is the answer."
PROMPT = "script: a tool, then: an answer"


def agent_of(model: OpenAIResponsesModel, *tools: Any, **settings: Any) -> Agent[Any, Any]:
    model_settings: Any = {"temperature": 0, **settings}
    return Agent(model, capabilities=[NativeTool(tool) for tool in tools], model_settings=model_settings)


def docs(stage: Stage, **fields: Any) -> MCPServerTool:
    return MCPServerTool(id="docs", url=stage.tools["docs"], **fields)


def parts_of(messages: Any) -> list[Any]:
    return [part for message in messages if isinstance(message, ModelResponse) for part in message.parts]


def tool_calls_of(messages: Any) -> list[tuple[str, str]]:
    """Return the tools that the gateway ran, as pairs of native tool and tool name."""
    return [
        (part.tool_name, part.args_as_dict()["tool_name"])
        for part in parts_of(messages)
        if isinstance(part, NativeToolCallPart) and part.args_as_dict().get("action") == "call_tool"
    ]


async def test_server_tool_runs_within_one_request(scripted: OpenAIResponsesModel, stage: Stage) -> None:
    result = await agent_of(scripted, docs(stage)).run(PROMPT)
    assert (result.output, result.usage.requests) == (ANSWER, 1)
    parts = parts_of(result.all_messages())
    assert [type(part) for part in parts] == [
        *(NativeToolCallPart, NativeToolReturnPart, ThinkingPart),
        *(NativeToolCallPart, NativeToolReturnPart, ThinkingPart, TextPart),
    ]
    tool_list, called = (part.content for part in parts if isinstance(part, NativeToolReturnPart))
    assert "echo" in [tool["name"] for tool in tool_list["tools"]]
    assert (called["output"], called["error"]) == ("hello", None)
    assert tool_calls_of(result.all_messages()) == [("mcp_server:docs", "echo")]


async def test_tool_list_contains_only_allowed_tools(scripted: OpenAIResponsesModel, stage: Stage) -> None:
    result = await agent_of(scripted, docs(stage, allowed_tools=["echo"])).run(PROMPT)
    parts = parts_of(result.all_messages())
    listed = next(part.content for part in parts if isinstance(part, NativeToolReturnPart))
    assert [tool["name"] for tool in listed["tools"]] == ["echo"]


async def test_streamed_run_has_the_same_parts_as_a_whole_run(scripted: OpenAIResponsesModel, stage: Stage) -> None:
    async with agent_of(scripted, docs(stage)).run_stream(PROMPT) as result:
        assert await result.get_output() == ANSWER
        streamed = result.all_messages()
    whole = (await agent_of(scripted, docs(stage)).run(PROMPT)).all_messages()
    assert tool_calls_of(streamed) == tool_calls_of(whole)
    assert [type(part) for part in parts_of(streamed)] == [type(part) for part in parts_of(whole)]


# how requests refer to earlier ones: (settings of the model, whether the tool list is sent back)
HISTORY_SETTINGS: dict[str, tuple[OpenAIResponsesModelSettings, bool]] = {
    "item ids": ({"openai_send_reasoning_ids": True}, True),
    "previous_response_id": ({"openai_previous_response_id": "auto"}, True),
    "texts only": ({"openai_send_reasoning_ids": False}, False),
    "not stored": ({"openai_store": False}, False),
}


@pytest.mark.parametrize("mode", HISTORY_SETTINGS)
async def test_history_with_server_tools_is_continued(scripted: OpenAIResponsesModel, stage: Stage, mode: str) -> None:
    settings, listed = HISTORY_SETTINGS[mode]
    agent = agent_of(scripted, docs(stage), **settings)
    first = (await agent.run(PROMPT)).all_messages()
    history = ModelMessagesTypeAdapter.validate_json(ModelMessagesTypeAdapter.dump_json(first))
    second = await agent.run("script: an answer", message_history=history)
    assert second.output == ANSWER
    kinds = [type(part) for part in parts_of(second.new_messages())]
    assert kinds == [*(() if listed else (NativeToolCallPart, NativeToolReturnPart)), ThinkingPart, TextPart]


async def test_web_search_is_run_by_the_gateway(scripted: OpenAIResponsesModel) -> None:
    result = await agent_of(scripted, WebSearchTool()).run("script: a search, then: a page, then: a citation")
    assert result.output == "It is Paris【1†L4】."
    names = [part.tool_name for part in parts_of(result.all_messages()) if isinstance(part, NativeToolCallPart)]
    assert names == ["web_search", "web_search"]


async def test_code_execution_is_run_by_the_gateway(scripted: OpenAIResponsesModel) -> None:
    result = await agent_of(scripted, CodeExecutionTool()).run("script: a program, then: an answer")
    assert result.output == ANSWER
    [call] = [part for part in parts_of(result.all_messages()) if isinstance(part, NativeToolCallPart)]
    assert (call.tool_name, call.args_as_dict()["code"]) == ("code_execution", "print(6 * 7)")
