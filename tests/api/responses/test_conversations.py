"""Conversations over HTTP on a real store: create, read, update, delete, tenant isolation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode

import pytest
from fastapi import FastAPI

from tests.api.asgi import Exchange, by_name, mount
from tests.api.responses.frames import ids
from unisono.api.asgi_layers import asgi_layers
from unisono.api.fastapi_app import register
from unisono.api.responses.conversations.routes import CONVERSATIONS, ConversationDeps
from unisono.api.sealing import Sealer
from unisono.core.state_store import Store
from unisono.store import open_store
from unisono.store.codec import StateLimits

CONVERSATION = {"id", "object", "created_at", "metadata"}
LISTING = {"object", "data", "first_id", "last_id", "has_more"}
HELLO = {"role": "user", "content": "Hello"}


class ConversationsApi:
    """Conversations API of one store for the callers ann and bob."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.sealer = Sealer(b"a salt for tests, long enough")
        self.app = FastAPI(
            docs_url=None,
            openapi_url=None,
            redirect_slashes=False,
            middleware=asgi_layers(authenticate=by_name, keyless=False, new_id=lambda: "0"),
        )
        register(self.app)
        deps = ConversationDeps(
            store, today=lambda: "2026-11-20", new_id=ids(), clock=lambda: 1_790_000_000.75, seals=self._seals
        )
        mount(self.app, CONVERSATIONS.routes, deps)

    async def _seals(self) -> Sealer:
        return self.sealer

    async def ask(
        self, method: str, path: str, json: Any = None, *, as_: str = "ann", body: bytes | None = None, **query: Any
    ) -> Exchange:
        headers = [("authorization", f"Bearer {as_}")]
        if body is not None:
            headers.append(("content-type", "application/json"))
        exchange = Exchange(self.app, method, path, json=json, body=body, headers=headers)
        exchange.scope["query_string"] = urlencode(query, doseq=True).encode()
        return await exchange.run()

    async def create(self, *items: Any, as_: str = "ann", **fields: Any) -> str:
        """Create a conversation and return its id."""
        response = await self.ask("POST", "/v1/conversations", {"items": list(items), **fields}, as_=as_)
        assert response.status == 200, response.body
        return str(response.json()["id"])

    async def items(self, conversation: str, **query: Any) -> list[Any]:
        response = await self.ask("GET", f"/v1/conversations/{conversation}/items", **{"order": "asc", **query})
        assert response.status == 200, response.body
        return list(response.json()["data"])


@pytest.fixture
async def api() -> AsyncIterator[ConversationsApi]:
    store = open_store("memory://", bounds=StateLimits(item=200_000, conversation=500_000))
    await store.start()
    yield ConversationsApi(store)
    await store.aclose()


def error_message(response: Exchange, status: int, param: str | None = None) -> str:
    """Check that the response is an error in OpenAI's shape, and return its message."""
    assert response.status == status, response.body
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]
    return str(error["message"])


@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_every_route_works_with_and_without_the_prefix(api: ConversationsApi, prefix: str) -> None:
    created = (await api.ask("POST", f"{prefix}/conversations", {"items": [HELLO]})).json()
    path = f"{prefix}/conversations/{created['id']}"
    assert (await api.ask("GET", path)).json() == created
    changed = (await api.ask("POST", path, {"metadata": {"a": "b"}})).json()
    assert changed == created | {"metadata": {"a": "b"}}
    added = (await api.ask("POST", f"{path}/items", {"items": [HELLO]})).json()
    listed = (await api.ask("GET", f"{path}/items")).json()
    assert listed["data"][0] == added["data"][0]
    item = listed["data"][0]["id"]
    assert (await api.ask("GET", f"{path}/items/{item}")).json() == listed["data"][0]
    assert (await api.ask("DELETE", f"{path}/items/{item}")).json() == changed
    deleted = await api.ask("DELETE", path)
    assert deleted.json() == {"id": created["id"], "object": "conversation.deleted", "deleted": True}
    assert deleted.headers["content-type"] == "application/json"


async def test_a_conversation_has_openais_shape(api: ConversationsApi) -> None:
    created = (await api.ask("POST", "/v1/conversations", {"metadata": {"topic": "tea"}})).json()
    assert set(created) == CONVERSATION
    assert created["id"].startswith("conv_")
    assert created["object"] == "conversation"
    assert created["created_at"] == 1_790_000_000
    assert isinstance(created["created_at"], int)
    assert created["metadata"] == {"topic": "tea"}


async def test_a_conversation_stores_its_first_day(api: ConversationsApi) -> None:
    stored = await api.store.conversation("ann", await api.create())
    assert stored is not None
    assert (stored.first_day, stored.created_at) == ("2026-11-20", 1_790_000_000.75)


EMPTY_BODIES: dict[str, dict[str, Any]] = {
    "an empty object": {},
    "nulls": {"items": None, "metadata": None},
    "empty values": {"items": [], "metadata": {}},
    "unknown fields": {"new_field": {"a": 1}},
}


@pytest.mark.parametrize("body", EMPTY_BODIES.values(), ids=EMPTY_BODIES)
async def test_a_conversation_can_be_created_empty(api: ConversationsApi, body: dict[str, Any]) -> None:
    created = await api.ask("POST", "/v1/conversations", body)
    assert created.status == 200
    assert created.json()["metadata"] == {}
    listing = (await api.ask("GET", f"/v1/conversations/{created.json()['id']}/items")).json()
    assert listing == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_initial_items_keep_their_order(api: ConversationsApi) -> None:
    texts = [str(number) for number in range(20)]
    conversation = await api.create(*({"role": "user", "content": text} for text in texts))
    assert [item["content"][0]["text"] for item in await api.items(conversation)] == texts


async def test_new_metadata_replaces_the_old_metadata(api: ConversationsApi) -> None:
    conversation = await api.create(HELLO, metadata={"a": "1", "b": "2"})
    path = f"/v1/conversations/{conversation}"
    assert (await api.ask("POST", path, {"metadata": {"c": "3"}})).json()["metadata"] == {"c": "3"}
    assert (await api.ask("GET", path)).json()["metadata"] == {"c": "3"}
    assert (await api.ask("POST", path, {"metadata": None})).json()["metadata"] == {}
    assert len(await api.items(conversation)) == 1


async def test_a_deleted_conversation_and_its_items_are_not_found(api: ConversationsApi) -> None:
    conversation = await api.create(HELLO)
    [item] = await api.items(conversation)
    path = f"/v1/conversations/{conversation}"
    reads = (path, f"{path}/items", f"{path}/items/{item['id']}")
    assert [(await api.ask("GET", where)).status for where in reads] == [200, 200, 200]
    assert (await api.ask("DELETE", path)).status == 200
    for method, where in (*(("GET", where) for where in reads), ("DELETE", path)):
        assert (await api.ask(method, where)).status == 404, (method, where)


TOO_MUCH_METADATA = {str(number): "x" for number in range(17)}

BAD_BODIES: dict[str, tuple[dict[str, Any], str]] = {
    # case: (body of a new conversation, expected param)
    "metadata a list": ({"metadata": []}, "metadata"),
    "too many metadata entries": ({"metadata": TOO_MUCH_METADATA}, "metadata"),
    "a metadata value that is not text": ({"metadata": {"a": 1}}, "metadata.a"),
    "a metadata value too long": ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    "a metadata key too long": ({"metadata": {"a" * 65: "x"}}, f"metadata.{'a' * 64}"),
    "items a string": ({"items": "Hello"}, "items"),
    "too many items": ({"items": [HELLO] * 21}, "items"),
    "an item that is a string": ({"items": ["Hello"]}, "items.0"),
    "an unknown item type": ({"items": [HELLO, {"type": "song"}]}, "items.1.type"),
    "an unknown role": ({"items": [{"role": "critic", "content": "x"}]}, "items.0.role"),
    "no content": ({"items": [{"role": "user"}]}, "items.0.content"),
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


@pytest.mark.parametrize(("body", "param"), BAD_BODIES.values(), ids=BAD_BODIES)
async def test_an_error_names_the_invalid_field(api: ConversationsApi, body: dict[str, Any], param: str) -> None:
    error_message(await api.ask("POST", "/v1/conversations", body), 400, param)


BAD_CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "no fields": ({}, "metadata"),
    "metadata a string": ({"metadata": "tea"}, "metadata"),
    "too many metadata entries": ({"metadata": TOO_MUCH_METADATA}, "metadata"),
    "a metadata value of null": ({"metadata": {"a": None}}, "metadata.a"),
}


@pytest.mark.parametrize(("body", "param"), BAD_CHANGES.values(), ids=BAD_CHANGES)
async def test_an_invalid_update_keeps_the_metadata(api: ConversationsApi, body: dict[str, Any], param: str) -> None:
    path = f"/v1/conversations/{await api.create(metadata={'a': 'b'})}"
    error_message(await api.ask("POST", path, body), 400, param)
    assert (await api.ask("GET", path)).json()["metadata"] == {"a": "b"}


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"items":[{"role":"user","content":"\\ud800"}]}'])
@pytest.mark.parametrize("suffix", ["", "/conv_0", "/conv_0/items"])
async def test_a_body_that_is_not_a_json_object_is_refused(api: ConversationsApi, suffix: str, body: bytes) -> None:
    error_message(await api.ask("POST", f"/v1/conversations{suffix}", body=body), 400)


# Requests about a conversation; each gets a 404 error if it does not exist.
ROUTES: dict[str, tuple[str, str, Any]] = {
    "a conversation": ("GET", "", None),
    "an update": ("POST", "", {"metadata": {"a": "b"}}),
    "deletion": ("DELETE", "", None),
    "new items": ("POST", "/items", {"items": [HELLO]}),
    "a new output": ("POST", "/items", {"items": [{"type": "function_call_output", "call_id": "c", "output": ""}]}),
    "an empty list of new items": ("POST", "/items", {"items": []}),
    "its items": ("GET", "/items", None),
    "deletion of an item": ("DELETE", "/items/msg_1", None),
}


@pytest.mark.parametrize(("method", "suffix", "json"), ROUTES.values(), ids=ROUTES)
async def test_missing_deleted_and_foreign_conversations_get_the_same_error(
    api: ConversationsApi, method: str, suffix: str, json: Any
) -> None:
    foreign, deleted = await api.create(HELLO, as_="bob"), await api.create(HELLO)
    await api.ask("DELETE", f"/v1/conversations/{deleted}")
    for conversation in (foreign, deleted, "conv_never"):
        response = await api.ask(method, f"/v1/conversations/{conversation}{suffix}", json)
        assert error_message(response, 404, "conversation") == f"Conversation with id '{conversation}' not found."
        assert response.json()["error"]["code"] == "not_found"
    assert len((await api.ask("GET", f"/v1/conversations/{foreign}/items", as_="bob")).json()["data"]) == 1


async def test_missing_deleted_and_foreign_items_get_the_same_error(api: ConversationsApi) -> None:
    foreign, own = await api.create(HELLO, as_="bob"), await api.create(HELLO)
    [foreign_item] = (await api.ask("GET", f"/v1/conversations/{foreign}/items", as_="bob")).json()["data"]
    [deleted] = await api.items(own)
    elsewhere = (await api.items(await api.create(HELLO)))[0]
    assert (await api.ask("DELETE", f"/v1/conversations/{own}/items/{deleted['id']}")).status == 200
    for item in (foreign_item["id"], deleted["id"], elsewhere["id"], "msg_never"):
        for method in ("GET", "DELETE"):
            response = await api.ask(method, f"/v1/conversations/{own}/items/{item}")
            assert error_message(response, 404, "item") == f"Item with id '{item}' not found in this conversation."
        response = await api.ask("GET", f"/v1/conversations/{own}/items", after=item)
        assert error_message(response, 404, "after") == f"Item with id '{item}' not found in this conversation."
    assert (await api.ask("GET", f"/v1/conversations/{foreign}/items/{foreign_item['id']}")).status == 404


MALFORMED_IDS = {
    "very long": "conv_" + "x" * 20_000,
    "a quote": "conv_'; DROP TABLE conversations; --",
    "a zero byte": "conv_\x00",
    "a line break": "conv_1\n",
    "not ASCII": "conv_ü世界",
    "a replaced byte": "conv_\ufffd",
    "dots": "..",
    "a slash": "conv_1/x/y/z",
    "braces": "{conv}",
    "an empty id": "",
}


@pytest.mark.parametrize("name", MALFORMED_IDS.values(), ids=MALFORMED_IDS)
async def test_a_malformed_id_is_not_found(api: ConversationsApi, name: str) -> None:
    conversation = await api.create(HELLO)
    for method, suffix, json in ROUTES.values():
        response = await api.ask(method, f"/v1/conversations/{name}{suffix}", json)
        assert response.status == 404, response.body
        assert len(response.body) < 1_000
    for method in ("GET", "DELETE"):
        assert (await api.ask(method, f"/v1/conversations/{conversation}/items/{name}")).status == 404
    assert len(await api.items(conversation)) == 1


async def test_an_error_quotes_at_most_128_characters_of_an_id(api: ConversationsApi) -> None:
    response = await api.ask("GET", f"/v1/conversations/conv_{'x' * 500}")
    assert error_message(response, 404, "conversation") == f"Conversation with id 'conv_{'x' * 123}' not found."


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
async def test_another_method_is_not_allowed(api: ConversationsApi, method: str) -> None:
    assert (await api.ask(method, f"/v1/conversations/{await api.create()}", {})).status == 405


async def test_a_conversation_with_a_running_response_cannot_be_changed(api: ConversationsApi) -> None:
    conversation = await api.create(HELLO)
    [item] = await api.items(conversation)
    path = f"/v1/conversations/{conversation}"
    lease = await api.store.acquire("ann", conversation, "a run", 60)
    assert lease is not None
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    for method, where, json in (
        ("POST", f"{path}/items", {"items": [HELLO]}),
        ("POST", f"{path}/items", {"items": [call, output]}),
        ("DELETE", f"{path}/items/{item['id']}", None),
        ("DELETE", path, None),
    ):
        error_message(await api.ask(method, where, json), 409, "conversation")
    assert await api.items(conversation) == [item]
    assert (await api.ask("POST", path, {"metadata": {"a": "b"}})).status == 200
    await api.store.release(lease)
    assert (await api.ask("POST", f"{path}/items", {"items": [call, output]})).status == 200
    assert (await api.ask("DELETE", path)).status == 200


@pytest.mark.parametrize(
    ("method", "suffix", "json"), [*ROUTES.values(), ("GET", "/items/msg_1", None)], ids=[*ROUTES, "an item"]
)
async def test_a_closed_store_is_reported_as_unavailable(
    api: ConversationsApi, method: str, suffix: str, json: Any
) -> None:
    await api.store.aclose()
    response = await api.ask(method, f"/v1/conversations/conv_1{suffix}", json)
    assert error_message(response, 503).startswith("the store is not open")
    assert response.headers["retry-after"] == "1"
    assert (await api.ask("POST", "/v1/conversations", {"items": [HELLO]})).status == 503
