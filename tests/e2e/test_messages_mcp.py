"""Anthropic's `mcp_servers` and `mcp_toolset`: the gateway runs the tools of servers that a request names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, config_of, gateway
from tests.e2e.hosting import calls, result
from tests.e2e.messages import message_in
from tests.fakes import FakeVllm, VllmScript
from tests.mcp.conftest import Upstream
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
ANSWER = "<|channel|>final<|message|>Done.<|return|>"
TOOLSET = {"type": "mcp_toolset", "mcp_server_name": "docs"}
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


class Desk:
    """A gateway whose model calls tools as scripted."""

    def __init__(self, running: Gateway, fake: FakeVllm, url: str) -> None:
        self.running = running
        self.fake = fake
        self.server = {"type": "url", "name": "docs", "url": url}

    async def ask(self, *outputs: str, messages: Any = None, **fields: Any) -> Answer:
        remaining = iter(outputs)
        self.fake.script = lambda _: VllmScript(tokens=ENCODING.encode_marked(next(remaining)))
        self.fake.requests.clear()
        messages = messages or [{"role": "user", "content": "Go"}]
        return await self.running.messages(messages=messages, **{"mcp_servers": [self.server], **fields})

    @property
    def prompts(self) -> list[str]:
        return [ENCODING.decode(request.json["prompt"]) for request in self.fake.requests]


@asynccontextmanager
async def desk(upstream: Upstream, **sections: Any) -> AsyncIterator[Desk]:
    url = upstream.urls["modern"]
    async with FakeVllm() as fake:
        allowed = {"host": "127.0.0.1", "ports": [], "plain_http": True, "private": True}
        sections.setdefault("unisono", {"mcp_allowed_hosts": [allowed]})
        async with gateway(config_of(f"vllm@{fake.url}", **sections)) as running:
            yield Desk(running, fake, url)


@STREAM
@pytest.mark.parametrize("tools", [[TOOLSET], []], ids=["toolset", "without a toolset"])
async def test_the_gateway_runs_the_tools_of_a_named_server(upstream: Upstream, stream: bool, tools: Any) -> None:
    async with desk(upstream) as harness:
        answer = await harness.ask(calls("echo", text="hello"), ANSWER, tools=tools, stream=stream)
        message = message_in(answer)
        use, returned = (block for block in message["content"] if block["type"].startswith("mcp_"))
        assert (use["type"], use["name"], use["server_name"]) == ("mcp_tool_use", "echo", "docs")
        assert use["input"] == {"text": "hello"}
        assert use["id"].startswith("mcptoolu_")
        assert (returned["type"], returned["tool_use_id"], returned["is_error"]) == (
            "mcp_tool_result",
            use["id"],
            False,
        )
        assert "hello" in returned["content"][0]["text"]
        assert message["stop_reason"] == "end_turn"
        [ran] = [prompt for prompt in harness.prompts if "to=assistant" in prompt]
        # The client sends the blocks back, and the model sees exact tokens of the call.
        messages = [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": "Again"},
        ]
        await harness.ask(ANSWER, tools=tools, messages=messages)
        assert result("echo", returned["content"][0]["text"]) in harness.prompts[0]
        assert calls("echo", text="hello").rpartition("assistant")[2] in harness.prompts[0]
        assert ran


@pytest.mark.parametrize(
    ("server", "toolset", "offered", "missing"),
    [
        ({}, {}, ["echo", "facts"], []),
        ({"tool_configuration": {"allowed_tools": ["echo"]}}, None, ["echo"], ["facts"]),
        ({"tool_configuration": {"enabled": False}}, None, [], ["echo", "facts"]),
        ({}, {"configs": {"facts": {"enabled": False}}}, ["echo"], ["facts"]),
        ({}, {"default_config": {"enabled": False}, "configs": {"echo": {"enabled": True}}}, ["echo"], ["facts"]),
        ({}, {"default_config": {"enabled": False}}, [], ["echo", "facts"]),
    ],
    ids=str,
)
async def test_only_enabled_tools_are_offered(
    upstream: Upstream, server: Any, toolset: Any, offered: list[str], missing: list[str]
) -> None:
    async with desk(upstream) as harness:
        tools = [] if toolset is None else [{**TOOLSET, **toolset}]
        answer = await harness.ask(ANSWER, tools=tools, mcp_servers=[{**harness.server, **server}])
        assert answer.status == 200, answer.raw
        [prompt] = harness.prompts
        assert all(f"docs__{name}" in prompt for name in offered)
        assert not any(f"docs__{name}" in prompt for name in missing)


async def test_the_token_is_sent_to_the_server_only(upstream: Upstream) -> None:
    async with desk(upstream) as harness:
        servers = [{**harness.server, "authorization_token": "planted-token"}]
        answer = await harness.ask(calls("headers"), ANSWER, tools=[TOOLSET], mcp_servers=servers)
        assert "planted-token" in message_in(answer)["content"][1]["content"][0]["text"] or b"planted" in answer.raw
        assert not any(b"planted" in bytes(request.body) for request in harness.fake.requests[:1])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**TOOLSET, "mcp_server_name": "other"}]}, "tools.0.mcp_server_name"),
        ({"tools": [TOOLSET, TOOLSET]}, "tools.1.mcp_server_name"),
        ({"tools": [{"type": "mcp_toolset"}]}, "tools.0"),
        ({"mcp_servers": [{"type": "url", "name": "docs"}]}, "mcp_servers.0.url"),
        ({"mcp_servers": [{"type": "url", "name": "docs", "url": "http://10.1.2.3/mcp"}]}, "mcp_servers.0.url"),
    ],
    ids=str,
)
async def test_mistakes_name_the_field(upstream: Upstream, fields: dict[str, Any], param: str) -> None:
    async with desk(upstream) as harness:
        answer = await harness.ask(ANSWER, **fields)
        assert answer.status in (400, 403)
        assert param in answer.body["error"]["message"]
        assert not harness.fake.requests


async def test_the_operators_approval_wins(upstream: Upstream) -> None:
    url = upstream.urls["modern"]
    servers = {"docs": {"url": url, "require_approval": {"always": {"tool_names": ["facts"]}}}}
    async with desk(upstream, mcp_servers=servers) as harness:
        await harness.ask(ANSWER, tools=[TOOLSET])
        [prompt] = harness.prompts
        assert "docs__facts" not in prompt


def obeying(request: Any) -> VllmScript:
    """Answer like a model: the rest of a call that the gateway has opened, or an answer."""
    prompt = ENCODING.decode(request["prompt"])
    is_call = prompt.rpartition("<|start|>assistant")[2].startswith("<|channel|>commentary to=functions.docs__echo")
    return VllmScript(tokens=ENCODING.encode_marked('{"text":"hello"}<|call|>' if is_call else ANSWER))


@STREAM
async def test_a_tool_of_a_server_can_be_required(upstream: Upstream, stream: bool) -> None:
    async with desk(upstream) as harness:
        harness.fake.script = obeying
        fields = {"tools": [TOOLSET], "mcp_servers": [harness.server], "tool_choice": {"type": "tool", "name": "echo"}}
        message = message_in(await harness.running.messages(stream=stream, **fields))
        uses = [(block["name"], block["input"]) for block in message["content"] if block["type"] == "mcp_tool_use"]
        assert uses == [("echo", {"text": "hello"})]
        assert message["stop_reason"] == "end_turn"


async def test_a_required_tool_that_no_server_has_is_reported(upstream: Upstream) -> None:
    async with desk(upstream) as harness:
        answer = await harness.ask(ANSWER, ANSWER, ANSWER, tools=[TOOLSET], tool_choice={"type": "tool", "name": "fly"})
    assert answer.status == 200, answer.raw
    assert answer.body["unisono"]["unmet"]
