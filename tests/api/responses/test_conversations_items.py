"""Items of conversations over HTTP: in every kind, in pages both ways, and behind what others add meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from tests.api.responses.test_conversations import HELLO, LISTING, Desk, refused
from tests.contract.state import answered, response, said
from unisono.api.body import OFF_LOOP_BYTES
from unisono.api.responses.conversations.routes import TRIES
from unisono.api.responses.input_items import KINDS
from unisono.core.conversation import AssistantCall, ToolResult, UserMessage
from unisono.core.state_store import Lease, StateLimits, Status, StoredItem
from unisono.store import open_store
from unisono.store.sqlite import SqliteStore

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "42"}


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    store = open_store("memory://", bounds=StateLimits(item=600_000, conversation=1_000_000))
    await store.start()
    yield Desk(store)
    await store.aclose()


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def texts(items: Sequence[Any]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


async def add(desk: Desk, conversation: str, *items: Any, **query: Any) -> Any:
    return await desk.ask("POST", f"/v1/conversations/{conversation}/items", {"items": list(items)}, **query)


async def kept(desk: Desk, conversation: str) -> tuple[StoredItem, ...]:
    items = await desk.store.conversation_items("ann", conversation)
    assert items is not None
    return items


SHOWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # an item: (what is sent, how it is shown, its id apart)
    "a message of the user": (
        HELLO,
        {
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": "Hello"}],
        },
    ),
    "an answer": (
        {"role": "assistant", "phase": "final_answer", "content": [{"type": "output_text", "text": "Yes"}]},
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "phase": "final_answer",
            "content": [{"type": "output_text", "text": "Yes", "annotations": []}],
        },
    ),
    "instructions": (
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {
            "type": "message",
            "role": "developer",
            "status": "completed",
            "content": [{"type": "input_text", "text": "Be brief."}],
        },
    ),
    "reasoning": (
        {"type": "reasoning", "id": "rs_x", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    ),
    "a call": (CALL, {"status": "completed", **CALL}),
    "a custom call": (
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "ls"},
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "ls", "status": "completed"},
    ),
    "a call a server made": (
        {"type": "mcp_call", "id": "mcp_x", "server_label": "docs", "name": "find", "arguments": "{}", "output": "1"},
        {
            "type": "mcp_call",
            "server_label": "docs",
            "name": "find",
            "arguments": "{}",
            "output": "1",
            "status": "completed",
        },
    ),
    "a search": (
        {"type": "web_search_call", "id": "ws_x", "action": {"type": "search", "query": "q"}},
        {"type": "web_search_call", "action": {"type": "search", "query": "q"}, "status": "completed"},
    ),
}


@pytest.mark.parametrize(("given", "shown"), SHOWN.values(), ids=SHOWN)
async def test_an_item_is_shown_as_it_was_given_under_an_id_of_its_own(
    desk: Desk, given: dict[str, Any], shown: dict[str, Any]
) -> None:
    conversation = await desk.made()
    answer = (await add(desk, conversation, given)).json()
    assert set(answer) == LISTING
    [item] = answer["data"]
    assert item["id"] != given.get("id")
    assert item == shown | {"id": item["id"]}
    assert answer == {
        "object": "list",
        "data": [item],
        "first_id": item["id"],
        "last_id": item["id"],
        "has_more": False,
    }
    assert (await desk.ask("GET", f"/v1/conversations/{conversation}/items/{item['id']}")).json() == item
    [first] = await desk.items(await desk.made(given))
    assert first == shown | {"id": first["id"]}


LEAST: dict[str, dict[str, Any]] = {
    "message": HELLO,
    "function_call": CALL,
    "custom_tool_call": {"call_id": "c", "name": "f"},
    "function_call_output": {"call_id": "earlier", "output": "1"},
    "custom_tool_call_output": {"call_id": "earlier", "output": "1"},
    "mcp_approval_response": {"approval_request_id": "asked", "approve": True},
}
ASKED = {"type": "mcp_approval_request", "id": "asked", "server_label": "docs", "name": "search", "arguments": "{}"}


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"item_reference"}))
async def test_every_kind_of_item_can_be_added(desk: Desk, kind: str) -> None:
    conversation = await desk.made(CALL | {"call_id": "earlier"}, ASKED)
    answer = await add(desk, conversation, {**LEAST.get(kind, {}), "type": kind})
    assert answer.status == 200, answer.body
    [item] = answer.json()["data"]
    assert item["type"] == kind
    assert (await desk.items(conversation))[2:] == [item]


async def test_items_are_added_in_order_behind_the_others(desk: Desk) -> None:
    conversation = await desk.made(message("0"))
    answer = await add(desk, conversation, *(message(str(number)) for number in range(1, 21)))
    added = answer.json()
    assert texts(added["data"]) == [str(number) for number in range(1, 21)]
    assert (added["first_id"], added["last_id"]) == (added["data"][0]["id"], added["data"][-1]["id"])
    assert (await desk.items(conversation, limit=100))[1:] == added["data"]
    assert len({item["id"] for item in added["data"]}) == 20


async def test_nothing_can_be_added(desk: Desk) -> None:
    conversation = await desk.made(HELLO)
    answer = await add(desk, conversation)
    assert answer.status == 200
    assert answer.json() == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert len(await desk.items(conversation)) == 1


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 3, 7, 8, 100])
async def test_pages_follow_each_other_in_both_orders(desk: Desk, order: str, limit: int) -> None:
    conversation = await desk.made(*(message(str(number)) for number in range(7)))
    seen: list[Any] = []
    after: dict[str, Any] = {}
    while True:
        answer = await desk.ask("GET", f"/v1/conversations/{conversation}/items", order=order, limit=limit, **after)
        page = answer.json()
        assert set(page) == LISTING
        assert 0 < len(page["data"]) <= limit
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        seen += page["data"]
        assert page["has_more"] == (len(seen) < 7)
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    numbers = [str(number) for number in range(7)]
    assert texts(seen) == (numbers if order == "asc" else numbers[::-1])
    behind = await desk.items(conversation, order=order, after=seen[-1]["id"])
    assert behind == []


async def test_a_page_is_the_newest_twenty_unless_told_otherwise(desk: Desk) -> None:
    conversation = await desk.made(*(message(str(number)) for number in range(20)))
    await add(desk, conversation, message("20"), message("21"))
    page = (await desk.ask("GET", f"/v1/conversations/{conversation}/items")).json()
    assert texts(page["data"]) == [str(number) for number in range(21, 1, -1)]
    assert page["has_more"] is True


BAD_QUERIES: dict[str, tuple[dict[str, Any], str]] = {
    "no items": ({"limit": 0}, "limit"),
    "too many items": ({"limit": 101}, "limit"),
    "a negative limit": ({"limit": -1}, "limit"),
    "a limit that is no number": ({"limit": "all"}, "limit"),
    "a limit of foreign digits": ({"limit": "２０"}, "limit"),
    "a huge limit": ({"limit": "9" * 5000}, "limit"),
    "an empty limit": ({"limit": ""}, "limit"),
    "a broken limit": ({"limit": "2.5"}, "limit"),
    "an unknown order": ({"order": "random"}, "order"),
    "an order in capitals": ({"order": "ASC"}, "order"),
    "an unknown field": ({"include": "everything"}, "include"),
    "an unknown field in brackets": ({"include[]": ["reasoning.encrypted_content", "everything"]}, "include"),
}


@pytest.mark.parametrize(("query", "param"), BAD_QUERIES.values(), ids=BAD_QUERIES)
async def test_a_bad_query_is_refused_by_the_name_of_its_field(desk: Desk, query: dict[str, Any], param: str) -> None:
    conversation = await desk.made(HELLO)
    refused(await desk.ask("GET", f"/v1/conversations/{conversation}/items", **query), 400, param)


@pytest.mark.parametrize("after", ["", "x" * 10_000, "\x00", "'", "ü"], ids=ascii)
async def test_a_page_behind_what_can_be_no_item_is_not_found(desk: Desk, after: str) -> None:
    conversation = await desk.made(HELLO)
    refused(await desk.ask("GET", f"/v1/conversations/{conversation}/items", after=after), 404, "after")


@pytest.mark.parametrize("name", ["include", "include[]"])
async def test_what_openai_can_include_may_be_asked_for_everywhere(desk: Desk, name: str) -> None:
    conversation = await desk.made(HELLO)
    [item] = await desk.items(conversation)
    names = ["reasoning.encrypted_content", "message.output_text.logprobs", "file_search_call.results"]
    wanted, unknown = dict[str, Any]({name: names}), dict[str, Any]({name: "everything"})
    path = f"/v1/conversations/{conversation}/items"
    assert (await desk.ask("GET", path, **wanted)).json()["data"] == [item]
    assert (await desk.ask("GET", f"{path}/{item['id']}", **wanted)).json() == item
    assert (await add(desk, conversation, HELLO, **wanted)).status == 200
    for method, where, json in (("GET", f"{path}/{item['id']}", None), ("POST", path, {"items": [HELLO]})):
        refused(await desk.ask(method, where, json, **unknown), 400, "include")
    assert len(await desk.items(conversation)) == 2


async def test_a_deleted_item_leaves_the_others_and_answers_with_the_conversation(desk: Desk) -> None:
    conversation = await desk.made(*map(message, "abc"), metadata={"topic": "tea"})
    items = await desk.items(conversation)
    answer = await desk.ask("DELETE", f"/v1/conversations/{conversation}/items/{items[1]['id']}")
    assert answer.json() == (await desk.ask("GET", f"/v1/conversations/{conversation}")).json()
    assert answer.json()["metadata"] == {"topic": "tea"}
    assert await desk.items(conversation) == [items[0], items[2]]


BAD_ITEMS: dict[str, tuple[Any, str]] = {
    "no items": ({}, "items"),
    "null": ({"items": None}, "items"),
    "a string": ({"items": "Hello"}, "items"),
    "too many": ({"items": [HELLO] * 21}, "items"),
    "far too many": ({"items": [HELLO] * 5000}, "items"),
    "a bad one amid good ones": ({"items": [HELLO, {"role": "user", "content": [{"type": "text"}]}, HELLO]}, ""),
    "an unknown kind": ({"items": [HELLO, {"type": "song"}]}, "items.1.type"),
    "an output of nothing known": ({"items": [HELLO, OUTPUT | {"call_id": "d"}]}, "items.1.call_id"),
    "outputs of which one has no call": ({"items": [OUTPUT, OUTPUT | {"call_id": "d"}]}, "items.1.call_id"),
}


@pytest.mark.parametrize(("body", "param"), BAD_ITEMS.values(), ids=BAD_ITEMS)
async def test_a_bad_item_leaves_the_conversation_as_it_was(desk: Desk, body: Any, param: str) -> None:
    conversation = await desk.made(HELLO, CALL)
    before = await kept(desk, conversation), await desk.store.conversation("ann", conversation)
    answer = await desk.ask("POST", f"/v1/conversations/{conversation}/items", body)
    refused(answer, 400, param or "items.1.content.0.text")
    assert (await kept(desk, conversation), await desk.store.conversation("ann", conversation)) == before


@pytest.mark.parametrize("together", [True, False], ids=["in one request", "in a later one"])
async def test_an_output_finds_its_call(desk: Desk, together: bool) -> None:
    conversation = await desk.made(HELLO)
    for request in [[CALL, OUTPUT]] if together else [[CALL], [OUTPUT]]:
        assert (await add(desk, conversation, *request)).status == 200
    said_there = [item.meaning for item in await kept(desk, conversation)]
    assert said_there[1:] == [(AssistantCall("c", "f", "{}"),), (ToolResult("c", "f", "42"),)]


async def test_an_output_does_not_find_the_call_of_another_conversation(desk: Desk) -> None:
    await desk.made(CALL)
    conversation = await desk.made(HELLO)
    message = refused(await add(desk, conversation, OUTPUT), 400, "items.0.call_id")
    assert "'c'" in message


async def test_an_item_is_known_again_with_the_tokens_the_model_generated(desk: Desk) -> None:
    ours = answered("Yes")
    await desk.store.create("ann", response("resp_1", Status.COMPLETED, output=(ours,)))
    conversation = await desk.made()
    same = {"type": "message", "id": ours.id, "role": "assistant", "content": "Yes"}
    await add(desk, conversation, same, same | {"content": "No"}, {"type": "item_reference", "id": ours.id})
    again, other, referred = await kept(desk, conversation)
    assert again.meaning == referred.meaning == ours.meaning
    assert other.meaning != ours.meaning
    assert {again.id, other.id, referred.id}.isdisjoint({ours.id})
    assert referred.wire == {**ours.wire, "id": referred.id}


@pytest.mark.parametrize("reference", ["msg_never", "x" * 100_000, "\x00", "ü"], ids=["unknown", "long", "zero", "odd"])
async def test_a_reference_to_nothing_is_not_found(desk: Desk, reference: str) -> None:
    conversation = await desk.made()
    answer = await add(desk, conversation, HELLO, {"type": "item_reference", "id": reference})
    assert len(refused(answer, 404, "items.1.id")) < 200
    assert await desk.items(conversation) == []


async def test_a_reference_to_an_item_of_another_tenant_is_not_found(desk: Desk) -> None:
    foreign = await desk.made(HELLO, as_="bob")
    theirs = await desk.store.conversation_items("bob", foreign)
    assert theirs
    body = {"items": [{"type": "item_reference", "id": theirs[0].id}]}
    refused(await desk.ask("POST", "/v1/conversations", body), 404, "items.0.id")
    assert (await desk.ask("POST", "/v1/conversations", body, as_="bob")).status == 200


async def test_a_large_body_is_kept_and_one_too_large_leaves_nothing(desk: Desk) -> None:
    words = "word " * (OFF_LOOP_BYTES // 5 + 1)
    conversation = await desk.made(message(words))
    assert texts(await desk.items(conversation)) == [words]
    for too_large in ([message(words + words)], [message(words)] * 3):
        refused(await add(desk, conversation, HELLO, *too_large), 413)
        refused(await desk.ask("POST", "/v1/conversations", {"items": [*too_large, message(words)]}), 413)
    assert len(await desk.items(conversation)) == 1


async def test_items_that_come_at_once_are_all_added(desk: Desk) -> None:
    conversation = await desk.made()
    answers = await asyncio.gather(*(add(desk, conversation, message(f"{n}"), message("+")) for n in range(20)))
    assert [answer.status for answer in answers] == [200] * 20
    told = texts(await desk.items(conversation, limit=100))
    assert sorted(told[::2], key=int) == [str(number) for number in range(20)]
    assert told[1::2] == ["+"] * 20


async def test_outputs_that_come_at_once_are_all_added(desk: Desk) -> None:
    conversation = await desk.made(*(CALL | {"call_id": f"c{n}"} for n in range(TRIES)))
    answers = await asyncio.gather(*(add(desk, conversation, OUTPUT | {"call_id": f"c{n}"}) for n in range(TRIES)))
    assert [answer.status for answer in answers] == [200] * TRIES
    outputs = [item["call_id"] for item in await desk.items(conversation) if item["type"] == OUTPUT["type"]]
    assert sorted(outputs) == [f"c{n}" for n in range(TRIES)]


class Crowded(SqliteStore):
    """A store in which somebody else acts right before every append."""

    def __init__(self) -> None:
        super().__init__(None)
        self.before: Callable[[str], Awaitable[object]] | None = None
        self.appends = 0

    async def append(
        self,
        tenant: str,
        conversation: str,
        items: Sequence[StoredItem],
        *,
        revision: int | None = None,
        lease: Lease | None = None,
    ) -> int:
        self.appends += 1
        if self.before is not None:
            await self.before(conversation)
        return await super().append(tenant, conversation, items, revision=revision, lease=lease)

    async def another(self, conversation: str) -> None:
        await super().append("ann", conversation, [said("another's")])


@pytest.fixture
async def crowd() -> AsyncIterator[Crowded]:
    store = Crowded()
    await store.start()
    yield store
    await store.aclose()


async def test_an_output_goes_behind_what_others_add_a_few_times(crowd: Crowded) -> None:
    desk = Desk(crowd)
    conversation = await desk.made(CALL)

    async def twice(conversation: str) -> None:
        if crowd.appends <= 2:
            await crowd.another(conversation)

    crowd.before = twice
    assert (await add(desk, conversation, OUTPUT)).status == 200
    items = [item.meaning[0] for item in await kept(desk, conversation)]
    assert items[1:3] == [UserMessage("another's")] * 2
    assert items[3:] == [ToolResult("c", "f", "42")]


async def test_an_output_is_given_up_when_others_never_leave_off(crowd: Crowded) -> None:
    desk = Desk(crowd)
    conversation = await desk.made(CALL)
    crowd.before = crowd.another
    refused(await add(desk, conversation, OUTPUT), 409)
    assert crowd.appends == TRIES
    assert [item.meaning[0] for item in (await kept(desk, conversation))[1:]] == [UserMessage("another's")] * TRIES


async def test_items_that_lean_on_nothing_need_no_second_try(crowd: Crowded) -> None:
    desk = Desk(crowd)
    conversation = await desk.made()
    crowd.before = crowd.another
    assert (await add(desk, conversation, HELLO)).status == 200
    assert crowd.appends == 1


async def test_an_output_whose_call_is_deleted_meanwhile_is_refused(crowd: Crowded) -> None:
    desk = Desk(crowd)
    conversation = await desk.made(CALL)
    [call] = await desk.items(conversation)
    crowd.before = lambda conversation: crowd.delete_item("ann", conversation, call["id"])
    refused(await add(desk, conversation, OUTPUT), 400, "items.0.call_id")
    assert await desk.items(conversation) == []


@pytest.mark.parametrize("item", [HELLO, OUTPUT], ids=["a message", "an output"])
async def test_a_conversation_deleted_meanwhile_is_not_found(crowd: Crowded, item: dict[str, Any]) -> None:
    desk = Desk(crowd)
    conversation = await desk.made(CALL)
    crowd.before = lambda conversation: crowd.delete_conversation("ann", conversation)
    assert conversation in refused(await add(desk, conversation, item), 404)


async def test_a_response_that_begins_meanwhile_is_a_conflict(crowd: Crowded) -> None:
    desk = Desk(crowd)
    conversation = await desk.made(CALL)
    crowd.before = lambda conversation: crowd.acquire("ann", conversation, "a run", 60)
    refused(await add(desk, conversation, OUTPUT), 409)
    assert crowd.appends == 1
