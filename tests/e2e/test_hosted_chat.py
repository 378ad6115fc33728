"""Chat Completions in which the gateway runs the operator's tools: one answer, and what was run is nobody's affair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.gateway import message_of
from tests.e2e.hosting import calls, desk, result
from tests.e2e.responses import ANSWER, CALL, THOUGHT, Line
from tests.e2e.wires import ENCODING, WIRES, deployment
from tests.fakes import reset_at
from tests.mcp.conftest import Upstream, start_upstream

RUN = {"unisono": {"run_tools": True}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
BOTH_FORMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with start_upstream(tmp_path_factory.mktemp("upstream")) as (_, found):
        yield found


async def chats(here: Line, **fields: Any) -> Any:
    answer = await here.gateway.chat(stream_options={"include_usage": True} if fields.get("stream") else None, **fields)
    assert answer.status == 200, answer.raw
    return message_of(answer)


@BOTH_FORMS
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
async def test_tools_are_run_and_one_answer_is_given(upstream: Upstream, wire: Any, stream: bool) -> None:
    async with desk(upstream, wire) as here:
        here.say(calls("echo", text="chat"), ANSWER)
        message = await chats(here, stream=stream, **RUN)
        assert (message.content, message.calls, message.finish_reason) == ("ok", [], "stop")
        assert message.reasoning == "Hm.Hm."
        assert result("echo", "chat") in here.said
        generated = sum(len(ENCODING.encode_marked(said)) for said in (calls("echo", text="chat"), ANSWER))
        # Stop tokens count, also where the backend hides them.
        assert message.usage["completion_tokens"] == generated
        assert message.note.get("notes") is None


async def test_nothing_is_run_unless_it_is_asked_for(upstream: Upstream) -> None:
    async with desk(upstream) as here:
        here.say(ANSWER)
        await chats(here)
        assert "docs__echo" not in here.prompts[0]
        await chats(here, unisono={"run_tools": False})
        assert "docs__echo" not in here.prompts[1]


async def test_a_model_may_run_them_for_everybody(upstream: Upstream) -> None:
    wire = WIRES["vllm"]
    async with wire.fake() as fake:
        models = [{**deployment("gpt-oss", wire, fake), "unisono": {"run_tools": True}}]
        async with desk(upstream, model_list=models) as here:
            here.fake = fake
            here.say(calls("echo", text="everybody"), ANSWER)
            assert (await chats(here)).content == "ok"
            assert result("echo", "everybody") in here.said
            here.say(ANSWER)
            await chats(here, unisono={"run_tools": False})
            assert "docs__echo" not in here.prompts[0]
            await chats(here, tool_choice="none")
            assert "docs__echo" not in here.prompts[1]


async def test_tools_that_need_approval_are_not_offered(upstream: Upstream) -> None:
    async with desk(upstream, entry={"require_approval": {"never": {"tool_names": ["facts"]}}}) as here:
        here.say(calls("echo", text="unapproved"), ANSWER)
        await chats(here, **RUN)
        assert "docs__facts" in here.prompts[0]
        assert "docs__echo" not in here.prompts[0]
        assert upstream.noted("unapproved") == []
    async with desk(upstream, entry={"require_approval": None}) as here:
        here.say(ANSWER)
        message = await chats(here, **RUN)
        assert "docs__" not in here.prompts[0]
        assert message.note["notes"] == [
            "unisono.run_tools: no effect, because there are no tools to run, or because of 'tool_choice' or 'n'"
        ]


@BOTH_FORMS
async def test_the_clients_own_calls_are_the_clients(upstream: Upstream, stream: bool) -> None:
    async with desk(upstream) as here:
        here.say(calls("echo", text="mine and yours"), CALL)
        message = await chats(here, stream=stream, tools=[LOOK], **RUN)
        assert message.finish_reason == "tool_calls"
        assert [name for name, _ in message.calls] == ["look"]
        assert result("echo", "mine and yours") in here.said


MINE = CALL.removeprefix(THOUGHT)
NEXT = "<|start|>assistant"


def hosted_first(text: str) -> list[str]:
    return [calls("echo", text=text), CALL]


def hosted_beside(text: str) -> list[str]:
    return [calls("echo", text=text) + NEXT + MINE]


def hosted_behind(text: str) -> list[str]:
    return [CALL + NEXT + calls("echo", "", text=text)]


@BOTH_FORMS
@pytest.mark.parametrize("said", [hosted_first, hosted_beside, hosted_behind], ids=lambda said: said.__name__)
async def test_what_was_run_beside_the_clients_calls_is_there_when_it_answers_them(
    upstream: Upstream, said: Any, stream: bool
) -> None:
    """The client sends back its own call alone."""
    text = f"beside {said.__name__} {stream}"
    async with desk(upstream) as here:
        here.say(*said(text))
        fields: dict[str, Any] = {"tools": [LOOK], "stream": stream, **RUN}
        asked = [{"role": "user", "content": "Hi"}]
        first = await here.gateway.chat(messages=asked, **fields)
        if stream:
            deltas = [choice["delta"] for event in first.events for choice in event["choices"]]
            found = [call for delta in deltas for call in delta.get("tool_calls") or ()]
            [call_id] = [call["id"] for call in found if call.get("id")]
        else:
            [call] = first.body["choices"][0]["message"]["tool_calls"]
            call_id = call["id"]
        [(name, arguments)] = message_of(first).calls
        mine = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        told: list[Any] = [
            {"role": "assistant", "tool_calls": [mine]},
            {"role": "tool", "tool_call_id": call_id, "content": "It is up."},
        ]
        here.say(ANSWER)
        await here.gateway.chat(messages=[*asked, *told], **fields)
        assert here.said.count(result("echo", text)) == 1
        places = [here.said.index(each) for each in (f'"text":"{text}"', result("echo", text), "It is up.")]
        assert places == sorted(places)
        assert upstream.noted(text) == [f"echo {text}"]


async def test_a_server_that_is_not_there_is_done_without(upstream: Upstream) -> None:
    async with desk(upstream, entry={"url": "http://127.0.0.1:9/mcp"}) as here:
        here.say(ANSWER)
        assert (await chats(here, **RUN)).content == "ok"


async def test_what_was_run_is_not_run_again_where_a_backend_fails(upstream: Upstream) -> None:
    one, other = WIRES["vllm"], WIRES["vllm"]
    async with one.fake() as first, other.fake() as second:
        models = [deployment("gpt-oss", one, first), deployment("gpt-oss", other, second)]
        settings = {"num_retries": 2, "allowed_fails": 1_000_000}
        async with desk(upstream, model_list=models, router_settings=settings) as here:
            called = calls("echo", text="failing over")

            def said(asked: Any) -> Any:
                """Whoever is asked to go on behind the result dies, once."""
                if result("echo", "failing over") not in ENCODING.decode(asked["prompt"]):
                    return one.script(called)
                if failures:
                    return one.script(ANSWER, faults=(failures.pop(),))
                return one.script(ANSWER)

            failures = [reset_at(2)]
            first.script = second.script = said
            message = await chats(here, **RUN)
            assert message.content == "ok"
            assert message.note["failovers"] == 1
            assert upstream.noted("failing over") == ["echo failing over"]
