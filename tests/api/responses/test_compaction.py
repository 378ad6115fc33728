"""Compaction: the summary request, the response, and conversations that continue from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from string import ascii_letters
from typing import Any

import orjson
import pytest

from tests.api.asgi import Exchange
from tests.api.responses.sockets import ScriptedGateway, scripted_gateway
from tests.api.scripted import Step, call, commentary, final, finished, reasoning
from unisono.core.conversation import AssistantMessage, Effort, Item, UserMessage
from unisono.core.generation import FinishReason
from unisono.errors import BackendUnavailable

PATHS = ("/v1/responses", "/responses", "/open-responses/v1/responses", "/open-responses/responses")
SUMMARY = "They want tea. The pot is empty."
SUMMARY_SCRIPT: list[Step] = [[*reasoning(0, "Short, then."), *final(1, SUMMARY), finished()]]
ANSWER: list[Step] = [[*final(0, "Yes."), finished()]]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Is there tea?"},
    {"role": "assistant", "content": "Let me look into the pot."},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"into":"pot"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "The pot is empty, sadly."},
    {"role": "assistant", "content": "There is none."},
    {"role": "user", "content": "Then make some."},
]
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]


async def compact(
    gateway: ScriptedGateway, path: str = "/v1/responses", *, key: str = "ann", **fields: Any
) -> Exchange:
    return await gateway.post(f"{path}/compact", {"model": "gpt-oss", "input": CONVERSATION, **fields}, key=key)


def items_of_request(gateway: ScriptedGateway, index: int = -1) -> list[Item]:
    return list(gateway.service.turns[index].conversation.items)


def texts(output: list[Any]) -> list[str]:
    """Return the texts of the messages in an output; all are user messages."""
    messages = [item for item in output if item["type"] == "message"]
    assert all(message["role"] == "user" and message["status"] == "completed" for message in messages)
    return [message["content"][0]["text"] for message in messages]


@pytest.mark.parametrize("path", PATHS)
async def test_a_compaction_keeps_user_messages_and_a_sealed_summary(path: str) -> None:
    async with scripted_gateway(SUMMARY_SCRIPT) as gateway:
        response = await compact(gateway, path)
        assert response.status == 200
        assert response.headers["content-type"] == "application/json"
        body = response.json()
        assert set(body) == {"id", "object", "created_at", "output", "usage", "unisono"}
        assert (body["object"], body["created_at"]) == ("response.compaction", 1_790_000_000)
        assert texts(body["output"]) == ["Is there tea?", "Then make some."]
        seal = body["output"][-1]
        assert set(seal) == {"id", "type", "encrypted_content"}
        assert (seal["type"], seal["id"][:4]) == ("compaction", "cmp_")
        assert len({item["id"] for item in body["output"]}) == 3
        assert "pot" not in seal["encrypted_content"]
        assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"] > 0
        assert (await gateway.post(f"/v1/responses/{body['id']}", method="GET")).status == 404


async def test_the_summary_request_follows_the_unchanged_conversation() -> None:
    async with scripted_gateway(SUMMARY_SCRIPT) as gateway:
        await compact(gateway, instructions="Be a butler.", tools=TOOLS)
        [request] = gateway.service.turns
        assert [type(item).__name__ for item in request.conversation.items] == [
            *("UserMessage", "AssistantMessage", "AssistantCall", "ToolResult", "AssistantMessage", "UserMessage"),
            "UserMessage",
        ]
        preamble = request.conversation.preamble
        assert (preamble.instructions, preamble.effort) == ("Be a butler.", Effort.LOW)
        assert [tool.name for tool in preamble.tools] == ["look"]
        assert not request.answer.calls_allowed
        assert request.answer.whole
        assert request.prompt.truncate
        assert request.answer.max_tokens is not None
        assert request.answer.max_tokens <= 8192
        assert gateway.service.runs[0].closed


@pytest.mark.parametrize(
    ("reasoning_field", "effort"),
    [({"effort": "high"}, Effort.HIGH), ({"summary": "auto"}, Effort.LOW), (None, Effort.LOW)],
)
async def test_the_summary_uses_the_requested_effort_or_low(reasoning_field: Any, effort: Effort) -> None:
    async with scripted_gateway(SUMMARY_SCRIPT) as gateway:
        await compact(gateway, reasoning=reasoning_field)
        assert gateway.service.turns[0].conversation.preamble.effort is effort


@pytest.mark.parametrize("paths", [(PATHS[0], PATHS[2]), (PATHS[2], PATHS[0]), (PATHS[1], PATHS[1])])
@pytest.mark.parametrize("store", [True, False])
async def test_a_conversation_continues_from_its_compaction(paths: tuple[str, str], store: bool) -> None:
    first, second = paths
    async with scripted_gateway(SUMMARY_SCRIPT, ANSWER) as gateway:
        output = (await compact(gateway, first)).json()["output"]
        more = {"role": "user", "content": "Is it ready?"}
        body = {"model": "gpt-oss", "input": [*output, more], "store": store}
        response = (await gateway.post(second, body)).json()
        assert response["output"][0]["content"][0]["text"] == "Yes."
        assert "notes" not in response["unisono"]
        *kept, summary, last = items_of_request(gateway)
        assert kept == [UserMessage("Is there tea?"), UserMessage("Then make some.")]
        assert isinstance(summary, UserMessage)
        assert summary.text.endswith(SUMMARY)
        assert last == UserMessage("Is it ready?")


RULE = {"role": "developer", "content": "Answer in verse."}
# Functions that turn the output of `/responses/compact` into the input before the new message.
WAYS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "the output": lambda output: output,
    "only the compaction": lambda output: output[-1:],
    "the history and the compaction": lambda output: [*CONVERSATION, output[-1]],
    "the history and the output": lambda output: [*CONVERSATION, *output],
    "a rule and the output": lambda output: [RULE, *output],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("store", [True, False])
async def test_the_compaction_replaces_what_is_sent_before_it(way: str, store: bool) -> None:
    more = {"role": "user", "content": "Is it ready?"}
    async with scripted_gateway(SUMMARY_SCRIPT, ANSWER, ANSWER) as gateway:
        output = (await compact(gateway)).json()["output"]
        body = {"model": "gpt-oss", "input": [*WAYS[way](output), more], "store": store}
        first = (await gateway.post("/v1/responses", body)).json()
        whole = items_of_request(gateway)
        preamble = gateway.service.turns[-1].conversation.preamble
        assert preamble.instructions == ("Answer in verse." if RULE in body["input"] else "")
        *kept, summary, last = whole
        assert kept == [UserMessage("Is there tea?"), UserMessage("Then make some.")]
        assert isinstance(summary, UserMessage)
        assert summary.text.endswith(SUMMARY)
        assert last == UserMessage("Is it ready?")
        if store:
            following = {"model": "gpt-oss", "input": "And now?", "previous_response_id": first["id"]}
            await gateway.post("/v1/responses", following)
            assert items_of_request(gateway) == [*whole, AssistantMessage("Yes."), UserMessage("And now?")]
            assert gateway.service.turns[-1].conversation.preamble == preamble


async def test_a_compaction_continues_a_stored_response_and_is_compacted_once() -> None:
    async with scripted_gateway(ANSWER, SUMMARY_SCRIPT, ANSWER, SUMMARY_SCRIPT) as gateway:
        first = (await gateway.post("/v1/responses", {"model": "gpt-oss", "input": "Is there tea?"})).json()
        output = (await compact(gateway, input=None, previous_response_id=first["id"])).json()["output"]
        given = {"input": [*output, {"role": "user", "content": "Sure?"}], "previous_response_id": first["id"]}
        await gateway.post("/v1/responses", {"model": "gpt-oss", **given})
        shown = [item.text for item in items_of_request(gateway) if isinstance(item, UserMessage)]
        assert (shown[0], shown[2:], SUMMARY in shown[1]) == ("Is there tea?", ["Sure?"], True)
        again = (await compact(gateway, **given)).json()["output"]
        assert texts(again) == ["Is there tea?", "Sure?"]


async def test_a_reference_to_a_compaction_replaces_the_items_before_it() -> None:
    async with scripted_gateway(SUMMARY_SCRIPT, ANSWER) as gateway:
        body = {"model": "gpt-oss", "input": [*CONVERSATION, {"type": "compaction_trigger"}]}
        [item] = (await gateway.post("/v1/responses", body)).json()["output"]
        reference = {"type": "item_reference", "id": item["id"]}
        await gateway.post("/v1/responses", {"model": "gpt-oss", "input": [*CONVERSATION, reference]})
        assert not any(isinstance(item, AssistantMessage) for item in items_of_request(gateway))


async def test_a_response_after_a_compaction_can_be_continued_by_id() -> None:
    async with scripted_gateway(SUMMARY_SCRIPT, ANSWER) as gateway:
        output = (await compact(gateway)).json()["output"]
        first = (await gateway.post("/v1/responses", {"model": "gpt-oss", "input": output})).json()
        body = {"model": "gpt-oss", "input": "And now?", "previous_response_id": first["id"]}
        assert (await gateway.post("/v1/responses", body)).status == 200
        assert len(items_of_request(gateway)) == 5
        assert items_of_request(gateway)[3:] == [AssistantMessage("Yes."), UserMessage("And now?")]


async def test_a_stored_response_is_compacted_by_its_id() -> None:
    async with scripted_gateway(ANSWER, ANSWER, SUMMARY_SCRIPT) as gateway:
        first = (await gateway.post("/v1/responses", {"model": "gpt-oss", "input": "Is there tea?"})).json()
        body = {"model": "gpt-oss", "input": "Sure?", "previous_response_id": first["id"]}
        second = (await gateway.post("/v1/responses", body)).json()
        response = await compact(gateway, input=None, previous_response_id=second["id"])
        assert texts(response.json()["output"]) == ["Is there tea?", "Sure?"]
        assert len(items_of_request(gateway)) == 5
        assert (await compact(gateway, key="bob", input=None, previous_response_id=second["id"])).status == 404


async def test_a_compaction_of_another_tenant_is_skipped_with_a_note() -> None:
    async with scripted_gateway(SUMMARY_SCRIPT, ANSWER) as gateway:
        output = (await compact(gateway)).json()["output"]
        response = (await gateway.post("/v1/responses", {"model": "gpt-oss", "input": output}, key="bob")).json()
        assert items_of_request(gateway) == [UserMessage("Is there tea?"), UserMessage("Then make some.")]
        [note] = response["unisono"]["notes"]
        assert note.startswith("input.2:")


async def test_developer_messages_within_the_conversation_are_kept() -> None:
    async with scripted_gateway(SUMMARY_SCRIPT, ANSWER) as gateway:
        output = (await compact(gateway, input=[*CONVERSATION[:2], RULE, *CONVERSATION[2:]])).json()["output"]
        await gateway.post("/v1/responses", {"model": "gpt-oss", "input": output})
        assert gateway.service.turns[-1].conversation.preamble.instructions == "Answer in verse."


async def test_a_compaction_can_be_compacted_again() -> None:
    async with scripted_gateway(SUMMARY_SCRIPT, [[*final(0, "Still tea."), finished()]], ANSWER) as gateway:
        first = (await compact(gateway)).json()["output"]
        second = (await compact(gateway, input=[*first, {"role": "user", "content": "More."}])).json()["output"]
        assert any(SUMMARY in item.text for item in items_of_request(gateway) if isinstance(item, UserMessage))
        assert texts(second) == ["Is there tea?", "Then make some.", "More."]
        await gateway.post("/v1/responses", {"model": "gpt-oss", "input": second})
        assert SUMMARY not in str(items_of_request(gateway))
        assert "Still tea." in str(items_of_request(gateway))


async def test_only_the_newest_user_messages_are_kept() -> None:
    async with scripted_gateway(SUMMARY_SCRIPT) as gateway:
        messages = [{"role": "user", "content": f"{number} " + "so " * 5_000} for number in range(8)]
        kept_texts = texts((await compact(gateway, input=messages)).json()["output"])
        assert [text[0] for text in kept_texts] == ["4", "5", "6", "7"]
        assert kept_texts == [item["content"] for item in messages[4:]]


NO_SUMMARY: dict[str, list[Step]] = {
    "only reasoning": [[*reasoning(0, "Hm."), finished()]],
    "white space": [[*final(0, " \n"), finished()]],
    "reasoning cut off at the limit": [[*reasoning(0, "Hm."), finished(FinishReason.LENGTH)]],
    "cut off at the limit": [[*final(0, "They want"), finished(FinishReason.LENGTH)]],
    "a call": [[*call(0, 0, "look", "{}"), finished()]],
    "no output": [[finished()]],
}


@pytest.mark.parametrize("script", NO_SUMMARY.values(), ids=NO_SUMMARY)
async def test_the_whole_conversation_is_sealed_without_a_summary(script: list[Step]) -> None:
    async with scripted_gateway(script, ANSWER) as gateway:
        response = await compact(gateway)
        assert response.status == 200
        [seal] = response.json()["output"]
        [note] = response.json()["unisono"]["notes"]
        assert note.startswith("compaction: the model wrote no complete summary")
        more = {"role": "user", "content": "Is it ready?"}
        await gateway.post("/v1/responses", {"model": "gpt-oss", "input": [seal, more]})
        assert items_of_request(gateway)[:-1] == items_of_request(gateway, 0)[:-1]
        assert len(items_of_request(gateway)) == len(CONVERSATION) + 1


async def test_a_conversation_too_large_to_seal_is_refused_without_a_summary() -> None:
    noise = " ".join(Random(7).choices(ascii_letters, k=1_500_000))
    async with scripted_gateway(NO_SUMMARY["no output"]) as gateway:
        response = await compact(gateway, input=[{"role": "user", "content": noise}])
        assert (response.status, response.json()["error"]["code"]) == (413, "state_too_large")


async def test_a_commentary_message_counts_as_the_summary() -> None:
    async with scripted_gateway([[*commentary(0, SUMMARY), finished()]], ANSWER) as gateway:
        output = (await compact(gateway)).json()["output"]
        assert len(output) == 3
        await gateway.post("/v1/responses", {"model": "gpt-oss", "input": output})
        assert SUMMARY in str(items_of_request(gateway))


BAD_BODIES: dict[str, tuple[dict[str, Any], int, str | None]] = {
    # case: (body, expected status, expected param)
    "no model": ({"input": CONVERSATION}, 400, "model"),
    "model null": ({"model": None, "input": CONVERSATION}, 400, "model"),
    "an unknown model": ({"model": "gpt-7", "input": CONVERSATION}, 404, "model"),
    "no input": ({"model": "gpt-oss"}, 400, "input"),
    "input a number": ({"model": "gpt-oss", "input": 1}, 400, "input"),
    "an unknown item": ({"model": "gpt-oss", "input": [{"type": "song"}]}, 400, "input.0.type"),
    "instructions a list": ({"model": "gpt-oss", "input": CONVERSATION, "instructions": []}, 400, "instructions"),
    "reasoning a word": ({"model": "gpt-oss", "input": CONVERSATION, "reasoning": "low"}, 400, "reasoning"),
    "an unknown previous response": (
        {"model": "gpt-oss", "previous_response_id": "resp_" + "0" * 32},
        404,
        "previous_response_id",
    ),
}


@pytest.mark.parametrize(("body", "status", "param"), BAD_BODIES.values(), ids=BAD_BODIES)
async def test_an_error_names_the_invalid_field(body: dict[str, Any], status: int, param: str | None) -> None:
    async with scripted_gateway(SUMMARY_SCRIPT) as gateway:
        response = await gateway.post("/v1/responses/compact", body)
        assert (response.status, response.json()["error"]["param"]) == (status, param)
        assert not gateway.service.runs


async def test_fields_without_effect_are_noted() -> None:
    async with scripted_gateway(SUMMARY_SCRIPT) as gateway:
        fields: dict[str, Any] = {
            "service_tier": "flex",
            "temperature": 9,
            "stream": True,
            "store": True,
            "tool_choice": "required",
        }
        body = (await compact(gateway, **fields, background=False)).json()
        assert body["unisono"]["notes"] == [f"{name}: no effect" for name in (*fields, "background")]


async def test_a_backend_failure_is_an_http_error() -> None:
    async with scripted_gateway([BackendUnavailable("nobody there")]) as gateway:
        response = await compact(gateway)
        assert (response.status, response.json()["error"]["code"]) == (503, "backend_unavailable")
        assert gateway.service.runs[0].closed


async def test_a_client_disconnect_cancels_the_summary() -> None:
    async with scripted_gateway([final(0, "Hm.")[:2], 60.0]) as gateway:
        body = orjson.dumps({"model": "gpt-oss", "input": CONVERSATION})
        headers = [("authorization", "Bearer ann"), ("content-type", "application/json")]
        exchange = Exchange(gateway.app, "POST", "/v1/responses/compact", body=body, headers=headers).start()
        while not gateway.service.runs or not gateway.service.runs[0].taken:
            await asyncio.sleep(0.005)
        exchange.leave()
        await exchange.ended(1.0)
        assert gateway.service.runs[0].cancelled
        assert gateway.service.runs[0].closed
