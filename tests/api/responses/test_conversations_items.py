"""Items of conversations over HTTP: item types, pages, and concurrent changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from tests.api.responses.test_conversations import HELLO, LISTING, ConversationsApi, error_message
from tests.contract.state import answered, response, said
from unisono.api.body import OFF_LOOP_BYTES
from unisono.api.responses.conversations.routes import TRIES
from unisono.api.responses.input_items import KINDS
from unisono.core.conversation import (
    SUMMARY_HEADING,
    AddedTools,
    AssistantCall,
    AssistantReasoning,
    Item,
    ToolResult,
    UserMessage,
)
from unisono.core.state_store import Lease, Status, StoredItem
from unisono.store import open_store
from unisono.store.codec import StateLimits
from unisono.store.sqlite import SqliteStore

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "42"}


@pytest.fixture
async def api() -> AsyncIterator[ConversationsApi]:
    store = open_store("memory://", bounds=StateLimits(item=600_000, conversation=1_000_000))
    await store.start()
    yield ConversationsApi(store)
    await store.aclose()


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def texts(items: Sequence[Any]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


async def add(api: ConversationsApi, conversation: str, *items: Any, **query: Any) -> Any:
    return await api.ask("POST", f"/v1/conversations/{conversation}/items", {"items": list(items)}, **query)


async def stored_items(api: ConversationsApi, conversation: str) -> tuple[StoredItem, ...]:
    items = await api.store.conversation_items("ann", conversation)
    assert items is not None
    return items


ITEM_FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # case: (sent item, expected item without its id)
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
    "a call by a server": (
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


@pytest.mark.parametrize(("sent", "expected"), ITEM_FORMS.values(), ids=ITEM_FORMS)
async def test_an_item_is_returned_as_sent_with_a_new_id(
    api: ConversationsApi, sent: dict[str, Any], expected: dict[str, Any]
) -> None:
    conversation = await api.create()
    answer = (await add(api, conversation, sent)).json()
    # A report on an item without content for the model.
    assert ("unisono" in answer) == (sent.get("type") == "web_search_call")
    answer.pop("unisono", None)
    assert set(answer) == LISTING
    [item] = answer["data"]
    assert item["id"] != sent.get("id")
    assert item == expected | {"id": item["id"]}
    assert answer == {
        "object": "list",
        "data": [item],
        "first_id": item["id"],
        "last_id": item["id"],
        "has_more": False,
    }
    assert (await api.ask("GET", f"/v1/conversations/{conversation}/items/{item['id']}")).json() == item
    [first] = await api.items(await api.create(sent))
    assert first == expected | {"id": first["id"]}


MINIMAL_ITEMS: dict[str, dict[str, Any]] = {
    "message": HELLO,
    "agent_message": {"author": "/root", "recipient": "/root/x", "content": "Hello."},
    "function_call": CALL,
    "custom_tool_call": {"call_id": "c", "name": "f"},
    "function_call_output": {"call_id": "earlier", "output": "1"},
    "custom_tool_call_output": {"call_id": "earlier", "output": "1"},
    "mcp_approval_response": {"approval_request_id": "asked", "approve": True},
    "mcp_elicitation_response": {"elicitation_request_id": "questioned", "action": "cancel"},
}
APPROVAL_REQUEST = {
    "type": "mcp_approval_request",
    "id": "asked",
    "server_label": "docs",
    "name": "search",
    "arguments": "{}",
}
QUESTION = {**APPROVAL_REQUEST, "type": "mcp_elicitation_request", "id": "questioned", "message": "Which one?"}


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"item_reference"}))
async def test_every_kind_of_item_can_be_added(api: ConversationsApi, kind: str) -> None:
    conversation = await api.create(CALL | {"call_id": "earlier"}, APPROVAL_REQUEST, QUESTION)
    answer = await add(api, conversation, {**MINIMAL_ITEMS.get(kind, {}), "type": kind})
    assert answer.status == 200, answer.body
    [item] = answer.json()["data"]
    assert item["type"] == kind
    assert (await api.items(conversation))[3:] == [item]


# A call, and its result in a later request.
LATER_RESULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "function_call_output": (CALL, OUTPUT),
    "shell_call_output": (
        {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "42"}]},
    ),
    "apply_patch_call_output": (
        {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "c", "status": "completed", "output": "42"},
    ),
    "tool_search_output": (
        {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "q"}},
        {"type": "tool_search_output", "call_id": "c", "tools": []},
    ),
    "mcp_call": (APPROVAL_REQUEST, {"type": "mcp_call", "approval_request_id": "asked", "output": "42"}),
}


@pytest.mark.parametrize(("call", "output"), LATER_RESULTS.values(), ids=LATER_RESULTS)
async def test_a_result_finds_its_call_in_the_conversation(
    api: ConversationsApi, call: dict[str, Any], output: dict[str, Any]
) -> None:
    conversation = await api.create(call)
    answer = await add(api, conversation, output)
    assert "unisono" not in answer.json()
    first, second = await stored_items(api, conversation)
    [called], [result] = first.meaning, second.meaning
    assert isinstance(called, AssistantCall)
    assert isinstance(result, ToolResult)
    assert result.call_id == called.call_id


async def test_an_added_mcp_server_is_kept_without_its_secrets(api: ConversationsApi) -> None:
    server = {"type": "mcp", "server_label": "a b", "connector_id": "c", "authorization": "sk-secret"}
    tool = {"type": "function", "name": "look", "description": None, "parameters": {"type": "object"}, "strict": False}
    conversation = await api.create({"type": "additional_tools", "role": "developer", "tools": [server, tool]})
    [item] = await api.items(conversation)
    assert item["tools"] == [{"type": "mcp", "server_label": "a b"}, tool]


async def test_new_items_are_appended_in_order(api: ConversationsApi) -> None:
    conversation = await api.create(message("0"))
    answer = await add(api, conversation, *(message(str(number)) for number in range(1, 21)))
    added = answer.json()
    assert texts(added["data"]) == [str(number) for number in range(1, 21)]
    assert (added["first_id"], added["last_id"]) == (added["data"][0]["id"], added["data"][-1]["id"])
    assert (await api.items(conversation, limit=100))[1:] == added["data"]
    assert len({item["id"] for item in added["data"]}) == 20


async def test_an_empty_list_of_items_is_accepted(api: ConversationsApi) -> None:
    conversation = await api.create(HELLO)
    answer = await add(api, conversation)
    assert answer.status == 200
    assert answer.json() == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert len(await api.items(conversation)) == 1


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 3, 7, 8, 100])
async def test_pages_cover_all_items_in_both_orders(api: ConversationsApi, order: str, limit: int) -> None:
    conversation = await api.create(*(message(str(number)) for number in range(7)))
    seen: list[Any] = []
    after: dict[str, Any] = {}
    while True:
        answer = await api.ask("GET", f"/v1/conversations/{conversation}/items", order=order, limit=limit, **after)
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
    past_the_end = await api.items(conversation, order=order, after=seen[-1]["id"])
    assert past_the_end == []


async def test_the_default_page_has_the_newest_twenty_items(api: ConversationsApi) -> None:
    conversation = await api.create(*(message(str(number)) for number in range(20)))
    await add(api, conversation, message("20"), message("21"))
    page = (await api.ask("GET", f"/v1/conversations/{conversation}/items")).json()
    assert texts(page["data"]) == [str(number) for number in range(21, 1, -1)]
    assert page["has_more"] is True


BAD_QUERIES: dict[str, tuple[dict[str, Any], str]] = {
    "no items": ({"limit": 0}, "limit"),
    "too many items": ({"limit": 101}, "limit"),
    "a negative limit": ({"limit": -1}, "limit"),
    "a limit that is not a number": ({"limit": "all"}, "limit"),
    "a limit in full-width digits": ({"limit": "２０"}, "limit"),
    "a huge limit": ({"limit": "9" * 5000}, "limit"),
    "an empty limit": ({"limit": ""}, "limit"),
    "a fractional limit": ({"limit": "2.5"}, "limit"),
    "an unknown order": ({"order": "random"}, "order"),
    "an order in capitals": ({"order": "ASC"}, "order"),
    "an unknown field": ({"include": "everything"}, "include"),
    "an unknown field in brackets": ({"include[]": ["reasoning.encrypted_content", "everything"]}, "include"),
}


@pytest.mark.parametrize(("query", "param"), BAD_QUERIES.values(), ids=BAD_QUERIES)
async def test_an_error_names_the_invalid_query_field(api: ConversationsApi, query: dict[str, Any], param: str) -> None:
    conversation = await api.create(HELLO)
    error_message(await api.ask("GET", f"/v1/conversations/{conversation}/items", **query), 400, param)


@pytest.mark.parametrize("after", ["", "x" * 10_000, "\x00", "'", "ü"], ids=ascii)
async def test_a_page_after_a_malformed_item_id_is_not_found(api: ConversationsApi, after: str) -> None:
    conversation = await api.create(HELLO)
    error_message(await api.ask("GET", f"/v1/conversations/{conversation}/items", after=after), 404, "after")


@pytest.mark.parametrize("name", ["include", "include[]"])
async def test_every_route_accepts_openais_include_values(api: ConversationsApi, name: str) -> None:
    conversation = await api.create(HELLO)
    [item] = await api.items(conversation)
    names = ["reasoning.encrypted_content", "message.output_text.logprobs", "file_search_call.results"]
    known, unknown = dict[str, Any]({name: names}), dict[str, Any]({name: "everything"})
    path = f"/v1/conversations/{conversation}/items"
    assert (await api.ask("GET", path, **known)).json()["data"] == [item]
    assert (await api.ask("GET", f"{path}/{item['id']}", **known)).json() == item
    assert (await add(api, conversation, HELLO, **known)).status == 200
    for method, where, json in (("GET", f"{path}/{item['id']}", None), ("POST", path, {"items": [HELLO]})):
        text = error_message(await api.ask(method, where, json, **unknown), 400, "include")
        assert text.count("message.output_text.logprobs") == 1
    assert len(await api.items(conversation)) == 2


async def test_deleting_an_item_keeps_the_others_and_returns_the_conversation(api: ConversationsApi) -> None:
    conversation = await api.create(*map(message, "abc"), metadata={"topic": "tea"})
    items = await api.items(conversation)
    answer = await api.ask("DELETE", f"/v1/conversations/{conversation}/items/{items[1]['id']}")
    assert answer.json() == (await api.ask("GET", f"/v1/conversations/{conversation}")).json()
    assert answer.json()["metadata"] == {"topic": "tea"}
    assert await api.items(conversation) == [items[0], items[2]]


BAD_ITEMS: dict[str, tuple[Any, str]] = {
    "no items": ({}, "items"),
    "null": ({"items": None}, "items"),
    "a string": ({"items": "Hello"}, "items"),
    "too many": ({"items": [HELLO] * 21}, "items"),
    "far too many": ({"items": [HELLO] * 5000}, "items"),
    "a bad item among good ones": ({"items": [HELLO, {"role": "user", "content": [{"type": "text"}]}, HELLO]}, ""),
    "an unknown item type": ({"items": [HELLO, {"type": "song"}]}, "items.1.type"),
    "an output of an unknown call": ({"items": [HELLO, OUTPUT | {"call_id": "d"}]}, "items.1.call_id"),
    "two outputs, one without a call": ({"items": [OUTPUT, OUTPUT | {"call_id": "d"}]}, "items.1.call_id"),
}


@pytest.mark.parametrize(("body", "param"), BAD_ITEMS.values(), ids=BAD_ITEMS)
async def test_an_invalid_item_leaves_the_conversation_unchanged(api: ConversationsApi, body: Any, param: str) -> None:
    conversation = await api.create(HELLO, CALL)
    before = await stored_items(api, conversation), await api.store.conversation("ann", conversation)
    answer = await api.ask("POST", f"/v1/conversations/{conversation}/items", body)
    error_message(answer, 400, param or "items.1.content.0.text")
    assert (await stored_items(api, conversation), await api.store.conversation("ann", conversation)) == before


@pytest.mark.parametrize("in_one_request", [True, False], ids=["in one request", "in two requests"])
async def test_an_output_is_matched_with_its_call(api: ConversationsApi, in_one_request: bool) -> None:
    conversation = await api.create(HELLO)
    for request in [[CALL, OUTPUT]] if in_one_request else [[CALL], [OUTPUT]]:
        assert (await add(api, conversation, *request)).status == 200
    meanings = [item.meaning for item in await stored_items(api, conversation)]
    assert meanings[1:] == [(AssistantCall("c", "f", "{}"),), (ToolResult("c", "f", "42"),)]


async def test_an_output_is_not_matched_with_a_call_of_another_conversation(api: ConversationsApi) -> None:
    await api.create(CALL)
    conversation = await api.create(HELLO)
    message = error_message(await add(api, conversation, OUTPUT), 400, "items.0.call_id")
    assert "'c'" in message


async def test_an_unchanged_item_keeps_its_generated_tokens(api: ConversationsApi) -> None:
    generated = answered("Yes")
    await api.store.create("ann", response("resp_1", Status.COMPLETED, output=(generated,)))
    conversation = await api.create()
    same = {"type": "message", "id": generated.id, "role": "assistant", "content": "Yes"}
    await add(api, conversation, same, same | {"content": "No"}, {"type": "item_reference", "id": generated.id})
    unchanged, changed, referenced = await stored_items(api, conversation)
    assert unchanged.meaning == referenced.meaning == generated.meaning
    assert changed.meaning != generated.meaning
    assert {unchanged.id, changed.id, referenced.id}.isdisjoint({generated.id})
    assert referenced.wire == {**generated.wire, "id": referenced.id}


SEALED: dict[str, tuple[Item, ...]] = {
    # type of the item: sealed items
    "reasoning": (AssistantReasoning("Tea?", (17, 4)),),
    "compaction": (UserMessage(f"{SUMMARY_HEADING}They want tea."),),
}


@pytest.mark.parametrize("is_new", [True, False], ids=["new conversation", "existing conversation"])
@pytest.mark.parametrize("kind", SEALED)
async def test_an_encrypted_item_has_its_decrypted_content(api: ConversationsApi, kind: str, is_new: bool) -> None:
    def item(tenant: str) -> dict[str, Any]:
        return {"type": kind, "summary": [], "encrypted_content": api.sealer.seal(tenant, SEALED[kind])}

    own, foreign = HELLO, item("bob")
    if is_new:
        response = await api.ask("POST", "/v1/conversations", {"items": [own, item("ann"), foreign]})
        conversation = response.json()["id"]
    else:
        conversation = await api.create(own)
        response = await add(api, conversation, item("ann"), foreign)
    assert response.status == 200, response.body
    assert [each.meaning for each in await stored_items(api, conversation)][1:] == [SEALED[kind], ()]
    [note] = response.json()["unisono"]["notes"]
    assert note.startswith(f"items.{2 if is_new else 1}: no effect, because")


LATER = {"type": "function", "name": "later", "defer_loading": True}


@pytest.mark.parametrize("first", [True, False], ids=["search before", "no search"])
async def test_an_added_tool_is_deferred_if_an_item_declares_the_search(api: ConversationsApi, first: bool) -> None:
    def tools(*declared: dict[str, Any]) -> dict[str, Any]:
        return {"type": "additional_tools", "role": "developer", "tools": [*declared]}

    search = [tools({"type": "tool_search"}, {**LATER, "name": "other"})] if first else []
    conversation = await api.create(HELLO, *search)
    response = await add(api, conversation, tools(LATER))
    [item] = (await stored_items(api, conversation))[-1].meaning
    assert isinstance(item, AddedTools)
    assert [tool.deferred for tool in item.tools] == [first]
    notes = response.json().get("unisono", {}).get("notes", [])
    assert [note.partition(":")[0] for note in notes] == ([] if first else ["items.0.tools.0.defer_loading"])


@pytest.mark.parametrize(
    "reference", ["msg_never", "x" * 100_000, "\x00", "ü"], ids=["unknown", "long", "zero byte", "not ASCII"]
)
async def test_an_unknown_reference_is_not_found(api: ConversationsApi, reference: str) -> None:
    conversation = await api.create()
    answer = await add(api, conversation, HELLO, {"type": "item_reference", "id": reference})
    assert len(error_message(answer, 404, "items.1.id")) < 200
    assert await api.items(conversation) == []


async def test_a_reference_to_an_item_of_another_tenant_is_not_found(api: ConversationsApi) -> None:
    foreign = await api.create(HELLO, as_="bob")
    foreign_items = await api.store.conversation_items("bob", foreign)
    assert foreign_items
    body = {"items": [{"type": "item_reference", "id": foreign_items[0].id}]}
    error_message(await api.ask("POST", "/v1/conversations", body), 404, "items.0.id")
    assert (await api.ask("POST", "/v1/conversations", body, as_="bob")).status == 200


async def test_a_large_body_is_stored_and_one_over_the_limit_is_refused(api: ConversationsApi) -> None:
    words = "word " * (OFF_LOOP_BYTES // 5 + 1)
    conversation = await api.create(message(words))
    assert texts(await api.items(conversation)) == [words]
    for too_large, param, added_param in (
        ([message(words + words)], "items.0", "items.1"),
        ([message(words)] * 3, None, None),
    ):
        error_message(await add(api, conversation, HELLO, *too_large), 413, added_param)
        error_message(await api.ask("POST", "/v1/conversations", {"items": [*too_large, message(words)]}), 413, param)
    assert len(await api.items(conversation)) == 1


async def test_concurrent_items_are_all_added(api: ConversationsApi) -> None:
    conversation = await api.create()
    answers = await asyncio.gather(*(add(api, conversation, message(f"{n}"), message("+")) for n in range(20)))
    assert [answer.status for answer in answers] == [200] * 20
    stored_texts = texts(await api.items(conversation, limit=100))
    assert sorted(stored_texts[::2], key=int) == [str(number) for number in range(20)]
    assert stored_texts[1::2] == ["+"] * 20


async def test_concurrent_outputs_are_all_added(api: ConversationsApi) -> None:
    conversation = await api.create(*(CALL | {"call_id": f"c{n}"} for n in range(TRIES)))
    answers = await asyncio.gather(*(add(api, conversation, OUTPUT | {"call_id": f"c{n}"}) for n in range(TRIES)))
    assert [answer.status for answer in answers] == [200] * TRIES
    outputs = [item["call_id"] for item in await api.items(conversation) if item["type"] == OUTPUT["type"]]
    assert sorted(outputs) == [f"c{n}" for n in range(TRIES)]


class ContendedStore(SqliteStore):
    """Store that runs `before_append` right before every append."""

    def __init__(self) -> None:
        super().__init__(None)
        self.before_append: Callable[[str], Awaitable[object]] | None = None
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
        if self.before_append is not None:
            await self.before_append(conversation)
        return await super().append(tenant, conversation, items, revision=revision, lease=lease)

    async def append_other(self, conversation: str) -> None:
        await super().append("ann", conversation, [said("another's")])


@pytest.fixture
async def contended_store() -> AsyncIterator[ContendedStore]:
    store = ContendedStore()
    await store.start()
    yield store
    await store.aclose()


async def test_an_output_is_appended_after_a_few_concurrent_appends(contended_store: ContendedStore) -> None:
    api = ConversationsApi(contended_store)
    conversation = await api.create(CALL)

    async def append_twice(conversation: str) -> None:
        if contended_store.appends <= 2:
            await contended_store.append_other(conversation)

    contended_store.before_append = append_twice
    assert (await add(api, conversation, OUTPUT)).status == 200
    items = [item.meaning[0] for item in await stored_items(api, conversation)]
    assert items[1:3] == [UserMessage("another's")] * 2
    assert items[3:] == [ToolResult("c", "f", "42")]


async def test_an_output_is_refused_after_too_many_concurrent_appends(contended_store: ContendedStore) -> None:
    api = ConversationsApi(contended_store)
    conversation = await api.create(CALL)
    contended_store.before_append = contended_store.append_other
    error_message(await add(api, conversation, OUTPUT), 409, "conversation")
    assert contended_store.appends == TRIES
    assert [item.meaning[0] for item in (await stored_items(api, conversation))[1:]] == [
        UserMessage("another's")
    ] * TRIES


async def test_items_without_references_need_no_retry(contended_store: ContendedStore) -> None:
    api = ConversationsApi(contended_store)
    conversation = await api.create()
    contended_store.before_append = contended_store.append_other
    assert (await add(api, conversation, HELLO)).status == 200
    assert contended_store.appends == 1


async def test_an_output_is_refused_if_its_call_is_deleted_concurrently(contended_store: ContendedStore) -> None:
    api = ConversationsApi(contended_store)
    conversation = await api.create(CALL)
    [call] = await api.items(conversation)
    contended_store.before_append = lambda conversation: contended_store.delete_item("ann", conversation, call["id"])
    error_message(await add(api, conversation, OUTPUT), 400, "items.0.call_id")
    assert await api.items(conversation) == []


@pytest.mark.parametrize("item", [HELLO, OUTPUT], ids=["a message", "an output"])
async def test_a_conversation_deleted_concurrently_is_not_found(
    contended_store: ContendedStore, item: dict[str, Any]
) -> None:
    api = ConversationsApi(contended_store)
    conversation = await api.create(CALL)
    contended_store.before_append = lambda conversation: contended_store.delete_conversation("ann", conversation)
    assert conversation in error_message(await add(api, conversation, item), 404, "conversation")


async def test_a_response_started_concurrently_is_a_conflict(contended_store: ContendedStore) -> None:
    api = ConversationsApi(contended_store)
    conversation = await api.create(CALL)
    contended_store.before_append = lambda conversation: contended_store.acquire("ann", conversation, "a run", 60)
    error_message(await add(api, conversation, OUTPUT), 409, "conversation")
    assert contended_store.appends == 1
