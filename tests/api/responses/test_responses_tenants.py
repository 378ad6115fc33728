"""Tenant isolation: objects of other tenants get the same error as missing objects."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.api.asgi import Exchange
from tests.api.responses.mounted import Mounted, mounted
from tests.e2e.gateway import config_of
from tests.fakes import FakeVllm
from unisono.harmony.encoding import load_encoding

ANSWER = load_encoding().encode_marked(
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>ok<|return|>"
)
Ids = dict[str, str]
Request = tuple[str, str, Any, dict[str, Any]]


@pytest.fixture
async def gateway() -> AsyncIterator[Mounted]:
    async with FakeVllm(tokens=ANSWER) as fake, mounted(config_of(f"vllm@{fake.url}")) as running:
        yield running


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "gpt-oss", "input": "Hi", **fields}


def reference(ids: Ids) -> dict[str, Any]:
    return body(input=[{"type": "item_reference", "id": ids["item"]}])


def plain(method: str, path: str, **query: Any) -> Callable[[Ids], Request]:
    return lambda ids: (method, path.format(**ids), None, query)


def posting(path: str, make: Callable[[Ids], dict[str, Any]]) -> Callable[[Ids], Request]:
    return lambda ids: ("POST", path.format(**ids), make(ids), {})


RESPONSE_PATH = "/responses/{response}"
CONVERSATION_PATH = "/conversations/{conversation}"
ITEMS = {"items": [{"role": "user", "content": "u"}]}
ROUTES: dict[str, Callable[[Ids], Request]] = {
    "fetch": plain("GET", RESPONSE_PATH),
    "fetch its events": plain("GET", RESPONSE_PATH, stream="true"),
    "fetch later events": plain("GET", RESPONSE_PATH, stream="true", starting_after=1),
    "list its input": plain("GET", f"{RESPONSE_PATH}/input_items"),
    "cancel": plain("POST", f"{RESPONSE_PATH}/cancel"),
    "delete": plain("DELETE", RESPONSE_PATH),
    "continue": posting("/responses", lambda ids: body(previous_response_id=ids["response"])),
    "continue, streaming": posting("/responses", lambda ids: body(previous_response_id=ids["response"], stream=True)),
    "continue, in the background": posting(
        "/responses", lambda ids: body(previous_response_id=ids["response"], background=True)
    ),
    "continue, not stored": posting("/responses", lambda ids: body(previous_response_id=ids["response"], store=False)),
    "refer to an item": posting("/responses", reference),
    "refer to an item, not stored": posting("/responses", lambda ids: {**reference(ids), "store": False}),
    "refer to an item, in the background": posting("/responses", lambda ids: {**reference(ids), "background": True}),
    "respond in a conversation": posting("/responses", lambda ids: body(conversation=ids["conversation"])),
    "respond in a conversation, streaming": posting(
        "/responses", lambda ids: body(conversation=ids["conversation"], stream=True)
    ),
    "respond in a conversation, in the background": posting(
        "/responses", lambda ids: body(conversation=ids["conversation"], background=True)
    ),
    "count tokens of a continuation": posting(
        "/responses/input_tokens", lambda ids: body(previous_response_id=ids["response"])
    ),
    "count tokens of a conversation": posting(
        "/responses/input_tokens", lambda ids: body(conversation=ids["conversation"])
    ),
    "count tokens of a reference": posting("/responses/input_tokens", reference),
    "fetch the conversation": plain("GET", CONVERSATION_PATH),
    "change the metadata of the conversation": posting(CONVERSATION_PATH, lambda ids: {"metadata": {"a": "b"}}),
    "list the conversation": plain("GET", f"{CONVERSATION_PATH}/items"),
    "add to the conversation": posting(f"{CONVERSATION_PATH}/items", lambda ids: ITEMS),
    "fetch an item of the conversation": plain("GET", f"{CONVERSATION_PATH}/items/{{member}}"),
    "delete an item": plain("DELETE", f"{CONVERSATION_PATH}/items/{{member}}"),
    "delete the conversation": plain("DELETE", CONVERSATION_PATH),
    "create a conversation with a reference": posting(
        "/conversations", lambda ids: {"items": [{"type": "item_reference", "id": ids["item"]}]}
    ),
}
PREFIXES = ("/v1", "", "/open-responses/v1", "/open-responses")

UNUSED_ID = "0123456789abcdef" * 2
MISSING_IDS: dict[str, Ids] = {
    "missing": {kind: kind[:4] + "_" + UNUSED_ID for kind in ("response", "conversation", "item", "member")},
    "malformed": dict.fromkeys(("response", "conversation", "item", "member"), "resp_{*}'\"\u00e9"),
    "of another type": {
        "response": "conv_" + UNUSED_ID,
        "conversation": "resp_" + UNUSED_ID,
        "item": "resp_" + UNUSED_ID,
        "member": "resp_" + UNUSED_ID,
    },
    "very long": dict.fromkeys(("response", "conversation", "item", "member"), "resp_" + "f" * 3000),
}


async def create_objects(gateway: Mounted) -> Ids:
    """Create objects of ann: a response with an event log and items, a conversation with an item."""
    reply = await gateway.ask("POST", "/v1/responses", body(background=True, stream=True))
    response = answer_events(reply)[-1]["response"]
    conversation = await gateway.ask("POST", "/v1/conversations", ITEMS)
    members = await gateway.ask("GET", f"/v1/conversations/{conversation.json()['id']}/items")
    return {
        "response": response["id"],
        "item": response["output"][-1]["id"],
        "conversation": conversation.json()["id"],
        "member": members.json()["data"][0]["id"],
    }


def answer_events(reply: Exchange) -> list[Any]:
    frames = reply.body.decode().split("\n\n")
    data = [frame.partition("\ndata: ")[2] for frame in frames if frame.startswith("event: ")]
    return [json.loads(line) for line in data]


def without_ids(reply: Exchange, ids: Ids) -> Any:
    """Return status, content type and body of a reply, with the ids replaced."""
    text = reply.body.decode()
    for name in ids.values():
        text = text.replace(name[:128].replace('"', '\\"'), "ID")
    return reply.status, reply.headers.get("content-type"), text


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
async def test_foreign_and_missing_objects_get_the_same_error(
    gateway: Mounted, route: Callable[[Ids], Request]
) -> None:
    ids = await create_objects(gateway)
    before = await visible_state(gateway, ids)
    for prefix in PREFIXES if "/responses" in route(ids)[1] else PREFIXES[:2]:

        async def ask(target_ids: Ids, as_: str, prefix: str = prefix) -> Exchange:
            method, path, sent, query = route(target_ids)
            return await gateway.ask(method, prefix + path, sent, as_=as_, **query)

        foreign = await ask(ids, "bob")
        assert foreign.status == 404, foreign.body
        assert set(foreign.json()["error"]) == {"message", "type", "param", "code"}
        for name, missing in MISSING_IDS.items():
            assert without_ids(await ask(missing, "bob"), missing) == without_ids(foreign, ids), name
            assert without_ids(await ask(missing, "ann"), missing) == without_ids(foreign, ids), name
    assert await visible_state(gateway, ids) == before
    # The ids are valid: their owner gets a response.
    method, path, sent, query = route(ids)
    assert (await gateway.ask(method, "/v1" + path, sent, **query)).status == 200


async def visible_state(gateway: Mounted, ids: Ids) -> Any:
    """Return everything that ann can see of her objects."""
    paths = (
        f"/v1/responses/{ids['response']}",
        f"/v1/responses/{ids['response']}/input_items",
        f"/v1/conversations/{ids['conversation']}",
        f"/v1/conversations/{ids['conversation']}/items",
    )
    return [(await gateway.ask("GET", path)).body for path in paths]


async def test_reasoning_sealed_for_another_tenant_is_skipped_with_a_note(gateway: Mounted) -> None:
    include = ["reasoning.encrypted_content"]
    reasoning, _ = (await gateway.respond(include=include, store=False))["output"]
    next_input = [{"role": "user", "content": "Hi"}, {**reasoning, "content": []}]
    for tenant, notes in (("ann", 0), ("bob", 1)):
        response = await gateway.respond(as_=tenant, input=next_input, store=False)
        assert len(response["unisono"].get("notes", ())) == notes


async def test_idempotency_keys_of_two_tenants_are_independent(gateway: Mounted) -> None:
    response_ids: dict[str, str] = {}
    for tenant in ("ann", "bob", "ann", "bob"):
        reply = await gateway.ask("POST", "/v1/responses", body(), as_=tenant, headers={"idempotency-key": "k"})
        assert reply.status == 200
        assert response_ids.setdefault(tenant, reply.json()["id"]) == reply.json()["id"]
    assert response_ids["ann"] != response_ids["bob"]
