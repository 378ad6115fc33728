"""What belongs to another tenant is what is not there: the same answer, on every route and in every field."""

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
async def desk() -> AsyncIterator[Mounted]:
    async with FakeVllm(tokens=ANSWER) as fake, mounted(config_of(f"vllm@{fake.url}")) as here:
        yield here


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "gpt-oss", "input": "Hi", **fields}


def reference(ids: Ids) -> dict[str, Any]:
    return body(input=[{"type": "item_reference", "id": ids["item"]}])


def plain(method: str, path: str, **query: Any) -> Callable[[Ids], Request]:
    return lambda ids: (method, path.format(**ids), None, query)


def posting(path: str, make: Callable[[Ids], dict[str, Any]]) -> Callable[[Ids], Request]:
    return lambda ids: ("POST", path.format(**ids), make(ids), {})


ONE = "/responses/{response}"
TALK = "/conversations/{conversation}"
ITEMS = {"items": [{"role": "user", "content": "u"}]}
ROUTES: dict[str, Callable[[Ids], Request]] = {
    "fetch": plain("GET", ONE),
    "fetch its events": plain("GET", ONE, stream="true"),
    "fetch later events": plain("GET", ONE, stream="true", starting_after=1),
    "list its input": plain("GET", f"{ONE}/input_items"),
    "cancel": plain("POST", f"{ONE}/cancel"),
    "delete": plain("DELETE", ONE),
    "continue": posting("/responses", lambda ids: body(previous_response_id=ids["response"])),
    "continue, streaming": posting("/responses", lambda ids: body(previous_response_id=ids["response"], stream=True)),
    "continue, in the background": posting(
        "/responses", lambda ids: body(previous_response_id=ids["response"], background=True)
    ),
    "continue, not kept": posting("/responses", lambda ids: body(previous_response_id=ids["response"], store=False)),
    "refer to an item": posting("/responses", reference),
    "refer to an item, not kept": posting("/responses", lambda ids: {**reference(ids), "store": False}),
    "refer to an item, in the background": posting("/responses", lambda ids: {**reference(ids), "background": True}),
    "respond in": posting("/responses", lambda ids: body(conversation=ids["conversation"])),
    "respond in, streaming": posting("/responses", lambda ids: body(conversation=ids["conversation"], stream=True)),
    "respond in, in the background": posting(
        "/responses", lambda ids: body(conversation=ids["conversation"], background=True)
    ),
    "count what continues": posting("/responses/input_tokens", lambda ids: body(previous_response_id=ids["response"])),
    "count what is in": posting("/responses/input_tokens", lambda ids: body(conversation=ids["conversation"])),
    "count a reference": posting("/responses/input_tokens", reference),
    "conversation": plain("GET", TALK),
    "label the conversation": posting(TALK, lambda ids: {"metadata": {"a": "b"}}),
    "list the conversation": plain("GET", f"{TALK}/items"),
    "add to the conversation": posting(f"{TALK}/items", lambda ids: ITEMS),
    "an item of the conversation": plain("GET", f"{TALK}/items/{{member}}"),
    "delete an item": plain("DELETE", f"{TALK}/items/{{member}}"),
    "delete the conversation": plain("DELETE", TALK),
    "begin with a reference": posting(
        "/conversations", lambda ids: {"items": [{"type": "item_reference", "id": ids["item"]}]}
    ),
}
PREFIXES = ("/v1", "", "/open-responses/v1", "/open-responses")

NOWHERE = "0123456789abcdef" * 2
ABSENT: dict[str, Ids] = {
    "missing": {kind: kind[:4] + "_" + NOWHERE for kind in ("response", "conversation", "item", "member")},
    "malformed": dict.fromkeys(("response", "conversation", "item", "member"), "resp_{*}'\"\u00e9"),
    "of another kind": {
        "response": "conv_" + NOWHERE,
        "conversation": "resp_" + NOWHERE,
        "item": "resp_" + NOWHERE,
        "member": "resp_" + NOWHERE,
    },
    "very long": dict.fromkeys(("response", "conversation", "item", "member"), "resp_" + "f" * 3000),
}


async def owned(desk: Mounted) -> Ids:
    """What ann has: a response with a log, an item of it, and a conversation with an item."""
    answer = await desk.ask("POST", "/v1/responses", body(background=True, stream=True))
    response = answer_events(answer)[-1]["response"]
    made = await desk.ask("POST", "/v1/conversations", ITEMS)
    members = await desk.ask("GET", f"/v1/conversations/{made.json()['id']}/items")
    return {
        "response": response["id"],
        "item": response["output"][-1]["id"],
        "conversation": made.json()["id"],
        "member": members.json()["data"][0]["id"],
    }


def answer_events(answer: Exchange) -> list[Any]:
    frames = answer.body.decode().split("\n\n")
    data = [frame.partition("\ndata: ")[2] for frame in frames if frame.startswith("event: ")]
    return [json.loads(each) for each in data]


def unnamed(answer: Exchange, ids: Ids) -> Any:
    """An answer without the id it is about."""
    text = answer.body.decode()
    for name in ids.values():
        text = text.replace(name[:128].replace('"', '\\"'), "ID")
    return answer.status, answer.headers.get("content-type"), text


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
async def test_the_foreign_and_the_missing_have_one_answer(desk: Mounted, route: Callable[[Ids], Request]) -> None:
    ids = await owned(desk)
    before = await state(desk, ids)
    for prefix in PREFIXES if "/responses" in route(ids)[1] else PREFIXES[:2]:

        async def ask(who: Ids, as_: str, prefix: str = prefix) -> Exchange:
            method, path, sent, query = route(who)
            return await desk.ask(method, prefix + path, sent, as_=as_, **query)

        foreign = await ask(ids, "bob")
        assert foreign.status == 404, foreign.body
        assert set(foreign.json()["error"]) == {"message", "type", "param", "code"}
        for name, absent in ABSENT.items():
            assert unnamed(await ask(absent, "bob"), absent) == unnamed(foreign, ids), name
            assert unnamed(await ask(absent, "ann"), absent) == unnamed(foreign, ids), name
    assert await state(desk, ids) == before
    # The ids are right: their owner is served.
    method, path, sent, query = route(ids)
    assert (await desk.ask(method, "/v1" + path, sent, **query)).status == 200


async def state(desk: Mounted, ids: Ids) -> Any:
    """All that ann can see of her own."""
    paths = (
        f"/v1/responses/{ids['response']}",
        f"/v1/responses/{ids['response']}/input_items",
        f"/v1/conversations/{ids['conversation']}",
        f"/v1/conversations/{ids['conversation']}/items",
    )
    return [(await desk.ask("GET", path)).body for path in paths]


async def test_a_seal_of_another_tenant_is_what_another_server_sealed(desk: Mounted) -> None:
    include = ["reasoning.encrypted_content"]
    thought, _ = (await desk.respond(include=include, store=False))["output"]
    given = [{"role": "user", "content": "Hi"}, {**thought, "content": []}]
    for who, notes in (("ann", 0), ("bob", 1)):
        response = await desk.respond(as_=who, input=given, store=False)
        assert len(response["unisono"].get("notes", ())) == notes


async def test_keys_of_two_tenants_have_nothing_to_do_with_each_other(desk: Mounted) -> None:
    made: dict[str, str] = {}
    for who in ("ann", "bob", "ann", "bob"):
        answer = await desk.ask("POST", "/v1/responses", body(), as_=who, headers={"idempotency-key": "k"})
        assert answer.status == 200
        assert made.setdefault(who, answer.json()["id"]) == answer.json()["id"]
    assert made["ann"] != made["bob"]
