"""Hosted MCP tools of the Agents SDK, run by the gateway, with approval callbacks."""

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

ANSWER = "Here is the answer."
WHOLE_AND_STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
RUN_ITEMS = [
    "mcp_list_tools",
    "reasoning_item_created",
    "tool_called",
    "reasoning_item_created",
    "message_output_created",
]


class ApprovalCallback:
    """Approval callback that records the requests and always makes the same decision."""

    def __init__(self, approve: bool) -> None:
        self.requests: list[str] = []
        self._approve = approve

    def __call__(self, request: MCPToolApprovalRequest) -> MCPToolApprovalFunctionResult:
        self.requests.append(f"{request.data.server_label}.{request.data.name} {request.data.arguments}")
        if self._approve:
            return {"approve": True}
        return {"approve": False, "reason": "Too dear."}


def hosted_tool(label: str, callback: ApprovalCallback | None = None, **fields: Any) -> HostedMCPTool:
    """Return a hosted MCP tool for a server of the operator, by its label."""
    config: Any = {"type": "mcp", "server_label": label, **fields}
    return HostedMCPTool(tool_config=config, on_approval_request=callback)


def make_agent(model: OpenAIResponsesModel, *tools: Any, **settings: Any) -> Agent[Any]:
    return Agent(name="asker", model=model, tools=list(tools), model_settings=ModelSettings(temperature=0, **settings))


async def run_agent(agent: Agent[Any], prompt: str, stream: bool, **options: Any) -> tuple[Any, list[str]]:
    """Run an agent; return the result and, for a stream, the names of its run items."""
    if not stream:
        return await Runner.run(agent, prompt, **options), []
    running = Runner.run_streamed(agent, prompt, **options)
    events = [event async for event in running.stream_events()]
    return running, [event.name for event in events if event.type == "run_item_stream_event"]


def calls_in(result: Any) -> list[Any]:
    """Return the MCP calls of all turns of a run."""
    return [item for response in result.raw_responses for item in response.output if item.type == "mcp_call"]


@WHOLE_AND_STREAMED
async def test_a_hosted_tool_runs_within_one_turn(scripted: OpenAIResponsesModel, stream: bool) -> None:
    result, names = await run_agent(
        make_agent(scripted, hosted_tool("docs")), "script: a tool, then: an answer", stream
    )
    assert (result.final_output, len(result.raw_responses)) == (ANSWER, 1)
    assert [(call.name, call.output) for call in calls_in(result)] == [("echo", "hello")]
    if stream:
        assert sorted(names) == sorted(RUN_ITEMS)
    else:
        kinds = [item.type for item in result.new_items]
        assert kinds == [
            *("mcp_list_tools_item", "reasoning_item", "tool_call_item", "reasoning_item"),
            "message_output_item",
        ]


# How the turns of a run are linked: (options of the run, settings of the model).
HISTORY_MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all items sent back": ({}, {}),
    "previous_response_id": ({"auto_previous_response_id": True}, {}),
    "not stored": ({}, {"store": False}),
}


@WHOLE_AND_STREAMED
@pytest.mark.parametrize("approve", [True, False], ids=["approved", "rejected"])
@pytest.mark.parametrize("mode", HISTORY_MODES)
async def test_the_approval_callback_decides(
    scripted: OpenAIResponsesModel, mode: str, approve: bool, stream: bool
) -> None:
    options, settings = HISTORY_MODES[mode]
    callback = ApprovalCallback(approve)
    agent = make_agent(scripted, hosted_tool("guarded", callback), **settings)
    result, names = await run_agent(agent, "script: a guarded tool, then: an answer", stream, **options)
    assert callback.requests == ['guarded.echo {"text":"hello"}']
    assert (result.final_output, len(result.raw_responses)) == (ANSWER, 2)
    assert [call.output for call in calls_in(result)] == (["hello"] if approve else [])
    if stream:
        assert names.count("mcp_approval_requested") == names.count("mcp_approval_response") == 1


async def test_a_request_can_require_more_approval(scripted: OpenAIResponsesModel) -> None:
    callback = ApprovalCallback(True)
    tool = hosted_tool("docs", callback, require_approval="always")
    result, _ = await run_agent(make_agent(scripted, tool), "script: a tool, then: an answer", False)
    assert len(callback.requests) == 1
    assert [call.output for call in calls_in(result)] == ["hello"]


async def test_a_run_without_a_callback_pauses_and_resumes(scripted: OpenAIResponsesModel) -> None:
    agent = make_agent(scripted, hosted_tool("guarded"))
    first = await Runner.run(agent, "script: a guarded tool, then: an answer")
    [pending] = first.interruptions
    state = first.to_state()
    state.approve(pending)
    second = await Runner.run(agent, state)
    assert (second.final_output, second.interruptions) == (ANSWER, [])
    assert [call.output for call in calls_in(second)] == ["hello"]


async def test_a_session_sends_tool_calls_back(scripted: OpenAIResponsesModel) -> None:
    session = SQLiteSession("s-hosted")
    agent = make_agent(scripted, hosted_tool("docs"))
    await Runner.run(agent, "script: a tool, then: an answer", session=session)
    second = await Runner.run(agent, "script: an answer", session=session)
    assert second.final_output == ANSWER
    # The tool list is among the items sent back, so the tools are not listed again.
    assert [item.type for item in second.raw_responses[0].output] == ["reasoning", "message"]
