"""Chat Completions with server tools: one answer, without the calls that the gateway ran."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.gateway import message_of
from tests.e2e.hosting import calls, desk, result
from tests.e2e.responses import ANSWER, CALL, THOUGHT, Line
from tests.e2e.wires import ENCODING, WIRES, deployment
from tests.fakes import Refusal, reset_at
from tests.fakes.openai_api import FakeOpenAi
from tests.mcp.conftest import Upstream

RUN = {"unisono": {"run_tools": True}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
BOTH_FORMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


async def chat(harness: Line, **fields: Any) -> Any:
    response = await harness.gateway.chat(
        stream_options={"include_usage": True} if fields.get("stream") else None, **fields
    )
    assert response.status == 200, response.raw
    return message_of(response)


@BOTH_FORMS
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
async def test_server_tools_run_and_one_answer_is_returned(upstream: Upstream, wire: Any, stream: bool) -> None:
    async with desk(upstream, wire) as harness:
        harness.say(calls("echo", text="chat"), ANSWER)
        message = await chat(harness, stream=stream, **RUN)
        assert (message.content, message.calls, message.finish_reason) == ("ok", [], "stop")
        assert message.reasoning == "Hm.Hm."
        assert result("echo", "chat") in harness.said
        generated = sum(len(ENCODING.encode_marked(output)) for output in (calls("echo", text="chat"), ANSWER))
        # Stop tokens count even if the backend hides them.
        assert message.usage["completion_tokens"] == generated
        assert message.note.get("notes") is None


async def test_no_server_tool_runs_unless_the_request_enables_it(upstream: Upstream) -> None:
    async with desk(upstream) as harness:
        harness.say(ANSWER)
        await chat(harness)
        assert "docs__echo" not in harness.prompts[0]
        await chat(harness, unisono={"run_tools": False})
        assert "docs__echo" not in harness.prompts[1]


async def test_model_setting_enables_server_tools_for_all_requests(upstream: Upstream) -> None:
    wire = WIRES["vllm"]
    async with wire.fake() as fake:
        models = [{**deployment("gpt-oss", wire, fake), "unisono": {"run_tools": True}}]
        async with desk(upstream, model_list=models) as harness:
            harness.fake = fake
            harness.say(calls("echo", text="everybody"), ANSWER)
            assert (await chat(harness)).content == "ok"
            assert result("echo", "everybody") in harness.said
            harness.say(ANSWER)
            await chat(harness, unisono={"run_tools": False})
            assert "docs__echo" not in harness.prompts[0]
            await chat(harness, tool_choice="none")
            assert "docs__echo" not in harness.prompts[1]


async def test_tools_that_need_approval_are_not_offered(upstream: Upstream) -> None:
    async with desk(upstream, entry={"require_approval": {"never": {"tool_names": ["facts"]}}}) as harness:
        harness.say(calls("echo", text="unapproved"), ANSWER)
        await chat(harness, **RUN)
        assert "docs__facts" in harness.prompts[0]
        assert "docs__echo" not in harness.prompts[0]
        assert upstream.noted("unapproved") == []
    async with desk(upstream, entry={"require_approval": None}) as harness:
        harness.say(ANSWER)
        message = await chat(harness, **RUN)
        assert "docs__" not in harness.prompts[0]
        assert message.note["notes"] == [
            "unisono.run_tools: no effect, because there are no tools to run, or because of 'tool_choice' or 'n'"
        ]


@BOTH_FORMS
async def test_calls_of_client_tools_are_returned_to_the_client(upstream: Upstream, stream: bool) -> None:
    async with desk(upstream) as harness:
        harness.say(calls("echo", text="mine and yours"), CALL)
        message = await chat(harness, stream=stream, tools=[LOOK], **RUN)
        assert message.finish_reason == "tool_calls"
        assert [name for name, _ in message.calls] == ["look"]
        assert result("echo", "mine and yours") in harness.said


CLIENT_CALL = CALL.removeprefix(THOUGHT)
NEXT_MESSAGE = "<|start|>assistant"


def server_call_first(text: str) -> list[str]:
    return [calls("echo", text=text), CALL]


def parallel_server_calls_first(text: str) -> list[str]:
    return [calls("echo", text=text) + NEXT_MESSAGE + calls("echo", "", text="other"), CALL]


def server_call_before_client_call(text: str) -> list[str]:
    return [calls("echo", text=text) + NEXT_MESSAGE + CLIENT_CALL]


def server_call_after_client_call(text: str) -> list[str]:
    return [CALL + NEXT_MESSAGE + calls("echo", "", text=text)]


@BOTH_FORMS
@pytest.mark.parametrize(
    "outputs",
    [server_call_first, parallel_server_calls_first, server_call_before_client_call, server_call_after_client_call],
    ids=lambda make: make.__name__,
)
async def test_server_tool_results_reach_the_follow_up_request(upstream: Upstream, outputs: Any, stream: bool) -> None:
    """The client sends back only its own call."""
    text = f"beside {outputs.__name__} {stream}"
    async with desk(upstream) as harness:
        harness.say(*outputs(text))
        fields: dict[str, Any] = {"tools": [LOOK], "stream": stream, **RUN}
        messages = [{"role": "user", "content": "Hi"}]
        first = await harness.gateway.chat(messages=messages, **fields)
        last_prompt = harness.prompts[-1]
        if stream:
            deltas = [choice["delta"] for event in first.events for choice in event["choices"]]
            deltas_of_calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
            [call_id] = [call["id"] for call in deltas_of_calls if call.get("id")]
        else:
            [call] = first.body["choices"][0]["message"]["tool_calls"]
            call_id = call["id"]
        [(name, arguments)] = message_of(first).calls
        client_call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        reply: list[Any] = [
            {"role": "assistant", "tool_calls": [client_call]},
            {"role": "tool", "tool_call_id": call_id, "content": "It is up."},
        ]
        harness.say(ANSWER)
        await harness.gateway.chat(messages=[*messages, *reply], **fields)
        assert harness.prompts[-1].startswith(last_prompt)
        assert harness.said.count(result("echo", text)) == 1
        positions = [harness.said.index(each) for each in (f'"text":"{text}"', result("echo", text), "It is up.")]
        assert positions == sorted(positions)
        assert upstream.noted(text) == [f"echo {text}"]


async def test_request_succeeds_without_an_unreachable_server(upstream: Upstream) -> None:
    async with desk(upstream, entry={"url": "http://127.0.0.1:9/mcp"}) as harness:
        harness.say(ANSWER)
        assert (await chat(harness, **RUN)).content == "ok"


async def test_server_tools_run_once_when_a_backend_fails(upstream: Upstream) -> None:
    wire, same_wire = WIRES["vllm"], WIRES["vllm"]
    async with wire.fake() as first, same_wire.fake() as second:
        models = [deployment("gpt-oss", wire, first), deployment("gpt-oss", same_wire, second)]
        settings = {"num_retries": 2, "allowed_fails": 1_000_000}
        async with desk(upstream, model_list=models, router_settings=settings) as harness:
            tool_call = calls("echo", text="failing over")

            def script(request: Any) -> Any:
                """Fail once after the tool result is in the prompt."""
                if result("echo", "failing over") not in ENCODING.decode(request["prompt"]):
                    return wire.script(tool_call)
                if failures:
                    return wire.script(ANSWER, faults=(failures.pop(),))
                return wire.script(ANSWER)

            failures = [reset_at(2)]
            first.script = second.script = script
            message = await chat(harness, **RUN)
            assert message.content == "ok"
            assert message.note["failovers"] == 1
            assert upstream.noted("failing over") == ["echo failing over"]


@BOTH_FORMS
@pytest.mark.parametrize("fails_first", [False, True], ids=["after the call", "at once"])
async def test_requests_with_server_tools_do_not_fall_back_to_a_pass_through_model(
    upstream: Upstream, fails_first: bool, stream: bool
) -> None:
    wire, called = WIRES["vllm"], f"no fallback {fails_first} {stream}"
    async with wire.fake() as oss, FakeOpenAi() as other:
        models = [
            deployment("gpt-oss", wire, oss),
            {"model_name": "other", "litellm_params": {"model": "vllm/qwen", "api_base": other.url}},
        ]
        settings = {"num_retries": 0, "allowed_fails": 1_000_000, "fallbacks": [{"gpt-oss": ["other"]}]}
        async with desk(upstream, model_list=models, router_settings=settings) as harness:
            outputs: list[Any] = [] if fails_first else [wire.script(calls("echo", "", text=called))]
            oss.script = lambda _: outputs.pop(0) if outputs else Refusal(500, b'{"error":"down"}')
            answer = await harness.gateway.chat(stream=stream, **RUN)
            assert b"backend_error" in answer.raw
            assert upstream.noted(called) == ([] if fails_first else [f"echo {called}"])
            assert [request for request in other.requests if request.method == "POST"] == []
            # Without server tools, the same model is a fallback.
            assert (await harness.gateway.chat(stream=stream)).status == 200
            refused = await harness.gateway.chat(stream=stream, fallbacks=["other"], **RUN)
            assert (refused.status, refused.body["error"]["param"]) == (400, "fallbacks")
