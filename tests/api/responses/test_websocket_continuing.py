"""What goes on over a Responses WebSocket: stored responses, those only the connection knows, and warm-ups."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.responses.folding import fold
from tests.api.responses.sockets import Site, site
from tests.api.scripted import Step, call, final, finished
from unisono.core.conversation import AssistantCall, AssistantMessage, Item, ToolResult, UserMessage
from unisono.core.state_store import StoredConversation
from unisono.errors import BackendUnavailable

DIALECTS = ("/v1/responses", "/open-responses/v1/responses")


def saying(*texts: str) -> list[list[Step]]:
    return [[[*final(0, text), finished()]] for text in texts]


def said(there: Site, turn: int = -1) -> list[Item]:
    return list(there.turns.turns[turn].conversation.items)


ONE_TWO = [UserMessage("One?"), AssistantMessage("One."), UserMessage("Two?")]


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("store", [None, True, False])
async def test_a_response_is_continued(path: str, store: bool | None) -> None:
    async with site(*saying("One.", "Two.", "Three.")) as there:
        ann = await there.connect(path)
        one = await ann.asked(input="One?", store=store)
        assert one["store"] is (store is not False)
        two = await ann.asked(input="Two?", store=store, previous_response_id=one["id"])
        assert two["previous_response_id"] == one["id"]
        assert said(there) == ONE_TWO
        await ann.asked(input="Three?", store=store, previous_response_id=two["id"])
        assert said(there) == [*ONE_TWO, AssistantMessage("Two."), UserMessage("Three?")]
        assert all(turn.keeps_date for turn in there.turns.turns[1:])
        kept = [await there.post(f"/v1/responses/{response['id']}", method="GET") for response in (one, two)]
        assert [answer.status for answer in kept] == [404 if store is False else 200] * 2


async def test_a_stored_response_is_continued_on_any_connection_and_by_requests() -> None:
    async with site(*saying("One.", "Two.", "Three.")) as there:
        one = await (await there.connect()).asked(input="One?")
        two = await (await there.connect()).asked(input="Two?", previous_response_id=one["id"])
        assert said(there) == ONE_TWO
        body = {"model": "gpt-oss", "input": "Three?", "previous_response_id": two["id"]}
        assert (await there.post("/v1/responses", body)).status == 200
        assert said(there) == [*ONE_TWO, AssistantMessage("Two."), UserMessage("Three?")]


def unknown(error: Any) -> bool:
    return bool(
        error["error"]["code"] == "previous_response_not_found" and error["error"]["param"] == "previous_response_id"
    )


async def test_what_is_not_stored_is_gone_with_its_connection() -> None:
    async with site(*saying("One.")) as there:
        ann = await there.connect()
        one = await ann.asked(input="One?", store=False)
        ann.leave()
        await ann.ended()
        assert unknown(await (await there.connect()).refused(input="Two?", store=False, previous_response_id=one["id"]))


async def test_a_lane_remembers_its_last_response_only() -> None:
    async with site(*saying("One.", "Two.", "Again.")) as there:
        ann = await there.connect()
        one = await ann.asked(input="One?", store=False)
        two = await ann.asked(input="Two?", store=False, previous_response_id=one["id"])
        assert unknown(await ann.refused(input="Again?", store=False, previous_response_id=one["id"]))
        await ann.asked(input="Again?", store=False, previous_response_id=two["id"])
        assert len(said(there)) == 5


BAD_RESULT = {"type": "function_call_output", "call_id": "call_unknown", "output": "1"}
FAILED_TURNS: dict[str, tuple[list[list[Step]], dict[str, Any]]] = {
    "a field out of range": ([], {"temperature": 9}),
    "an unknown model": ([], {"model": "another"}),
    "a result of an unknown call": ([], {"input": [BAD_RESULT]}),
    "a fault before the first event": ([[RuntimeError("planted")]], {}),
    "a fault after the first event": ([[final(0, "Tw", "o")[:2], BackendUnavailable("gone")]], {}),
}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("stream_id", [None, "another"])
@pytest.mark.parametrize(("script", "fields"), FAILED_TURNS.values(), ids=FAILED_TURNS)
async def test_a_failed_continuation_evicts_the_response_it_names(
    path: str, stream_id: str | None, script: list[list[Step]], fields: dict[str, Any]
) -> None:
    lane = {} if stream_id is None else {"stream_id": stream_id}
    async with site(*saying("Other.", "One."), *script, *saying("Again.", "Two.")) as there:
        ann = await there.connect(path)
        other = await ann.asked(input="Other?", store=False, stream_id="other")
        one = await ann.asked(input="One?", store=False)
        follow_up: dict[str, Any] = {"input": "Two?", "store": False, "previous_response_id": one["id"]}
        ann.send(**{**follow_up, **fields, **lane})
        end = (await ann.answer())[-1]
        assert end["type"] in ("error", "response.failed")
        assert unknown(await ann.refused(**follow_up))
        # The client sends its full input instead, and other responses of the socket stay.
        assert (await ann.asked(input="Again?", store=False))["status"] == "completed"
        assert (await ann.asked(**{**follow_up, "previous_response_id": other["id"]}))["status"] == "completed"


async def test_a_failed_continuation_leaves_a_stored_response() -> None:
    async with site(*saying("One."), [RuntimeError("planted")], *saying("Two.")) as there:
        ann = await there.connect()
        one = await ann.asked(input="One?")
        for fields in ({"temperature": 9}, {"input": "Broken?"}):
            await ann.refused(**{"input": "Two?", "previous_response_id": one["id"], **fields})
        await ann.asked(input="Two?", previous_response_id=one["id"])
        assert said(there) == ONE_TWO


async def test_a_response_may_be_continued_in_another_lane() -> None:
    async with site(*saying("One.", "Two.", "Three.")) as there:
        ann = await there.connect()
        one = await ann.asked(input="One?", store=False, stream_id="planner")
        await ann.asked(input="Two?", store=False, stream_id="critic", previous_response_id=one["id"])
        assert said(there) == ONE_TWO
        await ann.asked(input="Two?", store=False, stream_id="planner", previous_response_id=one["id"])
        assert said(there) == ONE_TWO


async def test_turns_of_a_lane_go_to_one_deployment() -> None:
    async with site(*saying("One.", "Two.")) as there:
        ann = await there.connect()
        one = await ann.asked(input="One?", store=False)
        await ann.asked(input="Two?", store=False, previous_response_id=one["id"])
        first, second = (turn.sticky for turn in there.turns.turns)
        assert first == second != ""


@pytest.mark.parametrize("stored_first", [True, False])
async def test_a_stored_response_holds_what_was_not_stored_before_it(stored_first: bool) -> None:
    async with site(*saying("One.", "Two.", "Three.", "Four.")) as there:
        ann = await there.connect()
        one = await ann.asked(input="One?", store=stored_first)
        two = await ann.asked(input="Two?", store=False, previous_response_id=one["id"])
        three = await ann.asked(input="Three?", previous_response_id=two["id"])
        bob = await there.connect()
        await bob.asked(input="Four?", previous_response_id=three["id"])
        assert said(there) == [
            *ONE_TWO,
            *(AssistantMessage("Two."), UserMessage("Three?")),
            *(AssistantMessage("Three."), UserMessage("Four?")),
        ]
        items = (await there.post(f"/v1/responses/{three['id']}/input_items", method="GET")).json()["data"]
        assert len(items) == (3 if stored_first else 5)
        assert len({item["id"] for item in items}) == len(items)


async def test_what_is_not_stored_can_be_referred_to() -> None:
    async with site(*saying("One.", "Two.")) as there:
        ann = await there.connect()
        one = await ann.asked(input="One?", store=False)
        reference = {"type": "item_reference", "id": one["output"][0]["id"]}
        again = {"role": "user", "content": "Say that again."}
        await ann.asked(input=[again, reference], store=False, previous_response_id=one["id"])
        assert said(there)[2:] == [UserMessage("Say that again."), AssistantMessage("One.")]


async def test_a_call_is_answered_in_the_next_turn() -> None:
    script: list[Step] = [[*call(0, 0, "look", '{"at":"sky"}'), finished()]]
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    async with site(script, *saying("Blue.")) as there:
        ann = await there.connect()
        one = await ann.asked(input="What colour?", store=False, tools=tools)
        [made] = one["output"]
        output = {"type": "function_call_output", "call_id": made["call_id"], "output": "blue"}
        await ann.asked(input=[output], store=False, tools=tools, previous_response_id=one["id"])
        assert said(there) == [
            UserMessage("What colour?"),
            AssistantCall("call_0", "look", '{"at":"sky"}'),
            ToolResult("call_0", "look", "blue"),
        ]


@pytest.mark.parametrize("store", [True, False])
async def test_nobody_continues_the_responses_of_others(store: bool) -> None:
    async with site(*saying("One.")) as there:
        ann, bob = await there.connect(), await there.connect(key="bob")
        one = await ann.asked(input="One?", store=store)
        assert unknown(await bob.refused(input="Two?", previous_response_id=one["id"]))


async def test_a_conversation_goes_on_over_a_connection() -> None:
    async with site(*saying("One.", "Two.")) as there:
        conversation = {"id": "conv_" + "a" * 32}
        await make_conversation(there, conversation["id"])
        ann = await there.connect()
        one = await ann.asked(input="One?", conversation=conversation["id"], store=False)
        await ann.asked(input="Two?", conversation=conversation)
        assert said(there) == ONE_TWO
        assert unknown(await ann.refused(input="Two?", previous_response_id=one["id"]))


async def make_conversation(there: Site, conversation_id: str) -> None:
    await there.store.create_conversation("ann", StoredConversation(conversation_id, 1.0, "2026-11-20"), ())


# -- warm-ups

WARM: dict[str, dict[str, Any]] = {
    "nothing said": {"generate": False},
    "not stored": {"generate": False, "store": False},
    "an empty list": {"generate": False, "store": False, "input": []},
    "a warm cache wanted": {"prompt_cache_options": {"prewarm": True}, "store": False},
}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("fields", WARM.values(), ids=WARM)
async def test_a_warm_up_asks_no_model_and_is_continued(path: str, fields: dict[str, Any]) -> None:
    async with site(*saying("One.")) as there:
        ann = await there.connect(path)
        ann.send(**fields)
        events = await ann.answer()
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        warm = fold(events).response
        assert (warm["status"], warm["output"]) == ("completed", [])
        assert warm["usage"]["total_tokens"] == 0
        assert not there.turns.runs
        await ann.asked(input="One?", store=fields.get("store"), previous_response_id=warm["id"])
        assert said(there) == [UserMessage("One?")]


async def test_what_a_warm_up_says_is_said_before_what_follows() -> None:
    async with site(*saying("One.")) as there:
        ann = await there.connect()
        rules = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
        warm = await ann.asked(input=rules, generate=False, store=False)
        await ann.asked(input="One?", store=False, previous_response_id=warm["id"])
        assert said(there) == [UserMessage("Hi."), UserMessage("One?")]
        assert there.turns.turns[0].conversation.preamble.instructions == "Be brief."


async def test_a_warm_up_is_refused_like_an_answer() -> None:
    async with site() as there:
        ann = await there.connect()
        error = await ann.refused(generate=False, temperature=9)
        assert error["error"]["param"] == "temperature"
        error = await ann.refused(generate=False, previous_response_id="resp_" + "0" * 32)
        assert unknown(error)


async def test_a_warm_up_is_only_for_connections() -> None:
    async with site() as there:
        answer = await there.post("/v1/responses", {"model": "gpt-oss", "generate": False})
        assert answer.status == 400
        assert answer.json()["error"]["param"] == "input"
