"""Continued responses over the Responses WebSocket: stored, unstored, and warm-ups."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.responses.folding import fold
from tests.api.responses.sockets import ScriptedGateway, scripted_gateway
from tests.api.scripted import Step, call, final, finished
from unisono.core.conversation import AssistantCall, AssistantMessage, Effort, Item, ToolResult, UserMessage
from unisono.core.state_store import StoredConversation
from unisono.errors import BackendUnavailable

DIALECTS = ("/v1/responses", "/open-responses/v1/responses")


def scripts_of(*texts: str) -> list[list[Step]]:
    return [[[*final(0, text), finished()]] for text in texts]


def items_of_request(gateway: ScriptedGateway, index: int = -1) -> list[Item]:
    return list(gateway.service.turns[index].conversation.items)


ONE_TWO = [UserMessage("One?"), AssistantMessage("One."), UserMessage("Two?")]


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("store", [None, True, False])
async def test_a_response_is_continued(path: str, store: bool | None) -> None:
    async with scripted_gateway(*scripts_of("One.", "Two.", "Three.")) as gateway:
        ann = await gateway.connect(path)
        first = await ann.respond(input="One?", store=store)
        assert first["store"] is (store is not False)
        second = await ann.respond(input="Two?", store=store, previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        assert items_of_request(gateway) == ONE_TWO
        await ann.respond(input="Three?", store=store, previous_response_id=second["id"])
        assert items_of_request(gateway) == [*ONE_TWO, AssistantMessage("Two."), UserMessage("Three?")]
        assert all(request.prompt.keeps_date for request in gateway.service.turns[1:])
        stored = [await gateway.post(f"/v1/responses/{response['id']}", method="GET") for response in (first, second)]
        assert [answer.status for answer in stored] == [404 if store is False else 200] * 2


@pytest.mark.parametrize("store", [None, False])
async def test_a_compaction_replaces_the_responses_before_it(store: bool | None) -> None:
    async with scripted_gateway(*scripts_of("One.", "Summary.", "Two.", "Three.")) as gateway:
        ann = await gateway.connect()
        first = await ann.respond(input="One?", store=store)
        trigger = [{"type": "compaction_trigger"}]
        compacted = await ann.respond(input=trigger, store=store, previous_response_id=first["id"])
        assert [item["type"] for item in compacted["output"]] == ["compaction"]
        second = await ann.respond(input="Two?", store=store, previous_response_id=compacted["id"])
        asked, summary, newest = items_of_request(gateway)
        assert (asked, newest) == (UserMessage("One?"), UserMessage("Two?"))
        assert isinstance(summary, UserMessage)
        assert summary.text.endswith("Summary.")
        # A stored response takes over the items of the unstored ones before it.
        await ann.respond(input="Three?", previous_response_id=second["id"])
        assert items_of_request(gateway)[:3] == [asked, summary, newest]


async def test_a_configuration_update_stays_in_force_after_a_compaction() -> None:
    async with scripted_gateway(*scripts_of("One.", "Summary.", "Two.", "Three.")) as gateway:
        ann = await gateway.connect()
        update = {"type": "configuration_update", "reasoning": {"effort": "high"}}
        last = await ann.respond(input=[{"role": "user", "content": "One?"}, update], store=False)
        for asked, store in (([{"type": "compaction_trigger"}], False), ("Two?", True), ("Three?", True)):
            last = await ann.respond(input=asked, store=store, previous_response_id=last["id"])
        efforts = [request.conversation.preamble.effort for request in gateway.service.turns]
        assert efforts == [Effort.HIGH] * 4


async def test_a_stored_response_is_continued_on_any_connection_and_over_http() -> None:
    async with scripted_gateway(*scripts_of("One.", "Two.", "Three.")) as gateway:
        first = await (await gateway.connect()).respond(input="One?")
        second = await (await gateway.connect()).respond(input="Two?", previous_response_id=first["id"])
        assert items_of_request(gateway) == ONE_TWO
        body = {"model": "gpt-oss", "input": "Three?", "previous_response_id": second["id"]}
        assert (await gateway.post("/v1/responses", body)).status == 200
        assert items_of_request(gateway) == [*ONE_TWO, AssistantMessage("Two."), UserMessage("Three?")]


def is_unknown_response(error: Any) -> bool:
    return bool(
        error["error"]["code"] == "previous_response_not_found" and error["error"]["param"] == "previous_response_id"
    )


async def test_an_unstored_response_ends_with_its_connection() -> None:
    async with scripted_gateway(*scripts_of("One.")) as gateway:
        ann = await gateway.connect()
        first = await ann.respond(input="One?", store=False)
        ann.disconnect()
        await ann.wait_until_done()
        assert is_unknown_response(
            await (await gateway.connect()).expect_error(input="Two?", store=False, previous_response_id=first["id"])
        )


async def test_a_lane_keeps_only_its_last_response() -> None:
    async with scripted_gateway(*scripts_of("One.", "Two.", "Again.")) as gateway:
        ann = await gateway.connect()
        first = await ann.respond(input="One?", store=False)
        second = await ann.respond(input="Two?", store=False, previous_response_id=first["id"])
        assert is_unknown_response(
            await ann.expect_error(input="Again?", store=False, previous_response_id=first["id"])
        )
        await ann.respond(input="Again?", store=False, previous_response_id=second["id"])
        assert len(items_of_request(gateway)) == 5


BAD_RESULT = {"type": "function_call_output", "call_id": "call_unknown", "output": "1"}
FAILED_CONTINUATIONS: dict[str, tuple[list[list[Step]], dict[str, Any]]] = {
    "a field out of range": ([], {"temperature": 9}),
    "an unknown model": ([], {"model": "another"}),
    "a result of an unknown call": ([], {"input": [BAD_RESULT]}),
    "a fault before the first event": ([[RuntimeError("planted")]], {}),
    "a fault after the first event": ([[final(0, "Tw", "o")[:2], BackendUnavailable("gone")]], {}),
}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("stream_id", [None, "another"])
@pytest.mark.parametrize(("script", "fields"), FAILED_CONTINUATIONS.values(), ids=FAILED_CONTINUATIONS)
async def test_a_failed_continuation_evicts_the_response_it_names(
    path: str, stream_id: str | None, script: list[list[Step]], fields: dict[str, Any]
) -> None:
    lane = {} if stream_id is None else {"stream_id": stream_id}
    async with scripted_gateway(*scripts_of("Other.", "One."), *script, *scripts_of("Again.", "Two.")) as gateway:
        ann = await gateway.connect(path)
        other = await ann.respond(input="Other?", store=False, stream_id="other")
        first = await ann.respond(input="One?", store=False)
        follow_up: dict[str, Any] = {"input": "Two?", "store": False, "previous_response_id": first["id"]}
        ann.send(**{**follow_up, **fields, **lane})
        terminal_event = (await ann.response_events())[-1]
        assert terminal_event["type"] in ("error", "response.failed")
        assert is_unknown_response(await ann.expect_error(**follow_up))
        # The client sends its full input instead, and other responses of the socket stay.
        assert (await ann.respond(input="Again?", store=False))["status"] == "completed"
        assert (await ann.respond(**{**follow_up, "previous_response_id": other["id"]}))["status"] == "completed"


async def test_a_failed_continuation_keeps_a_stored_response() -> None:
    async with scripted_gateway(*scripts_of("One."), [RuntimeError("planted")], *scripts_of("Two.")) as gateway:
        ann = await gateway.connect()
        first = await ann.respond(input="One?")
        for fields in ({"temperature": 9}, {"input": "Broken?"}):
            await ann.expect_error(**{"input": "Two?", "previous_response_id": first["id"], **fields})
        await ann.respond(input="Two?", previous_response_id=first["id"])
        assert items_of_request(gateway) == ONE_TWO


async def test_a_response_can_be_continued_in_another_lane() -> None:
    async with scripted_gateway(*scripts_of("One.", "Two.", "Three.")) as gateway:
        ann = await gateway.connect()
        first = await ann.respond(input="One?", store=False, stream_id="planner")
        await ann.respond(input="Two?", store=False, stream_id="critic", previous_response_id=first["id"])
        assert items_of_request(gateway) == ONE_TWO
        await ann.respond(input="Two?", store=False, stream_id="planner", previous_response_id=first["id"])
        assert items_of_request(gateway) == ONE_TWO


async def test_requests_of_a_lane_share_a_sticky_key() -> None:
    async with scripted_gateway(*scripts_of("One.", "Two.")) as gateway:
        ann = await gateway.connect()
        response = await ann.respond(input="One?", store=False)
        await ann.respond(input="Two?", store=False, previous_response_id=response["id"])
        first_key, second_key = (request.routing.sticky for request in gateway.service.turns)
        assert first_key == second_key != ""


@pytest.mark.parametrize("stored_first", [True, False])
async def test_a_stored_response_includes_the_unstored_history(stored_first: bool) -> None:
    async with scripted_gateway(*scripts_of("One.", "Two.", "Three.", "Four.")) as gateway:
        ann = await gateway.connect()
        first = await ann.respond(input="One?", store=stored_first)
        second = await ann.respond(input="Two?", store=False, previous_response_id=first["id"])
        third = await ann.respond(input="Three?", previous_response_id=second["id"])
        bob = await gateway.connect()
        await bob.respond(input="Four?", previous_response_id=third["id"])
        assert items_of_request(gateway) == [
            *ONE_TWO,
            *(AssistantMessage("Two."), UserMessage("Three?")),
            *(AssistantMessage("Three."), UserMessage("Four?")),
        ]
        items = (await gateway.post(f"/v1/responses/{third['id']}/input_items", method="GET")).json()["data"]
        assert len(items) == (3 if stored_first else 5)
        assert len({item["id"] for item in items}) == len(items)


async def test_an_item_of_an_unstored_response_can_be_referenced() -> None:
    async with scripted_gateway(*scripts_of("One.", "Two.")) as gateway:
        ann = await gateway.connect()
        first = await ann.respond(input="One?", store=False)
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        question = {"role": "user", "content": "Say that again."}
        await ann.respond(input=[question, reference], store=False, previous_response_id=first["id"])
        assert items_of_request(gateway)[2:] == [UserMessage("Say that again."), AssistantMessage("One.")]


async def test_a_tool_result_continues_the_response_with_its_call() -> None:
    script: list[Step] = [[*call(0, 0, "look", '{"at":"sky"}'), finished()]]
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    async with scripted_gateway(script, *scripts_of("Blue.")) as gateway:
        ann = await gateway.connect()
        first = await ann.respond(input="What colour?", store=False, tools=tools)
        [call_item] = first["output"]
        output = {"type": "function_call_output", "call_id": call_item["call_id"], "output": "blue"}
        await ann.respond(input=[output], store=False, tools=tools, previous_response_id=first["id"])
        assert items_of_request(gateway) == [
            UserMessage("What colour?"),
            AssistantCall("call_0", "look", '{"at":"sky"}'),
            ToolResult("call_0", "look", "blue"),
        ]


@pytest.mark.parametrize("store", [True, False])
async def test_a_response_of_another_tenant_cannot_be_continued(store: bool) -> None:
    async with scripted_gateway(*scripts_of("One.")) as gateway:
        ann, bob = await gateway.connect(), await gateway.connect(key="bob")
        first = await ann.respond(input="One?", store=store)
        assert is_unknown_response(await bob.expect_error(input="Two?", previous_response_id=first["id"]))


async def test_a_conversation_continues_over_a_connection() -> None:
    async with scripted_gateway(*scripts_of("One.", "Two.")) as gateway:
        conversation = {"id": "conv_" + "a" * 32}
        await make_conversation(gateway, conversation["id"])
        ann = await gateway.connect()
        first = await ann.respond(input="One?", conversation=conversation["id"], store=False)
        await ann.respond(input="Two?", conversation=conversation)
        assert items_of_request(gateway) == ONE_TWO
        assert is_unknown_response(await ann.expect_error(input="Two?", previous_response_id=first["id"]))


async def make_conversation(gateway: ScriptedGateway, conversation_id: str) -> None:
    await gateway.store.create_conversation("ann", StoredConversation(conversation_id, 1.0, "2026-11-20"), ())


# -- warm-ups

WARM_UPS: dict[str, dict[str, Any]] = {
    "without input": {"generate": False},
    "not stored": {"generate": False, "store": False},
    "an empty list": {"generate": False, "store": False, "input": []},
    "prewarm of the prompt cache": {"prompt_cache_options": {"prewarm": True}, "store": False},
}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("fields", WARM_UPS.values(), ids=WARM_UPS)
async def test_a_warm_up_runs_no_generation_and_can_be_continued(path: str, fields: dict[str, Any]) -> None:
    async with scripted_gateway(*scripts_of("One.")) as gateway:
        ann = await gateway.connect(path)
        ann.send(**fields)
        events = await ann.response_events()
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        warm = fold(events).response
        assert (warm["status"], warm["output"]) == ("completed", [])
        assert warm["usage"]["total_tokens"] == 0
        assert not gateway.service.runs
        await ann.respond(input="One?", store=fields.get("store"), previous_response_id=warm["id"])
        assert items_of_request(gateway) == [UserMessage("One?")]


async def test_the_input_of_a_warm_up_precedes_later_input() -> None:
    async with scripted_gateway(*scripts_of("One.")) as gateway:
        ann = await gateway.connect()
        rules = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
        warm = await ann.respond(input=rules, generate=False, store=False)
        await ann.respond(input="One?", store=False, previous_response_id=warm["id"])
        assert items_of_request(gateway) == [UserMessage("Hi."), UserMessage("One?")]
        assert gateway.service.turns[0].conversation.preamble.instructions == "Be brief."


async def test_an_invalid_warm_up_is_refused() -> None:
    async with scripted_gateway() as gateway:
        ann = await gateway.connect()
        error = await ann.expect_error(generate=False, temperature=9)
        assert error["error"]["param"] == "temperature"
        error = await ann.expect_error(generate=False, previous_response_id="resp_" + "0" * 32)
        assert is_unknown_response(error)


async def test_a_warm_up_over_http_is_refused() -> None:
    async with scripted_gateway() as gateway:
        answer = await gateway.post("/v1/responses", {"model": "gpt-oss", "generate": False})
        assert answer.status == 400
        assert answer.json()["error"]["param"] == "input"
