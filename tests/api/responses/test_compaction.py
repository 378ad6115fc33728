"""A conversation made short: what the model is asked, what the client gets, and how it goes on from there."""

from __future__ import annotations

import asyncio
from random import Random
from string import ascii_letters
from typing import Any

import orjson
import pytest

from tests.api.asgi import Exchange
from tests.api.responses.sockets import Site, site
from tests.api.scripted import Step, call, commentary, final, finished, reasoning
from unisono.core.conversation import AssistantMessage, DeveloperMessage, Effort, Item, UserMessage
from unisono.core.generation import FinishReason
from unisono.errors import BackendUnavailable

PATHS = ("/v1/responses", "/responses", "/open-responses/v1/responses", "/open-responses/responses")
SUMMARY = "They want tea. The pot is empty."
SUMMED_UP: list[Step] = [[*reasoning(0, "Short, then."), *final(1, SUMMARY), finished()]]
ANSWER: list[Step] = [[*final(0, "Yes."), finished()]]
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Is there tea?"},
    {"role": "assistant", "content": "Let me look into the pot."},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"into":"pot"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "The pot is empty, sadly."},
    {"role": "assistant", "content": "There is none."},
    {"role": "user", "content": "Then make some."},
]
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]


async def compact(there: Site, path: str = "/v1/responses", *, key: str = "ann", **fields: Any) -> Exchange:
    return await there.post(f"{path}/compact", {"model": "gpt-oss", "input": TALK, **fields}, key=key)


def said(there: Site, turn: int = -1) -> list[Item]:
    return list(there.turns.turns[turn].conversation.items)


def texts(output: list[Any]) -> list[str]:
    """The messages among an output, all of them the user's."""
    messages = [item for item in output if item["type"] == "message"]
    assert all(message["role"] == "user" and message["status"] == "completed" for message in messages)
    return [message["content"][0]["text"] for message in messages]


@pytest.mark.parametrize("path", PATHS)
async def test_a_compaction_is_the_messages_of_the_user_and_a_sealed_rest(path: str) -> None:
    async with site(SUMMED_UP) as there:
        answer = await compact(there, path)
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        body = answer.json()
        assert set(body) == {"id", "object", "created_at", "output", "usage", "unisono"}
        assert (body["object"], body["created_at"]) == ("response.compaction", 1_790_000_000)
        assert texts(body["output"]) == ["Is there tea?", "Then make some."]
        seal = body["output"][-1]
        assert set(seal) == {"id", "type", "encrypted_content"}
        assert (seal["type"], seal["id"][:4]) == ("compaction", "cmp_")
        assert len({item["id"] for item in body["output"]}) == 3
        assert "pot" not in seal["encrypted_content"]
        assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"] > 0
        assert (await there.post(f"/v1/responses/{body['id']}", method="GET")).status == 404


async def test_the_model_is_asked_behind_the_conversation_as_it_was() -> None:
    async with site(SUMMED_UP) as there:
        await compact(there, instructions="Be a butler.", tools=TOOLS)
        [turn] = there.turns.turns
        assert [type(item).__name__ for item in turn.conversation.items] == [
            *("UserMessage", "AssistantMessage", "AssistantCall", "ToolResult", "AssistantMessage", "UserMessage"),
            "UserMessage",
        ]
        preamble = turn.conversation.preamble
        assert (preamble.instructions, preamble.effort) == ("Be a butler.", Effort.LOW)
        assert [tool.name for tool in preamble.tools] == ["look"]
        assert not turn.calls_allowed
        assert turn.whole
        assert turn.truncate
        assert turn.max_tokens is not None
        assert turn.max_tokens <= 8192
        assert there.turns.runs[0].closed


@pytest.mark.parametrize(
    ("given", "effort"),
    [({"effort": "high"}, Effort.HIGH), ({"summary": "auto"}, Effort.LOW), (None, Effort.LOW)],
)
async def test_the_effort_is_that_of_the_conversation_where_it_is_said(given: Any, effort: Effort) -> None:
    async with site(SUMMED_UP) as there:
        await compact(there, reasoning=given)
        assert there.turns.turns[0].conversation.preamble.effort is effort


@pytest.mark.parametrize("there_and_back", [(PATHS[0], PATHS[2]), (PATHS[2], PATHS[0]), (PATHS[1], PATHS[1])])
@pytest.mark.parametrize("store", [True, False])
async def test_a_conversation_goes_on_from_its_compaction(there_and_back: tuple[str, str], store: bool) -> None:
    first, second = there_and_back
    async with site(SUMMED_UP, ANSWER) as there:
        output = (await compact(there, first)).json()["output"]
        more = {"role": "user", "content": "Is it ready?"}
        body = {"model": "gpt-oss", "input": [*output, more], "store": store}
        answer = (await there.post(second, body)).json()
        assert answer["output"][0]["content"][0]["text"] == "Yes."
        assert "notes" not in answer["unisono"]
        *kept, summary, last = said(there)
        assert kept == [UserMessage("Is there tea?"), UserMessage("Then make some.")]
        assert isinstance(summary, UserMessage)
        assert summary.text.endswith(SUMMARY)
        assert last == UserMessage("Is it ready?")


async def test_a_compaction_is_continued_by_id_once_it_was_sent() -> None:
    async with site(SUMMED_UP, ANSWER) as there:
        output = (await compact(there)).json()["output"]
        one = (await there.post("/v1/responses", {"model": "gpt-oss", "input": output})).json()
        body = {"model": "gpt-oss", "input": "And now?", "previous_response_id": one["id"]}
        assert (await there.post("/v1/responses", body)).status == 200
        assert len(said(there)) == 5
        assert said(there)[3:] == [AssistantMessage("Yes."), UserMessage("And now?")]


async def test_what_was_stored_is_made_short_by_its_id() -> None:
    async with site(ANSWER, ANSWER, SUMMED_UP) as there:
        one = (await there.post("/v1/responses", {"model": "gpt-oss", "input": "Is there tea?"})).json()
        body = {"model": "gpt-oss", "input": "Sure?", "previous_response_id": one["id"]}
        two = (await there.post("/v1/responses", body)).json()
        answer = await compact(there, input=None, previous_response_id=two["id"])
        assert texts(answer.json()["output"]) == ["Is there tea?", "Sure?"]
        assert len(said(there)) == 5
        assert (await compact(there, key="bob", input=None, previous_response_id=two["id"])).status == 404


async def test_the_compaction_of_another_is_left_out_with_a_note() -> None:
    async with site(SUMMED_UP, ANSWER) as there:
        output = (await compact(there)).json()["output"]
        answer = (await there.post("/v1/responses", {"model": "gpt-oss", "input": output}, key="bob")).json()
        assert said(there) == [UserMessage("Is there tea?"), UserMessage("Then make some.")]
        [note] = answer["unisono"]["notes"]
        assert note.startswith("input.2:")


async def test_instructions_amid_a_conversation_stay_as_they_are() -> None:
    rule = {"role": "developer", "content": "Answer in verse."}
    async with site(SUMMED_UP, ANSWER) as there:
        output = (await compact(there, input=[*TALK[:2], rule, *TALK[2:]])).json()["output"]
        await there.post("/v1/responses", {"model": "gpt-oss", "input": output})
        assert DeveloperMessage("Answer in verse.") in said(there)


async def test_a_compaction_may_be_made_short_again() -> None:
    async with site(SUMMED_UP, [[*final(0, "Still tea."), finished()]], ANSWER) as there:
        once = (await compact(there)).json()["output"]
        twice = (await compact(there, input=[*once, {"role": "user", "content": "More."}])).json()["output"]
        assert any(SUMMARY in item.text for item in said(there) if isinstance(item, UserMessage))
        assert texts(twice) == ["Is there tea?", "Then make some.", "More."]
        await there.post("/v1/responses", {"model": "gpt-oss", "input": twice})
        assert SUMMARY not in str(said(there))
        assert "Still tea." in str(said(there))


async def test_only_the_newest_messages_are_kept() -> None:
    async with site(SUMMED_UP) as there:
        long = [{"role": "user", "content": f"{number} " + "so " * 5_000} for number in range(8)]
        kept = texts((await compact(there, input=long)).json()["output"])
        assert [text[0] for text in kept] == ["4", "5", "6", "7"]
        assert kept == [item["content"] for item in long[4:]]


NO_SUMMARY: dict[str, list[Step]] = {
    "only thoughts": [[*reasoning(0, "Hm."), finished()]],
    "white space": [[*final(0, " \n"), finished()]],
    "thoughts without an end": [[*reasoning(0, "Hm."), finished(FinishReason.LENGTH)]],
    "a call": [[*call(0, 0, "look", "{}"), finished()]],
    "nothing": [[finished()]],
}


@pytest.mark.parametrize("script", NO_SUMMARY.values(), ids=NO_SUMMARY)
async def test_without_a_summary_nothing_is_lost(script: list[Step]) -> None:
    async with site(script, ANSWER) as there:
        answer = await compact(there)
        assert answer.status == 200
        [seal] = answer.json()["output"]
        more = {"role": "user", "content": "Is it ready?"}
        await there.post("/v1/responses", {"model": "gpt-oss", "input": [seal, more]})
        assert said(there)[:-1] == said(there, 0)[:-1]
        assert len(said(there)) == len(TALK) + 1


async def test_what_can_be_neither_summed_up_nor_sealed_is_refused() -> None:
    noise = " ".join(Random(7).choices(ascii_letters, k=1_500_000))
    async with site(NO_SUMMARY["nothing"]) as there:
        answer = await compact(there, input=[{"role": "user", "content": noise}])
        assert (answer.status, answer.json()["error"]["code"]) == (413, "state_too_large")


async def test_a_summary_in_a_preamble_is_one_too() -> None:
    async with site([[*commentary(0, SUMMARY), finished()]], ANSWER) as there:
        output = (await compact(there)).json()["output"]
        assert len(output) == 3
        await there.post("/v1/responses", {"model": "gpt-oss", "input": output})
        assert SUMMARY in str(said(there))


BAD: dict[str, tuple[dict[str, Any], int, str | None]] = {
    # a body: (what it holds, the status, the field named)
    "no model": ({"input": TALK}, 400, "model"),
    "model null": ({"model": None, "input": TALK}, 400, "model"),
    "an unknown model": ({"model": "gpt-7", "input": TALK}, 404, "model"),
    "no input": ({"model": "gpt-oss"}, 400, "input"),
    "input a number": ({"model": "gpt-oss", "input": 1}, 400, "input"),
    "an unknown item": ({"model": "gpt-oss", "input": [{"type": "song"}]}, 400, "input.0.type"),
    "instructions a list": ({"model": "gpt-oss", "input": TALK, "instructions": []}, 400, "instructions"),
    "reasoning a word": ({"model": "gpt-oss", "input": TALK, "reasoning": "low"}, 400, "reasoning"),
    "nothing to continue": (
        {"model": "gpt-oss", "previous_response_id": "resp_" + "0" * 32},
        404,
        "previous_response_id",
    ),
}


@pytest.mark.parametrize(("body", "status", "param"), BAD.values(), ids=BAD)
async def test_a_bad_body_is_refused_by_the_name_of_its_field(
    body: dict[str, Any], status: int, param: str | None
) -> None:
    async with site(SUMMED_UP) as there:
        answer = await there.post("/v1/responses/compact", body)
        assert (answer.status, answer.json()["error"]["param"]) == (status, param)
        assert not there.turns.runs


async def test_fields_that_mean_nothing_here_are_noted() -> None:
    async with site(SUMMED_UP) as there:
        fields: dict[str, Any] = {
            "service_tier": "flex",
            "temperature": 9,
            "stream": True,
            "store": True,
            "tool_choice": "required",
        }
        body = (await compact(there, **fields, background=False)).json()
        assert body["unisono"]["notes"] == [f"{name}: no effect" for name in fields]


async def test_a_backend_that_fails_is_an_error() -> None:
    async with site([BackendUnavailable("nobody there")]) as there:
        answer = await compact(there)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "backend_unavailable")
        assert there.turns.runs[0].closed


async def test_leaving_ends_the_work() -> None:
    async with site([final(0, "Hm.")[:2], 60.0]) as there:
        body = orjson.dumps({"model": "gpt-oss", "input": TALK})
        headers = [("authorization", "Bearer ann"), ("content-type", "application/json")]
        asking = Exchange(there.app, "POST", "/v1/responses/compact", body=body, headers=headers).start()
        while not there.turns.runs or not there.turns.runs[0].taken:
            await asyncio.sleep(0.005)
        asking.leave()
        await asking.ended(1.0)
        assert there.turns.runs[0].cancelled
        assert there.turns.runs[0].closed
