"""Stored responses, conversations and items: their use in requests and prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import gateway
from tests.e2e.responses import ANSWER, CALL, OK, THOUGHT, TOOL, Json, Line, kinds, line, refusal, text_of
from tests.e2e.wires import ENCODING, WIRES, deployment
from tests.fakes import VllmScript, close_at
from unisono.core.generation import END

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAM_MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
UNKNOWN_ID = "0" * 32


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES.values(), ids=WIRES)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(request.param) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Line, Line]]:
    """Two gateways that share only a store and a token-id backend.

    Neither has access to the caches of the other.
    """
    wire = WIRES["vllm"]
    async with wire.fake() as fake:
        url = f"sqlite://{tmp_path_factory.mktemp('state')}/state.db"
        config = {"model_list": [deployment("gpt-oss", wire, fake)], "store": {"url": url}}
        async with gateway(config) as first, gateway(config) as second:
            yield Line(wire, fake, first), Line(wire, fake, second)


def output_with(text: str) -> str:
    return f"{THOUGHT}<|channel|>final<|message|>{text}<|return|>"


def user(text: str) -> str:
    return f"<|start|>user<|message|>{text}<|end|>"


def final(text: str) -> str:
    return f"<|start|>assistant<|channel|>final<|message|>{text}<|end|>"


# previous_response_id


@STREAM_MODES
async def test_a_chain_renders_all_turns_in_order(harness: Line, stream: bool) -> None:
    harness.say(*(output_with(f"a{n}") for n in range(4)))
    response: Json = {"id": None}
    expected = ""
    for n in range(4):
        response = await harness.responds(stream=stream, input=f"u{n}", previous_response_id=response["id"])
        assert harness.said == expected + user(f"u{n}")
        expected = harness.said + final(f"a{n}")
        assert (await harness.kept(response)) == response


async def test_a_chain_can_branch(harness: Line) -> None:
    harness.say(output_with("root"), output_with("left"), output_with("right"), OK)
    root = await harness.whole(input="r")
    left = await harness.whole(input="l", previous_response_id=root["id"])
    right = await harness.whole(input="r", previous_response_id=root["id"])
    for branch, words in ((left, ("l", "left")), (right, ("r", "right"))):
        await harness.whole(input="u", previous_response_id=branch["id"])
        assert harness.said == user("r") + final("root") + user(words[0]) + final(words[1]) + user("u")


async def test_instructions_tools_and_effort_apply_to_one_request(harness: Line) -> None:
    harness.say(ANSWER)
    first = await harness.whole(instructions="Be brief.", tools=[TOOL], reasoning={"effort": "high"})
    assert "Be brief." in harness.prompts[-1]
    assert "Reasoning: high" in harness.prompts[-1]
    second = await harness.whole(instructions="Be kind.", previous_response_id=first["id"], reasoning={"effort": "low"})
    assert "Be kind." in harness.prompts[-1]
    assert "Reasoning: low" in harness.prompts[-1]
    for absent in ("Be brief.", "look"):
        assert absent not in harness.prompts[-1]
    await harness.whole(previous_response_id=second["id"])
    assert harness.said == (user("Hi") + final("ok")) * 2 + user("Hi")
    assert "Reasoning: medium" in harness.prompts[-1]


async def test_a_tool_result_is_matched_with_its_call_in_the_chain(harness: Line) -> None:
    harness.say(CALL, ANSWER)
    first = await harness.whole(input="u", tools=[TOOL])
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
    await harness.whole(input=[result], previous_response_id=first["id"], tools=[TOOL])
    rendered_result = "<|start|>functions.look to=assistant<|channel|>commentary<|message|>blue<|end|>"
    assert harness.said.endswith(user("u") + "<|start|>assistant" + CALL + rendered_result)
    message = refusal(
        await harness.post(input=[{**result, "call_id": "call_other"}], previous_response_id=first["id"]),
        400,
        "input.0.call_id",
    )
    assert "call_other" in message


async def test_a_chain_continues_after_incomplete_and_failed_responses(harness: Line) -> None:
    harness.say(output_with("one two three four"))
    incomplete = await harness.whole(input="u", max_output_tokens=13)
    assert incomplete["status"] == "incomplete"
    harness.say(OK[:-10] + " and so on", faults=(close_at(5),))
    failed = (await harness.streamed(input="v", previous_response_id=incomplete["id"])).last
    assert failed["status"] == "failed"
    harness.say(ANSWER)
    await harness.whole(input="w", previous_response_id=failed["id"])
    assert harness.said == user("u") + final(text_of(incomplete)) + user("v") + final(text_of(failed)) + user("w")


MISSING: dict[str, tuple[Json, int, str, str]] = {
    "unknown previous response": (
        {"previous_response_id": "resp_" + UNKNOWN_ID},
        404,
        "previous_response_id",
        "previous_response_not_found",
    ),
    "previous response with an invalid id": (
        {"previous_response_id": "{resp}*\n" + "x" * 3000},
        404,
        "previous_response_id",
        "previous_response_not_found",
    ),
    "item id as a previous response": (
        {"previous_response_id": "msg_" + UNKNOWN_ID},
        404,
        "previous_response_id",
        "previous_response_not_found",
    ),
    "unknown conversation": ({"conversation": "conv_" + UNKNOWN_ID}, 404, "conversation", "not_found"),
    "conversation with an invalid id": ({"conversation": {"id": "{conv}*\n"}}, 404, "conversation", "not_found"),
    "unknown item": (
        {"input": [{"type": "item_reference", "id": "msg_" + UNKNOWN_ID}]},
        404,
        "input.0.id",
        "not_found",
    ),
    "previous response and conversation": (
        {"previous_response_id": "resp_" + UNKNOWN_ID, "conversation": "conv_" + UNKNOWN_ID},
        400,
        "previous_response_id",
        "invalid_value",
    ),
    "empty id": ({"previous_response_id": ""}, 400, "previous_response_id", "invalid_value"),
    "number as an id": ({"previous_response_id": 5}, 400, "previous_response_id", "invalid_value"),
    "conversation without an id": ({"conversation": {}}, 400, "conversation.id", "invalid_value"),
    "number as a conversation": ({"conversation": 5}, 400, "conversation", "invalid_value"),
}


@STREAM_MODES
@pytest.mark.parametrize("store", [True, False], ids=["stored", "not stored"])
@pytest.mark.parametrize(("fields", "status", "param", "code"), MISSING.values(), ids=MISSING)
async def test_a_missing_reference_is_rejected_with_its_field(
    harness: Line, fields: Json, status: int, param: str, code: str, store: bool, stream: bool
) -> None:
    harness.say(ANSWER)
    message = refusal(await harness.post(**{"store": store, "stream": stream, **fields}), status, param, code)
    assert len(message) < 400
    assert harness.prompts == []


async def delete_response(harness: Line, response: Json) -> None:
    async with harness.gateway.session.delete(f"{harness.gateway.url}/v1/responses/{response['id']}") as deleted:
        assert deleted.status == 200


async def test_a_chain_with_a_deleted_response_is_not_continued(harness: Line) -> None:
    harness.say(ANSWER)
    first = await harness.whole()
    second = await harness.whole(previous_response_id=first["id"])
    third = await harness.whole(previous_response_id=second["id"])
    await delete_response(harness, second)
    refusal(await harness.post(previous_response_id=third["id"]), 404, "previous_response_id")
    refusal(await harness.post(previous_response_id=second["id"]), 404, "previous_response_id")
    item = second["output"][-1]["id"]
    refusal(await harness.post(input=[{"type": "item_reference", "id": item}]), 404, "input.0.id")
    # The chain before the deleted response continues, and later responses can be read.
    assert (await harness.whole(previous_response_id=first["id"]))["status"] == "completed"
    assert await harness.kept(third) == third


# store: false


@STREAM_MODES
async def test_an_unstored_response_cannot_be_read_or_referenced(harness: Line, stream: bool) -> None:
    harness.say(ANSWER)
    response = await harness.responds(stream=stream, store=False)
    assert response["store"] is False
    refusal(await harness.get(f"/responses/{response['id']}"), 404, "response_id")
    refusal(await harness.get(f"/responses/{response['id']}/input_items"), 404, "response_id")
    refusal(await harness.post(previous_response_id=response["id"]), 404, "previous_response_id")
    for item in response["output"]:
        refusal(await harness.post(input=[{"type": "item_reference", "id": item["id"]}]), 404, "input.0.id")


@STREAM_MODES
async def test_an_unstored_response_may_use_stored_state(harness: Line, stream: bool) -> None:
    harness.say(output_with("kept"), ANSWER)
    first = await harness.whole(input="u")
    second = await harness.responds(stream=stream, input="v", previous_response_id=first["id"], store=False)
    assert harness.said == user("u") + final("kept") + user("v")
    refusal(await harness.get(f"/responses/{second['id']}"), 404, "response_id")


# Conversations


@STREAM_MODES
@pytest.mark.parametrize("store", [True, False], ids=["stored", "not stored"])
async def test_every_response_is_added_to_its_conversation(harness: Line, stream: bool, store: bool) -> None:
    harness.say(CALL, output_with("blue"), ANSWER)
    conversation = await harness.conversation({"role": "developer", "content": "Be brief."})
    first = await harness.responds(stream=stream, store=store, input="u", conversation=conversation, tools=[TOOL])
    assert first["conversation"] == {"id": conversation}
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "o"}
    second = await harness.responds(
        stream=stream, store=store, input=[result], conversation={"id": conversation}, tools=[TOOL]
    )
    items = await harness.items(conversation)
    assert kinds(items) == [
        *("message", "message", "reasoning", "function_call"),
        *("function_call_output", "reasoning", "message"),
    ]
    assert items[2:4] == first["output"]
    assert items[5:] == second["output"]
    await harness.responds(stream=stream, store=store, input="v", conversation=conversation)
    instructions = "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
    assert harness.said.startswith(instructions + user("u") + "<|start|>assistant")
    assert harness.said.endswith(final("blue") + user("v"))
    stored = await harness.get(f"/responses/{first['id']}")
    assert stored.status == (200 if store else 404)


@STREAM_MODES
async def test_a_failed_response_is_not_added_to_its_conversation(harness: Line, stream: bool) -> None:
    conversation = await harness.conversation({"role": "user", "content": "u"})
    before = await harness.items(conversation)
    harness.say(OK[:-10] + " and so on", faults=(close_at(5),))
    reply = await harness.post(conversation=conversation, stream=stream)
    assert await harness.items(conversation) == before
    if stream:
        assert reply.events[-1]["type"] == "response.failed"
        assert (await harness.kept(reply.events[-1]["response"]))["status"] == "failed"
    else:
        refusal(reply, 502)
    harness.say(output_with("one two three"))
    incomplete = await harness.responds(stream=stream, conversation=conversation, max_output_tokens=13)
    assert incomplete["status"] == "incomplete"
    assert (await harness.items(conversation))[-1] == incomplete["output"][-1]
    harness.say(ANSWER)
    await harness.whole(conversation=conversation)
    assert harness.said == user("u") + user("Hi") + final(text_of(incomplete)) + user("Hi")


REJECTED: dict[str, tuple[Json, int, str]] = {
    "output without a call": (
        {"input": [{"type": "function_call_output", "call_id": "call_x", "output": "o"}]},
        400,
        "input.0.call_id",
    ),
    "reference to an unknown item": (
        {"input": [{"type": "item_reference", "id": "msg_" + UNKNOWN_ID}]},
        404,
        "input.0.id",
    ),
    "duplicate tools": ({"tools": [TOOL, TOOL]}, 400, "tools.1.name"),
}


@STREAM_MODES
@pytest.mark.parametrize(("fields", "status", "param"), REJECTED.values(), ids=REJECTED)
async def test_a_rejected_request_leaves_the_conversation_unchanged_and_unlocked(
    harness: Line, fields: Json, status: int, param: str, stream: bool
) -> None:
    harness.say(ANSWER)
    conversation = await harness.conversation({"role": "user", "content": "u"})
    before = await harness.items(conversation)
    refusal(await harness.post(conversation=conversation, stream=stream, **fields), status, param)
    assert await harness.items(conversation) == before
    assert (await harness.whole(conversation=conversation))["status"] == "completed"


@pytest.mark.slow
@STREAM_MODES
async def test_a_conversation_accepts_one_response_at_a_time(harness: Line, stream: bool) -> None:
    conversation = await harness.conversation()
    harness.say(ANSWER, delay_s=0.15)
    first = asyncio.create_task(harness.responds(stream=stream, conversation=conversation))
    await harness.fake.asked()
    for other_stream in (False, True):
        answer = await harness.post(conversation=conversation, stream=other_stream)
        refusal(answer, 409, "conversation", "state_conflict")
    added = await harness.made(f"/conversations/{conversation}/items", items=[{"role": "user", "content": "u"}])
    assert (added.status, added.body) == (409, answer.body)
    async with harness.gateway.session.delete(f"{harness.gateway.url}/v1/conversations/{conversation}") as deleted:
        assert (deleted.status, await deleted.json()) == (409, answer.body)
    response = await first
    assert [item["id"] for item in (await harness.items(conversation))[1:]] == [
        item["id"] for item in response["output"]
    ]
    harness.say(ANSWER)
    assert (await harness.responds(stream=stream, conversation=conversation))["status"] == "completed"


async def test_a_deleted_conversation_is_gone_and_its_responses_remain(harness: Line) -> None:
    harness.say(ANSWER)
    conversation = await harness.conversation()
    first = await harness.whole(conversation=conversation)
    second = await harness.whole(conversation=conversation)
    await delete(harness, conversation)
    refusal(await harness.post(conversation=conversation), 404, "conversation", "not_found")
    assert await harness.kept(second) == second
    # The first response has seen no other items of the conversation.
    third = await harness.whole(previous_response_id=first["id"], input="v")
    assert harness.said == user("Hi") + final("ok") + user("v")
    await harness.whole(previous_response_id=third["id"], input="w")
    missing = await harness.post(previous_response_id=second["id"])
    refusal(missing, 404, "previous_response_id", "previous_response_not_found")


async def delete(harness: Line, conversation: str, *items: str) -> None:
    """Delete items of a conversation; without `items`, delete the conversation."""
    url = f"{harness.gateway.url}/v1/conversations/{conversation}"
    for path in [f"{url}/items/{item}" for item in items] or [url]:
        async with harness.gateway.session.delete(path) as deleted:
            assert deleted.status == 200


async def test_a_chain_may_branch_off_a_conversation(harness: Line) -> None:
    harness.say(output_with("one"), output_with("two"), ANSWER)
    conversation = await harness.conversation({"role": "user", "content": "before"})
    first = await harness.whole(input="u", conversation=conversation)
    await harness.whole(input="later", conversation=conversation)
    await harness.whole(input="v", previous_response_id=first["id"])
    assert harness.said == user("before") + user("u") + final("one") + user("v")
    assert kinds(await harness.items(conversation)) == ["message", *["message", "reasoning", "message"] * 2]


@pytest.mark.parametrize("status", ["completed", "cancelled"])
async def test_a_response_without_items_in_its_conversation_continues_after_the_items_before_it(
    harness: Line, status: str
) -> None:
    harness.say(output_with("one"))
    conversation = await harness.conversation()
    await harness.whole(input="u", conversation=conversation)
    harness.say(*([output_with("many words " * 500)] if status == "cancelled" else [output_with("two")]), delay_s=0.02)
    second = await harness.whole(input="v", conversation=conversation, background=True)
    if status == "cancelled":
        await harness.post(f"/{second['id']}/cancel")
    while second["status"] in ("queued", "in_progress"):
        second = await harness.kept(second)
    assert second["status"] == status
    own = (await harness.items(conversation))[3:]
    harness.say(output_with("three"), ANSWER)
    await harness.whole(input="w", conversation=conversation)
    if own:
        await delete(harness, conversation, *(item["id"] for item in own))
    await harness.whole(input="x", previous_response_id=second["id"])
    assert harness.said.startswith(user("u") + final("one") + user("v"))
    assert user("w") not in harness.said
    assert harness.said.endswith(user("x"))


# Dates


@pytest.mark.parametrize("days", [0, 3], ids=["today", "three days ago"])
async def test_a_continued_conversation_keeps_its_first_date(days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first_date = (datetime.now(UTC) - timedelta(days=days)).date().isoformat()
    dates = iter([first_date] * 2)
    monkeypatch.setattr("unisono.bootstrap.responses_api.current_date", lambda settings: next(dates, "2031-01-01"))
    async with line(WIRES["vllm"]) as harness:
        first = await harness.whole()
        conversation = await harness.conversation()
        assert f"Current date: {first_date}" in harness.prompts[-1]
        second = await harness.whole(previous_response_id=first["id"])
        await harness.whole(previous_response_id=second["id"])
        await harness.whole(conversation=conversation)
        await harness.whole(conversation=conversation)
        assert all(f"Current date: {first_date}" in prompt for prompt in harness.prompts)
        await harness.whole(input="Something else")
        assert "Current date: 2031-01-01" in harness.prompts[-1]


async def test_expired_state_is_not_found() -> None:
    async with line(WIRES["vllm"], store={"url": "memory://", "ttl_s": 0.6}) as harness:
        conversation = await harness.conversation()
        response = await harness.whole(conversation=conversation)
        item = response["output"][-1]["id"]
        references: tuple[tuple[Json, str], ...] = (
            ({"previous_response_id": response["id"]}, "previous_response_id"),
            ({"conversation": conversation}, "conversation"),
            ({"input": [{"type": "item_reference", "id": item}]}, "input.0.id"),
        )
        for fields, _ in references:
            assert (await harness.post(store=False, **fields)).status == 200
        await asyncio.sleep(0.8)
        harness.fake.requests.clear()
        for fields, param in references:
            refusal(await harness.post(store=False, **fields), 404, param)
        refusal(await harness.get(f"/responses/{response['id']}"), 404, "response_id")
        assert harness.prompts == []


# Exact tokens


# Not the canonical form: recipient after the channel, and ids that no tokenizer would choose for this text.
UNCOMMON_TOKENS = [ENCODING.encode_text(letter)[0] for letter in '{"location":"Paris"}']
UNCOMMON_CALL = [
    *ENCODING.encode_marked("<|channel|>analysis<|message|>"),
    *(ENCODING.encode_text(letter)[0] for letter in "Look it up."),
    *ENCODING.encode_marked("<|end|><|start|>assistant"),
    *ENCODING.encode_marked("<|channel|>commentary to=functions.look <|constrain|>json<|message|>"),
    *UNCOMMON_TOKENS,
    *ENCODING.encode_marked("<|call|>"),
]
UNCOMMON_ANSWER = [
    *ENCODING.encode_marked(THOUGHT + "<|channel|>final<|message|>"),
    *(ENCODING.encode_text(letter)[0] for letter in "Sunny."),
    *ENCODING.encode_marked("<|return|>"),
]
# Reasoning without an end before the call; it is repaired.
BROKEN_CALL = CALL.replace("<|end|>", "")


async def by_response(harness: Line, first: Json, new_items: Any, stream: bool) -> Json:
    return await harness.responds(stream=stream, input=new_items, previous_response_id=first["id"], tools=[TOOL])


async def by_conversation(harness: Line, first: Json, new_items: Any, stream: bool) -> Json:
    return await harness.responds(stream=stream, input=new_items, conversation=first["conversation"], tools=[TOOL])


async def by_items(harness: Line, first: Json, new_items: Any, stream: bool) -> Json:
    items = [{"role": "user", "content": "Hi"}, *first["output"], *new_items]
    return await harness.responds(stream=stream, input=items, tools=[TOOL])


async def by_references(harness: Line, first: Json, new_items: Any, stream: bool) -> Json:
    listed = (await harness.get(f"/responses/{first['id']}/input_items")).body["data"]
    items = [{"type": "item_reference", "id": item["id"]} for item in (*listed, *first["output"])]
    return await harness.responds(stream=stream, input=[*items, *new_items], tools=[TOOL])


async def by_sealed_items(harness: Line, first: Json, new_items: Any, stream: bool) -> Json:
    sealed = [{key: value for key, value in item.items() if key != "content"} for item in first["output"]]
    items = [{"role": "user", "content": "Hi"}, *sealed, *new_items]
    return await harness.responds(
        stream=stream, input=items, tools=[TOOL], store=False, include=["reasoning.encrypted_content"]
    )


async def by_loose_items(harness: Line, first: Json, new_items: Any, stream: bool) -> Json:
    items = [{"role": "user", "content": "Hi"}, *({**item, "id": "x"} for item in first["output"]), *new_items]
    return await harness.responds(stream=stream, input=items, tools=[TOOL], store=False)


Continuation = Callable[[Line, Json, Any, bool], Awaitable[Json]]
STATEFUL: dict[str, tuple[Continuation, Json]] = {
    "previous response": (by_response, {}),
    "conversation": (by_conversation, {"conversation": True}),
    "items": (by_items, {}),
    "references": (by_references, {}),
}
# Unstored items are restored from the cache of the gateway that generated them.
CACHED: dict[str, tuple[Continuation, Json]] = {
    "sealed items": (by_sealed_items, {"store": False, "include": ["reasoning.encrypted_content"]}),
    "items without ids": (by_loose_items, {"store": False}),
}


async def conversation_fields(harness: Line, fields: Json) -> Json:
    return {"conversation": await harness.conversation()} if fields.get("conversation") else fields


@STREAM_MODES
@pytest.mark.parametrize("continuation", [*STATEFUL, *CACHED])
async def test_a_tool_turn_continues_after_its_exact_tokens(
    replicas: tuple[Line, Line], continuation: str, stream: bool
) -> None:
    harness, other_gateway = replicas
    continue_with, fields = (STATEFUL | CACHED)[continuation]
    harness.say(VllmScript(tokens=UNCOMMON_CALL), VllmScript(tokens=UNCOMMON_ANSWER))
    first = await harness.responds(stream=stream, tools=[TOOL], **await conversation_fields(harness, fields))
    call = first["output"][-1]
    assert call["arguments"] == '{"location":"Paris"}'
    new_items = [{"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees"}]
    second = await continue_with(harness if continuation in CACHED else other_gateway, first, new_items, stream)
    assert text_of(second) == "Sunny."
    prompt, continued = harness.tokens
    assert continued[: len(prompt) + len(UNCOMMON_CALL)] == prompt + UNCOMMON_CALL


async def test_sealed_reasoning_keeps_its_tokens_on_another_replica(replicas: tuple[Line, Line]) -> None:
    harness, other_gateway = replicas
    continue_with, fields = CACHED["sealed items"]
    harness.say(VllmScript(tokens=UNCOMMON_CALL), VllmScript(tokens=UNCOMMON_ANSWER))
    first = await harness.whole(tools=[TOOL], **fields)
    new_items = [{"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "18 degrees"}]
    await continue_with(other_gateway, first, new_items, False)
    prompt, continued = harness.tokens
    reasoning = UNCOMMON_CALL[: UNCOMMON_CALL.index(END) + 1]
    assert continued[: len(prompt) + len(reasoning)] == prompt + reasoning


@pytest.mark.parametrize("continuation", STATEFUL)
async def test_an_answer_keeps_its_exact_tokens_in_later_prompts(
    replicas: tuple[Line, Line], continuation: str
) -> None:
    harness, other_gateway = replicas
    continue_with, fields = STATEFUL[continuation]
    harness.say(VllmScript(tokens=UNCOMMON_ANSWER))
    first = await harness.whole(tools=[TOOL], **await conversation_fields(harness, fields))
    await continue_with(other_gateway, first, [{"role": "user", "content": "Thanks"}], False)
    prompt, continued = harness.tokens
    # The turn is over, so its reasoning is dropped; the final message follows the same `<|start|>assistant`.
    final_tokens = UNCOMMON_ANSWER[len(ENCODING.encode_marked(THOUGHT)) : -1]
    assert continued == prompt + final_tokens + ENCODING.encode_marked(
        "<|end|>" + user("Thanks") + "<|start|>assistant"
    )


@pytest.mark.parametrize("continuation", STATEFUL)
async def test_repaired_output_stays_repaired_in_later_prompts(replicas: tuple[Line, Line], continuation: str) -> None:
    harness, other_gateway = replicas
    continue_with, fields = STATEFUL[continuation]
    harness.say(BROKEN_CALL)
    first = await harness.whole(tools=[TOOL], **await conversation_fields(harness, fields))
    assert first["unisono"]["recoveries"] == ["missing-end"]
    prompt = harness.prompts[-1]
    harness.say(ANSWER)
    new_items = [{"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "o"}]
    await continue_with(other_gateway, first, new_items, False)
    assert harness.prompts[-1].startswith(prompt + CALL)
