"""What a request leans on: responses, conversations and items that are kept, over the wire and in the prompt."""

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

WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
NOWHERE = "0" * 32


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES.values(), ids=WIRES)
async def talk(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(request.param) as here:
        yield here


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Line, Line]]:
    """Two gateways with nothing but a store and a backend that takes ids in common: what one remembers for itself is
    of no use to the other."""
    wire = WIRES["vllm"]
    async with wire.fake() as fake:
        url = f"sqlite://{tmp_path_factory.mktemp('state')}/state.db"
        config = {"model_list": [deployment("gpt-oss", wire, fake)], "store": {"url": url}}
        async with gateway(config) as one, gateway(config) as two:
            yield Line(wire, fake, one), Line(wire, fake, two)


def answered(text: str) -> str:
    return f"{THOUGHT}<|channel|>final<|message|>{text}<|return|>"


def user(text: str) -> str:
    return f"<|start|>user<|message|>{text}<|end|>"


def final(text: str) -> str:
    return f"<|start|>assistant<|channel|>final<|message|>{text}<|end|>"


# -- previous_response_id


@WAYS
async def test_a_chain_says_everything_in_order(talk: Line, stream: bool) -> None:
    talk.say(*(answered(f"a{n}") for n in range(4)))
    response: Json = {"id": None}
    said = ""
    for n in range(4):
        response = await talk.responds(stream=stream, input=f"u{n}", previous_response_id=response["id"])
        assert talk.said == said + user(f"u{n}")
        said = talk.said + final(f"a{n}")
        assert (await talk.kept(response)) == response


async def test_a_chain_branches(talk: Line) -> None:
    talk.say(answered("root"), answered("left"), answered("right"), OK)
    root = await talk.whole(input="r")
    left = await talk.whole(input="l", previous_response_id=root["id"])
    right = await talk.whole(input="r", previous_response_id=root["id"])
    for branch, words in ((left, ("l", "left")), (right, ("r", "right"))):
        await talk.whole(input="u", previous_response_id=branch["id"])
        assert talk.said == user("r") + final("root") + user(words[0]) + final(words[1]) + user("u")


async def test_instructions_tools_and_effort_are_those_of_each_request(talk: Line) -> None:
    talk.say(ANSWER)
    first = await talk.whole(instructions="Be brief.", tools=[TOOL], reasoning={"effort": "high"})
    assert "Be brief." in talk.prompts[-1]
    assert "Reasoning: high" in talk.prompts[-1]
    second = await talk.whole(instructions="Be kind.", previous_response_id=first["id"], reasoning={"effort": "low"})
    assert "Be kind." in talk.prompts[-1]
    assert "Reasoning: low" in talk.prompts[-1]
    for gone in ("Be brief.", "look"):
        assert gone not in talk.prompts[-1]
    await talk.whole(previous_response_id=second["id"])
    assert talk.said == (user("Hi") + final("ok")) * 2 + user("Hi")
    assert "Reasoning: medium" in talk.prompts[-1]


async def test_an_answer_to_a_call_finds_it_in_the_chain(talk: Line) -> None:
    talk.say(CALL, ANSWER)
    first = await talk.whole(input="u", tools=[TOOL])
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
    await talk.whole(input=[result], previous_response_id=first["id"], tools=[TOOL])
    told = "<|start|>functions.look to=assistant<|channel|>commentary<|message|>blue<|end|>"
    assert talk.said.endswith(user("u") + "<|start|>assistant" + CALL + told)
    message = refusal(
        await talk.post(input=[{**result, "call_id": "call_other"}], previous_response_id=first["id"]),
        400,
        "input.0.call_id",
    )
    assert "call_other" in message


async def test_a_chain_of_what_was_cut_or_failed_goes_on(talk: Line) -> None:
    talk.say(answered("one two three four"))
    cut = await talk.whole(input="u", max_output_tokens=13)
    assert cut["status"] == "incomplete"
    talk.say(OK[:-10] + " and so on", faults=(close_at(5),))
    failed = (await talk.streamed(input="v", previous_response_id=cut["id"])).last
    assert failed["status"] == "failed"
    talk.say(ANSWER)
    await talk.whole(input="w", previous_response_id=failed["id"])
    assert talk.said == user("u") + final(text_of(cut)) + user("v") + final(text_of(failed)) + user("w")


MISSING: dict[str, tuple[Json, int, str, str]] = {
    "a previous response": (
        {"previous_response_id": "resp_" + NOWHERE},
        404,
        "previous_response_id",
        "previous_response_not_found",
    ),
    "a previous response by what is no id": (
        {"previous_response_id": "{resp}*\n" + "x" * 3000},
        404,
        "previous_response_id",
        "previous_response_not_found",
    ),
    "an item for a response": (
        {"previous_response_id": "msg_" + NOWHERE},
        404,
        "previous_response_id",
        "previous_response_not_found",
    ),
    "a conversation": ({"conversation": "conv_" + NOWHERE}, 404, "conversation", "not_found"),
    "a conversation by what is no id": ({"conversation": {"id": "{conv}*\n"}}, 404, "conversation", "not_found"),
    "an item": ({"input": [{"type": "item_reference", "id": "msg_" + NOWHERE}]}, 404, "input.0.id", "not_found"),
    "both": (
        {"previous_response_id": "resp_" + NOWHERE, "conversation": "conv_" + NOWHERE},
        400,
        "previous_response_id",
        "invalid_value",
    ),
    "an empty id": ({"previous_response_id": ""}, 400, "previous_response_id", "invalid_value"),
    "a number": ({"previous_response_id": 5}, 400, "previous_response_id", "invalid_value"),
    "a conversation without an id": ({"conversation": {}}, 400, "conversation.id", "invalid_value"),
    "a number for a conversation": ({"conversation": 5}, 400, "conversation", "invalid_value"),
}


@WAYS
@pytest.mark.parametrize("store", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize(("fields", "status", "param", "code"), MISSING.values(), ids=MISSING)
async def test_what_is_not_there_is_named_and_asks_no_backend(
    talk: Line, fields: Json, status: int, param: str, code: str, store: bool, stream: bool
) -> None:
    talk.say(ANSWER)
    message = refusal(await talk.post(**{"store": store, "stream": stream, **fields}), status, param, code)
    assert len(message) < 400
    assert talk.prompts == []


async def delete(talk: Line, response: Json) -> None:
    async with talk.gateway.session.delete(f"{talk.gateway.url}/v1/responses/{response['id']}") as gone:
        assert gone.status == 200


async def test_a_chain_with_a_hole_is_not_continued(talk: Line) -> None:
    talk.say(ANSWER)
    first = await talk.whole()
    second = await talk.whole(previous_response_id=first["id"])
    third = await talk.whole(previous_response_id=second["id"])
    await delete(talk, second)
    refusal(await talk.post(previous_response_id=third["id"]), 404, "previous_response_id")
    refusal(await talk.post(previous_response_id=second["id"]), 404, "previous_response_id")
    item = second["output"][-1]["id"]
    refusal(await talk.post(input=[{"type": "item_reference", "id": item}]), 404, "input.0.id")
    # What was before the hole still goes on, and what was after it can be read.
    assert (await talk.whole(previous_response_id=first["id"]))["status"] == "completed"
    assert await talk.kept(third) == third


# -- store: false


@WAYS
async def test_what_is_not_to_be_kept_is_not(talk: Line, stream: bool) -> None:
    talk.say(ANSWER)
    response = await talk.responds(stream=stream, store=False)
    assert response["store"] is False
    refusal(await talk.get(f"/responses/{response['id']}"), 404, "response_id")
    refusal(await talk.get(f"/responses/{response['id']}/input_items"), 404, "response_id")
    refusal(await talk.post(previous_response_id=response["id"]), 404, "previous_response_id")
    for item in response["output"]:
        refusal(await talk.post(input=[{"type": "item_reference", "id": item["id"]}]), 404, "input.0.id")


@WAYS
async def test_what_is_not_kept_may_lean_on_what_is(talk: Line, stream: bool) -> None:
    talk.say(answered("kept"), ANSWER)
    first = await talk.whole(input="u")
    second = await talk.responds(stream=stream, input="v", previous_response_id=first["id"], store=False)
    assert talk.said == user("u") + final("kept") + user("v")
    refusal(await talk.get(f"/responses/{second['id']}"), 404, "response_id")


# -- conversations


@WAYS
@pytest.mark.parametrize("store", [True, False], ids=["kept", "not kept"])
async def test_a_conversation_grows_by_every_response(talk: Line, stream: bool, store: bool) -> None:
    talk.say(CALL, answered("blue"), ANSWER)
    conversation = await talk.conversation({"role": "developer", "content": "Be brief."})
    first = await talk.responds(stream=stream, store=store, input="u", conversation=conversation, tools=[TOOL])
    assert first["conversation"] == {"id": conversation}
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "o"}
    second = await talk.responds(
        stream=stream, store=store, input=[result], conversation={"id": conversation}, tools=[TOOL]
    )
    items = await talk.items(conversation)
    assert kinds(items) == [
        *("message", "message", "reasoning", "function_call"),
        *("function_call_output", "reasoning", "message"),
    ]
    assert items[2:4] == first["output"]
    assert items[5:] == second["output"]
    await talk.responds(stream=stream, store=store, input="v", conversation=conversation)
    instructed = "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
    assert talk.said.startswith(instructed + user("u") + "<|start|>assistant")
    assert talk.said.endswith(final("blue") + user("v"))
    got = await talk.get(f"/responses/{first['id']}")
    assert got.status == (200 if store else 404)


@WAYS
async def test_a_response_that_failed_is_no_part_of_its_conversation(talk: Line, stream: bool) -> None:
    conversation = await talk.conversation({"role": "user", "content": "u"})
    before = await talk.items(conversation)
    talk.say(OK[:-10] + " and so on", faults=(close_at(5),))
    answer = await talk.post(conversation=conversation, stream=stream)
    assert await talk.items(conversation) == before
    if stream:
        assert answer.events[-1]["type"] == "response.failed"
        assert (await talk.kept(answer.events[-1]["response"]))["status"] == "failed"
    else:
        refusal(answer, 502)
    talk.say(answered("one two three"))
    cut = await talk.responds(stream=stream, conversation=conversation, max_output_tokens=13)
    assert cut["status"] == "incomplete"
    assert (await talk.items(conversation))[-1] == cut["output"][-1]
    talk.say(ANSWER)
    await talk.whole(conversation=conversation)
    assert talk.said == user("u") + user("Hi") + final(text_of(cut)) + user("Hi")


REFUSED_IN_ONE: dict[str, tuple[Json, int, str]] = {
    "an output without a call": (
        {"input": [{"type": "function_call_output", "call_id": "call_x", "output": "o"}]},
        400,
        "input.0.call_id",
    ),
    "a reference to nothing": ({"input": [{"type": "item_reference", "id": "msg_" + NOWHERE}]}, 404, "input.0.id"),
    "tools that clash": ({"tools": [TOOL, TOOL]}, 400, "tools.1.name"),
}


@WAYS
@pytest.mark.parametrize(("fields", "status", "param"), REFUSED_IN_ONE.values(), ids=REFUSED_IN_ONE)
async def test_what_is_refused_leaves_the_conversation_as_it_was_and_free(
    talk: Line, fields: Json, status: int, param: str, stream: bool
) -> None:
    talk.say(ANSWER)
    conversation = await talk.conversation({"role": "user", "content": "u"})
    before = await talk.items(conversation)
    refusal(await talk.post(conversation=conversation, stream=stream, **fields), status, param)
    assert await talk.items(conversation) == before
    assert (await talk.whole(conversation=conversation))["status"] == "completed"


@pytest.mark.slow
@WAYS
async def test_one_response_at_a_time_is_made_in_a_conversation(talk: Line, stream: bool) -> None:
    conversation = await talk.conversation()
    talk.say(ANSWER, delay_s=0.15)
    first = asyncio.create_task(talk.responds(stream=stream, conversation=conversation))
    await talk.fake.asked()
    for other in (False, True):
        refusal(await talk.post(conversation=conversation, stream=other), 409, "conversation", "state_conflict")
    added = await talk.made(f"/conversations/{conversation}/items", items=[{"role": "user", "content": "u"}])
    refusal(added, 409)
    async with talk.gateway.session.delete(f"{talk.gateway.url}/v1/conversations/{conversation}") as gone:
        assert gone.status == 409
    made = await first
    assert [item["id"] for item in (await talk.items(conversation))[1:]] == [item["id"] for item in made["output"]]
    talk.say(ANSWER)
    assert (await talk.responds(stream=stream, conversation=conversation))["status"] == "completed"


async def test_a_deleted_conversation_is_gone_and_its_responses_are_not(talk: Line) -> None:
    talk.say(ANSWER)
    conversation = await talk.conversation({"role": "user", "content": "before"})
    response = await talk.whole(conversation=conversation)
    async with talk.gateway.session.delete(f"{talk.gateway.url}/v1/conversations/{conversation}") as gone:
        assert gone.status == 200
    refusal(await talk.post(conversation=conversation), 404, "conversation", "not_found")
    assert await talk.kept(response) == response
    await talk.whole(previous_response_id=response["id"], input="v")
    assert talk.said == user("Hi") + final("ok") + user("v")


async def test_a_chain_may_leave_a_conversation(talk: Line) -> None:
    talk.say(answered("one"), answered("two"), ANSWER)
    conversation = await talk.conversation({"role": "user", "content": "before"})
    first = await talk.whole(input="u", conversation=conversation)
    await talk.whole(input="later", conversation=conversation)
    await talk.whole(input="v", previous_response_id=first["id"])
    assert talk.said == user("before") + user("u") + final("one") + user("v")
    assert kinds(await talk.items(conversation)) == ["message", *["message", "reasoning", "message"] * 2]


# -- dates


@pytest.mark.parametrize("days", [0, 3], ids=["today", "three days ago"])
async def test_a_continued_conversation_keeps_its_first_day(days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = (datetime.now(UTC) - timedelta(days=days)).date().isoformat()
    told = iter([begun] * 2)
    monkeypatch.setattr("unisono.app.current_date", lambda settings: next(told, "2031-01-01"))
    async with line(WIRES["vllm"]) as talk:
        first = await talk.whole()
        conversation = await talk.conversation()
        assert f"Current date: {begun}" in talk.prompts[-1]
        second = await talk.whole(previous_response_id=first["id"])
        await talk.whole(previous_response_id=second["id"])
        await talk.whole(conversation=conversation)
        await talk.whole(conversation=conversation)
        assert all(f"Current date: {begun}" in prompt for prompt in talk.prompts)
        await talk.whole(input="Something else")
        assert "Current date: 2031-01-01" in talk.prompts[-1]


async def test_what_has_expired_is_not_there() -> None:
    async with line(WIRES["vllm"], store={"url": "memory://", "ttl_s": 0.6}) as talk:
        conversation = await talk.conversation()
        response = await talk.whole(conversation=conversation)
        item = response["output"][-1]["id"]
        leaning: tuple[tuple[Json, str], ...] = (
            ({"previous_response_id": response["id"]}, "previous_response_id"),
            ({"conversation": conversation}, "conversation"),
            ({"input": [{"type": "item_reference", "id": item}]}, "input.0.id"),
        )
        for fields, _ in leaning:
            assert (await talk.post(store=False, **fields)).status == 200
        await asyncio.sleep(0.8)
        talk.fake.requests.clear()
        for fields, param in leaning:
            refusal(await talk.post(store=False, **fields), 404, param)
        refusal(await talk.get(f"/responses/{response['id']}"), 404, "response_id")
        assert talk.prompts == []


# -- exact tokens


# Not the canonical form: the recipient behind the channel, and ids that no tokenizer would choose for this text.
ODD = [ENCODING.encode_text(letter)[0] for letter in '{"location":"Paris"}']
ODD_CALL = [
    *ENCODING.encode_marked("<|channel|>analysis<|message|>"),
    *(ENCODING.encode_text(letter)[0] for letter in "Look it up."),
    *ENCODING.encode_marked("<|end|><|start|>assistant"),
    *ENCODING.encode_marked("<|channel|>commentary to=functions.look <|constrain|>json<|message|>"),
    *ODD,
    *ENCODING.encode_marked("<|call|>"),
]
ODD_ANSWER = [
    *ENCODING.encode_marked(THOUGHT + "<|channel|>final<|message|>"),
    *(ENCODING.encode_text(letter)[0] for letter in "Sunny."),
    *ENCODING.encode_marked("<|return|>"),
]
BROKEN_CALL = CALL.replace("<|end|>", "")
"""Thoughts that nothing ends before the call begins: they are mended."""


async def by_response(talk: Line, first: Json, after: Any, stream: bool) -> Json:
    return await talk.responds(stream=stream, input=after, previous_response_id=first["id"], tools=[TOOL])


async def by_conversation(talk: Line, first: Json, after: Any, stream: bool) -> Json:
    return await talk.responds(stream=stream, input=after, conversation=first["conversation"], tools=[TOOL])


async def by_items(talk: Line, first: Json, after: Any, stream: bool) -> Json:
    given = [{"role": "user", "content": "Hi"}, *first["output"], *after]
    return await talk.responds(stream=stream, input=given, tools=[TOOL])


async def by_references(talk: Line, first: Json, after: Any, stream: bool) -> Json:
    listed = (await talk.get(f"/responses/{first['id']}/input_items")).body["data"]
    given = [{"type": "item_reference", "id": item["id"]} for item in (*listed, *first["output"])]
    return await talk.responds(stream=stream, input=[*given, *after], tools=[TOOL])


async def by_sealed_items(talk: Line, first: Json, after: Any, stream: bool) -> Json:
    carried = [{key: value for key, value in item.items() if key != "content"} for item in first["output"]]
    given = [{"role": "user", "content": "Hi"}, *carried, *after]
    return await talk.responds(
        stream=stream, input=given, tools=[TOOL], store=False, include=["reasoning.encrypted_content"]
    )


async def by_loose_items(talk: Line, first: Json, after: Any, stream: bool) -> Json:
    given = [{"role": "user", "content": "Hi"}, *({**item, "id": "x"} for item in first["output"]), *after]
    return await talk.responds(stream=stream, input=given, tools=[TOOL], store=False)


Carry = Callable[[Line, Json, Any, bool], Awaitable[Json]]
CARRIED: dict[str, tuple[Carry, Json]] = {
    "the response": (by_response, {}),
    "the conversation": (by_conversation, {"conversation": True}),
    "its items": (by_items, {}),
    "references": (by_references, {}),
}
REMEMBERED: dict[str, tuple[Carry, Json]] = {
    "sealed items": (by_sealed_items, {"store": False, "include": ["reasoning.encrypted_content"]}),
    "items without ids": (by_loose_items, {"store": False}),
}
"""What is not kept is found again by the gateway that made it."""


async def where(talk: Line, asked: Json) -> Json:
    return {"conversation": await talk.conversation()} if asked.get("conversation") else asked


@WAYS
@pytest.mark.parametrize("carried", [*CARRIED, *REMEMBERED])
async def test_a_tool_turn_goes_on_behind_its_own_tokens(
    replicas: tuple[Line, Line], carried: str, stream: bool
) -> None:
    talk, other = replicas
    carry, asked = (CARRIED | REMEMBERED)[carried]
    talk.say(VllmScript(tokens=ODD_CALL), VllmScript(tokens=ODD_ANSWER))
    first = await talk.responds(stream=stream, tools=[TOOL], **await where(talk, asked))
    call = first["output"][-1]
    assert call["arguments"] == '{"location":"Paris"}'
    after = [{"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees"}]
    second = await carry(talk if carried in REMEMBERED else other, first, after, stream)
    assert text_of(second) == "Sunny."
    begun, gone_on = talk.tokens
    assert gone_on[: len(begun) + len(ODD_CALL)] == begun + ODD_CALL


async def test_sealed_reasoning_keeps_its_tokens_on_another_replica(replicas: tuple[Line, Line]) -> None:
    talk, other = replicas
    carry, asked = REMEMBERED["sealed items"]
    talk.say(VllmScript(tokens=ODD_CALL), VllmScript(tokens=ODD_ANSWER))
    first = await talk.whole(tools=[TOOL], **asked)
    after = [{"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "18 degrees"}]
    await carry(other, first, after, False)
    begun, gone_on = talk.tokens
    thought = ODD_CALL[: ODD_CALL.index(END) + 1]
    assert gone_on[: len(begun) + len(thought)] == begun + thought


@pytest.mark.parametrize("carried", CARRIED)
async def test_an_answer_stands_in_later_prompts_as_it_was_generated(replicas: tuple[Line, Line], carried: str) -> None:
    talk, other = replicas
    carry, asked = CARRIED[carried]
    talk.say(VllmScript(tokens=ODD_ANSWER))
    first = await talk.whole(tools=[TOOL], **await where(talk, asked))
    await carry(other, first, [{"role": "user", "content": "Thanks"}], False)
    begun, gone_on = talk.tokens
    # The turn is over, so its thoughts are gone; what was said aloud follows the same `<|start|>assistant`.
    aloud = ODD_ANSWER[len(ENCODING.encode_marked(THOUGHT)) : -1]
    assert gone_on == begun + aloud + ENCODING.encode_marked("<|end|>" + user("Thanks") + "<|start|>assistant")


@pytest.mark.parametrize("carried", CARRIED)
async def test_what_was_mended_stands_mended_in_later_prompts(replicas: tuple[Line, Line], carried: str) -> None:
    talk, other = replicas
    carry, asked = CARRIED[carried]
    talk.say(BROKEN_CALL)
    first = await talk.whole(tools=[TOOL], **await where(talk, asked))
    assert first["unisono"]["recoveries"] == ["missing-end"]
    begun = talk.prompts[-1]
    talk.say(ANSWER)
    after = [{"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "o"}]
    await carry(other, first, after, False)
    assert talk.prompts[-1].startswith(begun + CALL)
