"""Conversations over HTTP, on a real store: made, read, changed, deleted, and never seen by another tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode

import pytest
from fastapi import FastAPI

from tests.api.asgi import Exchange, by_name
from tests.api.responses.frames import ids
from unisono.api.asgi_layers import asgi_layers
from unisono.api.error_responses import register
from unisono.api.responses.conversations.routes import CONVERSATIONS, ConversationDeps
from unisono.api.route_table import mount
from unisono.core.state_store import StateLimits, Store
from unisono.store import open_store

CONVERSATION = {"id", "object", "created_at", "metadata"}
LISTING = {"object", "data", "first_id", "last_id", "has_more"}
HELLO = {"role": "user", "content": "Hello"}


class Desk:
    """Two callers, ann and bob, in front of one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.app = FastAPI(
            docs_url=None,
            openapi_url=None,
            redirect_slashes=False,
            middleware=asgi_layers(authenticate=by_name, keyless=False, new_id=lambda: "0"),
        )
        register(self.app)
        deps = ConversationDeps(store, today=lambda: "2026-11-20", new_id=ids(), clock=lambda: 1_790_000_000.75)
        mount(self.app, CONVERSATIONS.routes, deps)

    async def ask(
        self, method: str, path: str, json: Any = None, *, as_: str = "ann", body: bytes | None = None, **query: Any
    ) -> Exchange:
        headers = [("authorization", f"Bearer {as_}")]
        if body is not None:
            headers.append(("content-type", "application/json"))
        asked = Exchange(self.app, method, path, json=json, body=body, headers=headers)
        asked.scope["query_string"] = urlencode(query, doseq=True).encode()
        return await asked.run()

    async def made(self, *items: Any, as_: str = "ann", **fields: Any) -> str:
        """The id of a new conversation."""
        answer = await self.ask("POST", "/v1/conversations", {"items": list(items), **fields}, as_=as_)
        assert answer.status == 200, answer.body
        return str(answer.json()["id"])

    async def items(self, conversation: str, **query: Any) -> list[Any]:
        answer = await self.ask("GET", f"/v1/conversations/{conversation}/items", **{"order": "asc", **query})
        assert answer.status == 200, answer.body
        return list(answer.json()["data"])


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    store = open_store("memory://", bounds=StateLimits(item=200_000, conversation=500_000))
    await store.start()
    yield Desk(store)
    await store.aclose()


def refused(answer: Exchange, status: int, param: str | None = None) -> str:
    """The message of a refusal in OpenAI's shape."""
    assert answer.status == status, answer.body
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]
    return str(error["message"])


@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_every_path_answers_with_and_without_the_prefix(desk: Desk, prefix: str) -> None:
    made = (await desk.ask("POST", f"{prefix}/conversations", {"items": [HELLO]})).json()
    one = f"{prefix}/conversations/{made['id']}"
    assert (await desk.ask("GET", one)).json() == made
    changed = (await desk.ask("POST", one, {"metadata": {"a": "b"}})).json()
    assert changed == made | {"metadata": {"a": "b"}}
    added = (await desk.ask("POST", f"{one}/items", {"items": [HELLO]})).json()
    listed = (await desk.ask("GET", f"{one}/items")).json()
    assert listed["data"][0] == added["data"][0]
    item = listed["data"][0]["id"]
    assert (await desk.ask("GET", f"{one}/items/{item}")).json() == listed["data"][0]
    assert (await desk.ask("DELETE", f"{one}/items/{item}")).json() == changed
    deleted = await desk.ask("DELETE", one)
    assert deleted.json() == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    assert deleted.headers["content-type"] == "application/json"


async def test_a_conversation_is_shown_as_openai_does(desk: Desk) -> None:
    made = (await desk.ask("POST", "/v1/conversations", {"metadata": {"topic": "tea"}})).json()
    assert set(made) == CONVERSATION
    assert made["id"].startswith("conv_")
    assert made["object"] == "conversation"
    assert made["created_at"] == 1_790_000_000
    assert isinstance(made["created_at"], int)
    assert made["metadata"] == {"topic": "tea"}


async def test_a_conversation_keeps_its_first_day(desk: Desk) -> None:
    kept = await desk.store.conversation("ann", await desk.made())
    assert kept is not None
    assert (kept.first_day, kept.created_at) == ("2026-11-20", 1_790_000_000.75)


NOTHING: dict[str, dict[str, Any]] = {
    "an empty object": {},
    "nulls": {"items": None, "metadata": None},
    "empty values": {"items": [], "metadata": {}},
    "fields nobody knows": {"new_field": {"a": 1}},
}


@pytest.mark.parametrize("body", NOTHING.values(), ids=NOTHING)
async def test_a_conversation_may_begin_with_nothing(desk: Desk, body: dict[str, Any]) -> None:
    made = await desk.ask("POST", "/v1/conversations", body)
    assert made.status == 200
    assert made.json()["metadata"] == {}
    listing = (await desk.ask("GET", f"/v1/conversations/{made.json()['id']}/items")).json()
    assert listing == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_a_conversation_begins_with_its_items_in_order(desk: Desk) -> None:
    texts = [str(number) for number in range(20)]
    conversation = await desk.made(*({"role": "user", "content": text} for text in texts))
    assert [item["content"][0]["text"] for item in await desk.items(conversation)] == texts


async def test_new_metadata_takes_the_place_of_all_there_was(desk: Desk) -> None:
    conversation = await desk.made(HELLO, metadata={"a": "1", "b": "2"})
    path = f"/v1/conversations/{conversation}"
    assert (await desk.ask("POST", path, {"metadata": {"c": "3"}})).json()["metadata"] == {"c": "3"}
    assert (await desk.ask("GET", path)).json()["metadata"] == {"c": "3"}
    assert (await desk.ask("POST", path, {"metadata": None})).json()["metadata"] == {}
    assert len(await desk.items(conversation)) == 1


async def test_a_deleted_conversation_is_gone_with_its_items(desk: Desk) -> None:
    conversation = await desk.made(HELLO)
    [item] = await desk.items(conversation)
    path = f"/v1/conversations/{conversation}"
    assert (await desk.ask("DELETE", path)).status == 200
    for method, where in (
        ("GET", path),
        ("DELETE", path),
        ("GET", f"{path}/items"),
        ("GET", f"{path}/items/{item['id']}"),
    ):
        assert (await desk.ask(method, path + where)).status == 404


MANY = {str(number): "x" for number in range(17)}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    # what is wrong with a new conversation: (its body, the field named)
    "metadata a list": ({"metadata": []}, "metadata"),
    "too many labels": ({"metadata": MANY}, "metadata"),
    "a label that is no text": ({"metadata": {"a": 1}}, "metadata.a"),
    "a label too long": ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    "a label's name too long": ({"metadata": {"a" * 65: "x"}}, f"metadata.{'a' * 64}"),
    "items a string": ({"items": "Hello"}, "items"),
    "too many items": ({"items": [HELLO] * 21}, "items"),
    "an item that is a string": ({"items": ["Hello"]}, "items.0"),
    "an unknown kind": ({"items": [HELLO, {"type": "song"}]}, "items.1.type"),
    "an unknown role": ({"items": [{"role": "critic", "content": "x"}]}, "items.0.role"),
    "no content": ({"items": [{"role": "user"}]}, "items.0.content"),
    "an image": ({"items": [{"role": "user", "content": [{"type": "input_image"}]}]}, "items.0.content.0.type"),
    "a call without a name": ({"items": [{"type": "function_call", "call_id": "c"}]}, "items.0.name"),
    "an output without a call": (
        {"items": [HELLO, {"type": "function_call_output", "call_id": "c", "output": "1"}]},
        "items.1.call_id",
    ),
    "an output before its call": (
        {
            "items": [
                {"type": "custom_tool_call_output", "call_id": "c", "output": "1"},
                {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
            ]
        },
        "items.0.call_id",
    ),
}


@pytest.mark.parametrize(("body", "param"), BAD.values(), ids=BAD)
async def test_a_bad_body_is_refused_by_the_name_of_its_field(desk: Desk, body: dict[str, Any], param: str) -> None:
    refused(await desk.ask("POST", "/v1/conversations", body), 400, param)


BAD_CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "metadata"),
    "metadata a string": ({"metadata": "tea"}, "metadata"),
    "too many labels": ({"metadata": MANY}, "metadata"),
    "a label that is null": ({"metadata": {"a": None}}, "metadata.a"),
}


@pytest.mark.parametrize(("body", "param"), BAD_CHANGES.values(), ids=BAD_CHANGES)
async def test_a_bad_change_leaves_the_metadata(desk: Desk, body: dict[str, Any], param: str) -> None:
    path = f"/v1/conversations/{await desk.made(metadata={'a': 'b'})}"
    refused(await desk.ask("POST", path, body), 400, param)
    assert (await desk.ask("GET", path)).json()["metadata"] == {"a": "b"}


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"items":[{"role":"user","content":"\\ud800"}]}'])
@pytest.mark.parametrize("suffix", ["", "/conv_0", "/conv_0/items"])
async def test_what_is_no_json_object_is_refused(desk: Desk, suffix: str, body: bytes) -> None:
    refused(await desk.ask("POST", f"/v1/conversations{suffix}", body=body), 400)


ROUTES: dict[str, tuple[str, str, Any]] = {
    "a conversation": ("GET", "", None),
    "a change": ("POST", "", {"metadata": {"a": "b"}}),
    "its end": ("DELETE", "", None),
    "new items": ("POST", "/items", {"items": [HELLO]}),
    "a new output": ("POST", "/items", {"items": [{"type": "function_call_output", "call_id": "c", "output": ""}]}),
    "no new items": ("POST", "/items", {"items": []}),
    "its items": ("GET", "/items", None),
    "the end of an item": ("DELETE", "/items/msg_1", None),
}
"""Requests about a conversation, each of which says that it is not there."""


@pytest.mark.parametrize(("method", "suffix", "json"), ROUTES.values(), ids=ROUTES)
async def test_a_missing_a_deleted_and_a_foreign_conversation_are_the_same(
    desk: Desk, method: str, suffix: str, json: Any
) -> None:
    foreign, deleted = await desk.made(HELLO, as_="bob"), await desk.made(HELLO)
    await desk.ask("DELETE", f"/v1/conversations/{deleted}")
    for conversation in (foreign, deleted, "conv_never"):
        answer = await desk.ask(method, f"/v1/conversations/{conversation}{suffix}", json)
        assert refused(answer, 404) == f"Conversation with id '{conversation}' not found."
        assert answer.json()["error"]["code"] == "not_found"
    assert len((await desk.ask("GET", f"/v1/conversations/{foreign}/items", as_="bob")).json()["data"]) == 1


async def test_a_missing_a_deleted_and_a_foreign_item_are_the_same(desk: Desk) -> None:
    foreign, mine = await desk.made(HELLO, as_="bob"), await desk.made(HELLO)
    [theirs] = (await desk.ask("GET", f"/v1/conversations/{foreign}/items", as_="bob")).json()["data"]
    [deleted] = await desk.items(mine)
    elsewhere = (await desk.items(await desk.made(HELLO)))[0]
    assert (await desk.ask("DELETE", f"/v1/conversations/{mine}/items/{deleted['id']}")).status == 200
    for item in (theirs["id"], deleted["id"], elsewhere["id"], "msg_never"):
        for method in ("GET", "DELETE"):
            answer = await desk.ask(method, f"/v1/conversations/{mine}/items/{item}")
            assert refused(answer, 404) == f"Item with id '{item}' not found in this conversation."
        answer = await desk.ask("GET", f"/v1/conversations/{mine}/items", after=item)
        assert refused(answer, 404, "after") == f"Item with id '{item}' not found in this conversation."
    assert (await desk.ask("GET", f"/v1/conversations/{foreign}/items/{theirs['id']}")).status == 404


ODD = {
    "very long": "conv_" + "x" * 20_000,
    "a quote": "conv_'; DROP TABLE conversations; --",
    "a zero byte": "conv_\x00",
    "a line break": "conv_1\n",
    "not ASCII": "conv_ü世界",
    "a replaced byte": "conv_\ufffd",
    "dots": "..",
    "a slash": "conv_1/x/y/z",
    "braces": "{conv}",
    "nothing": "",
}


@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
async def test_what_can_be_no_id_is_not_found(desk: Desk, name: str) -> None:
    conversation = await desk.made(HELLO)
    for method, suffix, json in ROUTES.values():
        answer = await desk.ask(method, f"/v1/conversations/{name}{suffix}", json)
        assert answer.status == 404, answer.body
        assert len(answer.body) < 1_000
    for method in ("GET", "DELETE"):
        assert (await desk.ask(method, f"/v1/conversations/{conversation}/items/{name}")).status == 404
    assert len(await desk.items(conversation)) == 1


async def test_an_id_is_repeated_up_to_128_characters(desk: Desk) -> None:
    answer = await desk.ask("GET", f"/v1/conversations/conv_{'x' * 500}")
    assert refused(answer, 404) == f"Conversation with id 'conv_{'x' * 123}' not found."


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
async def test_another_method_is_not_allowed(desk: Desk, method: str) -> None:
    assert (await desk.ask(method, f"/v1/conversations/{await desk.made()}", {})).status == 405


async def test_a_conversation_in_which_a_response_runs_is_not_changed_beside_it(desk: Desk) -> None:
    conversation = await desk.made(HELLO)
    [item] = await desk.items(conversation)
    path = f"/v1/conversations/{conversation}"
    lease = await desk.store.acquire("ann", conversation, "a run", 60)
    assert lease is not None
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    for method, where, json in (
        ("POST", f"{path}/items", {"items": [HELLO]}),
        ("POST", f"{path}/items", {"items": [call, output]}),
        ("DELETE", f"{path}/items/{item['id']}", None),
        ("DELETE", path, None),
    ):
        refused(await desk.ask(method, where, json), 409)
    assert await desk.items(conversation) == [item]
    assert (await desk.ask("POST", path, {"metadata": {"a": "b"}})).status == 200
    await desk.store.release(lease)
    assert (await desk.ask("POST", f"{path}/items", {"items": [call, output]})).status == 200
    assert (await desk.ask("DELETE", path)).status == 200


@pytest.mark.parametrize(
    ("method", "suffix", "json"), [*ROUTES.values(), ("GET", "/items/msg_1", None)], ids=[*ROUTES, "an item"]
)
async def test_a_store_that_is_away_is_said_to_be(desk: Desk, method: str, suffix: str, json: Any) -> None:
    await desk.store.aclose()
    answer = await desk.ask(method, f"/v1/conversations/conv_1{suffix}", json)
    assert refused(answer, 503).startswith("the store is not open")
    assert answer.headers["retry-after"] == "1"
    assert (await desk.ask("POST", "/v1/conversations", {"items": [HELLO]})).status == 503
