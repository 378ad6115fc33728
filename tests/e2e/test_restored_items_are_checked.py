"""Hooks check what the gateway restores from earlier answers: reasoning, server tool calls and their results."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.e2e.gateway import Answer
from tests.e2e.hosting import calls, desk
from tests.e2e.responses import ANSWER, CALL, Line
from tests.e2e.test_guardrails import BLOCK_MAIL, MAIL, MASK_MAIL, guardrail
from tests.e2e.wires import WIRES, deployment
from tests.mcp.conftest import Upstream

Json = dict[str, Any]

RUN = {"unisono": {"run_tools": True}}
PARAMETERS = {"type": "object", "properties": {}}
WISH = f"<|channel|>analysis<|message|>{MAIL} wants it.<|end|><|start|>assistant"
# A call of the client's tool after reasoning that contains the address.
CALL_FOR_ANN = CALL.replace("Hm.", f"{MAIL} wants it.")
MASKED = "[EMAIL_REDACTED]"
HOOK = {"blocklist": {"patterns": {"mail": "[a-z]+@example"}, "where": ["input"]}}
SURFACE = pytest.mark.parametrize("name", ["chat", "messages", "responses"])
BOTH_FORMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


class Turn:
    """A turn of a conversation in which the model calls the tool `look` of the client.

    The client sends back the call and its result, but neither reasoning nor the calls of server tools.
    """

    def __init__(self, harness: Line, name: str, **fields: Any) -> None:
        self.harness, self.name, self.fields = harness, name, fields
        self.call: Json = {}

    async def begin(self, *, stream: bool = False) -> Answer:
        answer = await self._post([{"role": "user", "content": "Hi"}], stream=stream)
        assert answer.status == 200, answer.raw
        assert MAIL not in answer.raw.decode() or not self.fields.get("guardrails")
        self.call = _call_in(answer)
        return answer

    async def go_on(self, **fields: Any) -> Answer:
        self.harness.say(ANSWER)
        name, call = self.name, self.call
        if name == "messages":
            used = {"type": "tool_use", "id": call["id"], "name": "look", "input": json.loads(call["arguments"])}
            result: Json = {"type": "tool_result", "tool_use_id": call["id"], "content": "k"}
            reply = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
        elif name == "responses":
            own = {"type": "function_call", "call_id": call["id"], "name": "look", "arguments": call["arguments"]}
            reply = [own, {"type": "function_call_output", "call_id": call["id"], "output": "k"}]
        else:
            own = {"id": call["id"], "type": "function", "function": {"name": "look", "arguments": call["arguments"]}}
            reply = [
                {"role": "assistant", "tool_calls": [own]},
                {"role": "tool", "tool_call_id": call["id"], "content": "k"},
            ]
        return await self._post([{"role": "user", "content": "Hi"}, *reply], **fields)

    async def _post(self, conversation: list[Json], **fields: Any) -> Answer:
        fields = {**self.fields, **fields}
        if self.name == "messages":
            tool: Json = {"name": "look", "input_schema": PARAMETERS}
            return await self.harness.gateway.messages(messages=conversation, tools=[tool], **fields)
        tool = {"name": "look", "parameters": PARAMETERS}
        if self.name == "responses":
            body = {"input": conversation, "tools": [{"type": "function", **tool}], "store": False, **fields}
            return await self.harness.post(**body)
        tools = [{"type": "function", "function": tool}]
        return await self.harness.gateway.chat(messages=conversation, tools=tools, **fields)


def _call_in(answer: Answer) -> Json:
    """Return the id and the arguments of the only call of an answer, in any API and form."""
    found = re.findall(r'"((?:call|toolu)_[0-9a-f]+)"', answer.raw.decode())
    [call_id] = set(found)
    return {"id": call_id, "arguments": '{"at":"sky"}'}


@asynccontextmanager
async def guarded(upstream: Upstream, *rules: Json, hooks: list[Any] | None = None) -> AsyncIterator[Line]:
    """Run a gateway with a tool server and guardrails, and with the model `gpt-oss-free` without guardrails."""
    wire = WIRES["vllm"]
    async with wire.fake() as fake:
        models = [deployment("gpt-oss", wire, fake), deployment("gpt-oss-free", wire, fake)]
        models[0]["litellm_params"]["guardrails"] = [rule["guardrail_name"] for rule in rules]
        unisono = {"hooks": hooks or []}
        async with desk(upstream, wire, model_list=models, guardrails=[*rules], unisono=unisono) as harness:
            harness.fake, harness.more = fake, {}
            yield harness


@pytest.mark.parametrize("way", ["guardrail", "hook"])
@pytest.mark.parametrize("name", ["chat", "messages"])
async def test_a_restored_result_of_a_server_tool_can_be_blocked(upstream: Upstream, name: str, way: str) -> None:
    rules = [guardrail("pre_call", on=False, patterns=[BLOCK_MAIL])] if way == "guardrail" else []
    async with guarded(upstream, *rules, hooks=[] if rules else [HOOK]) as harness:
        turn = Turn(harness, name, **RUN)
        harness.say(calls("echo", text=MAIL), CALL)
        await turn.begin()
        answer = await turn.go_on()
        assert (answer.status, harness.prompts) == (400, [])
        assert "blocked content" in answer.raw.decode()


@pytest.mark.parametrize("mode", ["pre_call", "post_call"])
@pytest.mark.parametrize("name", ["chat", "messages"])
async def test_restored_server_tool_calls_are_masked_and_not_lost(upstream: Upstream, name: str, mode: str) -> None:
    async with guarded(upstream, guardrail(mode, on=False, patterns=[MASK_MAIL])) as harness:
        turn = Turn(harness, name, **RUN)
        # The result of this tool does not contain its argument.
        harness.say(calls("huge", WISH, size=3, note=MAIL), CALL)
        await turn.begin()
        assert (await turn.go_on()).status == 200
        assert MAIL not in harness.said
        assert f"{MASKED} wants it." in harness.said
        assert f'"note":"{MASKED}"' in harness.said.replace('": "', '":"')
        assert "functions.docs__huge to=assistant" in harness.said


@SURFACE
@BOTH_FORMS
@pytest.mark.parametrize("mode", ["pre_call", "post_call"])
async def test_restored_reasoning_is_masked(upstream: Upstream, name: str, mode: str, stream: bool) -> None:
    async with guarded(upstream, guardrail(mode, on=False, patterns=[MASK_MAIL])) as harness:
        turn = Turn(harness, name)
        harness.say(CALL_FOR_ANN)
        await turn.begin(stream=stream)
        assert (await turn.go_on()).status == 200
        assert f"{MASKED} wants it." in harness.said
        assert MAIL not in harness.said
        if mode == "post_call":
            # Nothing restores the unmasked text, even for a model without guardrails.
            free = await turn.go_on(model="gpt-oss-free")
            assert free.status == 200, free.raw
            assert f"{MASKED} wants it." in harness.said
            assert MAIL not in harness.said


@SURFACE
@BOTH_FORMS
@pytest.mark.parametrize("mode", ["pre_call", "post_call"])
async def test_clean_items_keep_their_exact_tokens(upstream: Upstream, name: str, mode: str, stream: bool) -> None:
    async with guarded(upstream, guardrail(mode, on=False, patterns=[MASK_MAIL])) as harness:
        turn = Turn(harness, name)
        harness.say(CALL)
        await turn.begin(stream=stream)
        begun = harness.fake.requests[-1].json["prompt"]
        assert (await turn.go_on()).status == 200
        tokens = WIRES["vllm"].script(CALL).tokens
        assert harness.fake.requests[-1].json["prompt"][: len(begun) + len(tokens)] == [*begun, *tokens]
