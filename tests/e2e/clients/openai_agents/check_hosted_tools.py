"""Hosted MCP tools of the Agents SDK: the gateway runs them, and asks the SDK's callback where it must be approved."""

from __future__ import annotations

from typing import Any

import pytest
from agents import (
    Agent,
    HostedMCPTool,
    MCPToolApprovalFunctionResult,
    MCPToolApprovalRequest,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
)

SAID = "Here is the answer."
BOTH_FORMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CALLED = ["mcp_list_tools", "reasoning_item_created", "tool_called", "reasoning_item_created", "message_output_created"]


class Approving:
    """A callback that says the same every time, and remembers what it was asked."""

    def __init__(self, approve: bool) -> None:
        self.asked: list[str] = []
        self._approve = approve

    def __call__(self, request: MCPToolApprovalRequest) -> MCPToolApprovalFunctionResult:
        self.asked.append(f"{request.data.server_label}.{request.data.name} {request.data.arguments}")
        if self._approve:
            return {"approve": True}
        return {"approve": False, "reason": "Too dear."}


def hosted(label: str, callback: Approving | None = None, **fields: Any) -> HostedMCPTool:
    """A server of the operator, by its label."""
    config: Any = {"type": "mcp", "server_label": label, **fields}
    return HostedMCPTool(tool_config=config, on_approval_request=callback)


def agent_of(model: OpenAIResponsesModel, *tools: Any, **settings: Any) -> Agent[Any]:
    return Agent(name="asker", model=model, tools=list(tools), model_settings=ModelSettings(temperature=0, **settings))


async def ran(agent: Agent[Any], given: str, stream: bool, **how: Any) -> tuple[Any, list[str]]:
    """The result of a run, and the names of its items, as a stream tells them."""
    if not stream:
        return await Runner.run(agent, given, **how), []
    running = Runner.run_streamed(agent, given, **how)
    events = [event async for event in running.stream_events()]
    return running, [event.name for event in events if event.type == "run_item_stream_event"]


def calls_in(result: Any) -> list[Any]:
    """The items of the calls that were made, in any turn of a run."""
    return [item for response in result.raw_responses for item in response.output if item.type == "mcp_call"]


@BOTH_FORMS
async def test_a_tool_is_run_within_one_turn(scripted: OpenAIResponsesModel, stream: bool) -> None:
    result, names = await ran(agent_of(scripted, hosted("docs")), "script: a tool, then: an answer", stream)
    assert (result.final_output, len(result.raw_responses)) == (SAID, 1)
    assert [(call.name, call.output) for call in calls_in(result)] == [("echo", "hello")]
    if stream:
        assert sorted(names) == sorted(CALLED)
    else:
        kinds = [item.type for item in result.new_items]
        assert kinds == [
            *("mcp_list_tools_item", "reasoning_item", "tool_call_item", "reasoning_item"),
            "message_output_item",
        ]


# how turns of one run hang together: (arguments of a run, settings of the model)
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "everything is sent back": ({}, {}),
    "each answer names the one before": ({"auto_previous_response_id": True}, {}),
    "nothing is kept": ({}, {"store": False}),
}


@BOTH_FORMS
@pytest.mark.parametrize("approve", [True, False], ids=["yes", "no"])
@pytest.mark.parametrize("way", WAYS)
async def test_the_callback_decides(scripted: OpenAIResponsesModel, way: str, approve: bool, stream: bool) -> None:
    how, settings = WAYS[way]
    approving = Approving(approve)
    agent = agent_of(scripted, hosted("guarded", approving), **settings)
    result, names = await ran(agent, "script: a guarded tool, then: an answer", stream, **how)
    assert approving.asked == ['guarded.echo {"text":"hello"}']
    assert (result.final_output, len(result.raw_responses)) == (SAID, 2)
    assert [call.output for call in calls_in(result)] == (["hello"] if approve else [])
    if stream:
        assert names.count("mcp_approval_requested") == names.count("mcp_approval_response") == 1


async def test_a_request_may_ask_for_more_approval(scripted: OpenAIResponsesModel) -> None:
    approving = Approving(True)
    tool = hosted("docs", approving, require_approval="always")
    result, _ = await ran(agent_of(scripted, tool), "script: a tool, then: an answer", False)
    assert len(approving.asked) == 1
    assert [call.output for call in calls_in(result)] == ["hello"]


async def test_without_a_callback_a_run_stops_and_goes_on(scripted: OpenAIResponsesModel) -> None:
    agent = agent_of(scripted, hosted("guarded"))
    first = await Runner.run(agent, "script: a guarded tool, then: an answer")
    [pending] = first.interruptions
    state = first.to_state()
    state.approve(pending)
    second = await Runner.run(agent, state)
    assert (second.final_output, second.interruptions) == (SAID, [])
    assert [call.output for call in calls_in(second)] == ["hello"]


async def test_a_session_sends_what_tools_did_back(scripted: OpenAIResponsesModel) -> None:
    session = SQLiteSession("s-hosted")
    agent = agent_of(scripted, hosted("docs"))
    await Runner.run(agent, "script: a tool, then: an answer", session=session)
    second = await Runner.run(agent, "script: an answer", session=session)
    assert second.final_output == SAID
    # The list of the server's tools is in what was sent back, and is not made again.
    assert [item.type for item in second.raw_responses[0].output] == ["reasoning", "message"]
