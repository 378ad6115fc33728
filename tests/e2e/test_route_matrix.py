"""Every route of the gateway, as it lists them itself, against every kind of key: none, wrong, revoked, expired, for
another model, another tenant's. What is somebody else's answers as what was never there, to the byte."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.e2e.gateway import Gateway, config_of
from tests.e2e.keyed import MASTER, Place, Ring, bearing, keyed, places_of, raw_answer, with_keys
from tests.fakes import FakeVllm
from unisono.access.key_format import Mint
from unisono.app import build
from unisono.config import parse
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"


def config() -> dict[str, Any]:
    """Two models: `gpt-oss`, also known as `gpt-4o`, and another one."""
    served = config_of("vllm@http://127.0.0.1:9")
    served["model_list"] += config_of("vllm@http://127.0.0.1:9", name="gpt-oss-other")["model_list"]
    settings = {"router_settings": {"model_group_alias": {"gpt-4o": "gpt-oss"}}, "unisono": {"raw_completions": True}}
    return {**served, **settings}


PLACES = tuple(places_of(build(parse(with_keys(config(), "memory://"), {}).config).routes))
OPEN = frozenset({"/health/liveliness", "/health/liveness", "/health/readiness", "/"})
"""`/` is the page, which says nothing of its own, and its files beside it."""
CLOSED = [place for place in PLACES if place.path not in OPEN]
WITH_IDS = [place for place in CLOSED if place.parameters and place.parameters != ("model",)]

NAMES_MODEL = re.compile(
    r".*/(completions|responses|responses/compact|responses/input_tokens|messages|messages/count_tokens)"
)
BODIES: dict[str, Any] = {
    "chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi"},
    "compact": {"input": "Hi"},
    "input_tokens": {"input": "Hi"},
    "count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
}
ASKS_A_MODEL = [place for place in CLOSED if place.method == "POST" and NAMES_MODEL.fullmatch(place.path)]
MISSING = "0" * 32
"""What stands behind the prefix of an id that nobody has."""


def test_the_routes_are_known_and_each_alias_is_among_them() -> None:
    assert len(PLACES) > 50
    assert {place.path for place in PLACES} >= OPEN
    for place in PLACES:
        if place.path.startswith("/v1/"):
            assert Place(place.method, place.path.removeprefix("/v1")) in PLACES, place
    assert sum(place.method == "WEBSOCKET" for place in PLACES) == 4
    assert len(ASKS_A_MODEL) == 20
    assert len(WITH_IDS) > 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keyed")


@pytest.fixture
async def site(folder: Path) -> AsyncIterator[tuple[Gateway, Ring]]:
    async with FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake:
        served = config()
        for entry in served["model_list"]:
            entry["litellm_params"]["api_base"] = fake.url
        async with keyed(served, folder) as running:
            yield running


def filled(place: Place) -> str:
    return place.at(**{name: f"{name[:4]}_{MISSING}" for name in place.parameters})


async def asked(
    running: Gateway, place: Place, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body; of a socket those that its handshake was refused with, 101 when it was not."""
    if place.method == "WEBSOCKET":
        try:
            async with connect(running.url.replace("http", "ws", 1) + path, additional_headers=headers):
                return 101, {}, b""
        except InvalidStatus as refused:
            answer = refused.response
            return (
                answer.status_code,
                {name.lower(): value for name, value in answer.headers.items()},
                bytes(answer.body or b""),
            )
    sent = {**headers, "content-type": "application/json"} if place.method == "POST" else headers
    data = json.dumps({} if body is None else body).encode() if place.method == "POST" else None
    async with running.session.request(place.method, running.url + path, data=data, headers=sent) as answered:
        return (
            answered.status,
            {name.lower(): value for name, value in answered.headers.items()},
            await answered.read(),
        )


def means(body: bytes, place: Place, code: str, kind: str) -> bool:
    """Whether a refusal is of that code or, where Anthropic's API is spoken, of that type."""
    told = json.loads(body)
    assert ("type" in told) is ("/messages" in place.path)
    return bool((told["error"]["type"] == kind) if "/messages" in place.path else (told["error"]["code"] == code))


# -- keys that are none


async def bad_keys(ring: Ring) -> dict[str, str]:
    gone, gone_key = await ring.issue()
    await ring.revoke(gone)
    _, expired = await ring.issue(expires_at=time.time() - 1)
    _, good = await ring.issue()
    return {
        "wrong": MASTER[:-1],
        "empty virtual": "sk-uni-",
        "of another gateway": Mint(b"another salt").new(),
        "made up": "sk-uni-" + "A" * 56,
        "a letter off": good[:-1] + ("A" if good[-1] != "A" else "B"),
        "never kept": ring.mint.new(),
        "revoked": gone_key,
        "expired": expired,
        "a public id": gone.id,
    }


async def test_no_route_but_health_and_the_page_answers_without_a_good_key(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    keys = await bad_keys(ring)
    for place in CLOSED:
        path, told = filled(place), set()
        status, headers, body = await asked(running, place, path)
        assert (status, headers.get("www-authenticate")) == (401, "Bearer"), place
        assert place.method == "HEAD" or means(body, place, "invalid_api_key", "authentication_error")
        for name, key in keys.items():
            status, headers, body = await asked(running, place, path, **bearing(key))
            assert status == 401, (place, name)
            told.add(body.replace(headers["x-request-id"].encode(), b""))
        # Which of them it was is nobody's business.
        assert len(told) == 1, place
    for path in (*OPEN, "/page/app.js", "/page/page.css"):
        async with running.session.get(running.url + path) as answer:
            assert answer.status in (200, 503), path


async def test_every_route_answers_a_good_key(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    _, good = await ring.issue("team", raw=True)
    for key in (good, MASTER):
        for place in CLOSED:
            status, _, body = await asked(running, place, filled(place), **bearing(key))
            assert status not in (401, 403), (place, body)


# The path decides, and it alone: neither Host nor a spelling that something else would take for an open one.
TARGETS = {
    "a host with a path": ("/v1/models", "127.0.0.1/health/liveliness?y="),
    "a host with a fragment": ("/v1/models", "127.0.0.1#/health/liveliness"),
    "two slashes": ("//v1/models", "127.0.0.1"),
    "two slashes and health": ("//health/liveliness", "127.0.0.1"),
    "up from health": ("/health/liveliness/../../v1/models", "127.0.0.1"),
    "up from health, encoded": ("/health/liveliness/%2e%2e/%2e%2e/v1/models", "127.0.0.1"),
    "encoded letters": ("/%76%31/models", "127.0.0.1"),
    "an encoded slash": ("/v1%2fmodels", "127.0.0.1"),
    "encoded twice": ("/health%252fliveliness", "127.0.0.1"),
    "health behind a semicolon": ("/v1/models;/health/liveliness", "127.0.0.1"),
    "health in the query": ("/v1/models?/health/liveliness", "127.0.0.1"),
    "a slash behind health": ("/health/liveliness/", "127.0.0.1"),
    "health in capitals": ("/HEALTH/liveliness", "127.0.0.1"),
    "an absolute target": ("http://127.0.0.1/v1/models", "127.0.0.1"),
    "an absolute target of health's name": ("http://health/v1/models", "health"),
}


@pytest.mark.parametrize(("target", "host"), TARGETS.values(), ids=TARGETS)
async def test_no_spelling_of_a_path_or_host_opens_the_door(site: tuple[Gateway, Ring], target: str, host: str) -> None:
    running, _ = site
    lines = (
        f"GET {target} HTTP/1.1",
        f"Host: {host}",
        "X-Forwarded-Host: health/liveliness",
        "X-Forwarded-Prefix: /health/liveliness",
        "X-Original-URL: /health/liveliness",
        "X-Rewrite-URL: /health/liveliness",
        "Connection: close",
        "",
        "",
    )
    answer = await raw_answer(running.url, "\r\n".join(lines).encode())
    assert answer.split()[1] in (b"401", b"400"), answer
    assert b"gpt-oss" not in answer


# -- models


def body_for(place: Place, model: str) -> Any:
    return {"model": model, **next(body for kind, body in BODIES.items() if place.path.endswith(f"/{kind}"))}


async def test_a_key_asks_only_the_models_it_may(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    _, other = await ring.issue(models=frozenset({"gpt-oss-other"}), raw=True)
    _, by_alias = await ring.issue(models=frozenset({"gpt-4o"}), raw=True)
    _, by_group = await ring.issue(models=frozenset({"gpt-oss"}), raw=True)
    table = (
        (other, {"gpt-oss-other": 200, "gpt-oss": 403, "gpt-4o": 403, "gpt-none": 403}),
        (by_alias, {"gpt-4o": 200, "gpt-oss": 403, "gpt-oss-other": 403}),
        (by_group, {"gpt-4o": 200, "gpt-oss": 200, "gpt-oss-other": 403}),
        (MASTER, {"gpt-4o": 200, "gpt-oss-other": 200, "gpt-none": 404}),
    )
    for place in ASKS_A_MODEL:
        for key, models in table:
            refusals = set()
            for model, expected in models.items():
                status, headers, body = await asked(running, place, place.path, body_for(place, model), **bearing(key))
                assert status == expected, (place, model, body)
                if status == 403:
                    assert means(body, place, "model_not_allowed", "permission_error")
                    body = body.replace(headers["x-request-id"].encode(), b"")
                    refusals.add(body.replace(f"`{model}`".encode(), b""))
            # Whether there is such a model at all is not told.
            assert len(refusals) <= 1


async def test_a_key_without_the_permission_sends_no_raw_prompts(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    _, key = await ring.issue()
    for path in ("/v1/completions", "/completions"):
        # Before anything of the request is looked at.
        for body in ({"model": "gpt-oss", "prompt": "Hi"}, {"model": "gpt-none"}, {}):
            status, _, told = await asked(running, Place("POST", path), path, body, **bearing(key))
            assert (status, json.loads(told)["error"]["code"]) == (403, "permission_denied")
            assert b"unisono keys create --raw" in told


async def test_a_key_sees_only_the_models_it_may(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    _, key = await ring.issue(models=frozenset({"gpt-4o"}), raw=True)
    for prefix in ("/v1", ""):
        listed = (await running.get(f"{prefix}/models", **bearing(key))).body["data"]
        assert [model["id"] for model in listed] == ["gpt-4o"]
        info = (await running.get(f"{prefix}/model/info", **bearing(key))).body["data"]
        assert [model["model_name"] for model in info] == ["gpt-4o"]
        assert (await running.get(f"{prefix}/models/gpt-4o", **bearing(key))).status == 200
        forbidden = await running.get(f"{prefix}/models/gpt-oss", **bearing(key))
        missing = await running.get(f"{prefix}/models/gpt-two", **bearing(key))
        assert forbidden.status == missing.status == 404
        assert forbidden.raw == missing.raw.replace(b"gpt-two", b"gpt-oss")


# -- ids


ID = re.compile(r"[a-z]{2,12}_[0-9A-Za-z-]{20,}")


def ids_in(told: Any) -> Iterator[str]:
    """Every id in what was told, wherever it stands."""
    if isinstance(told, dict):
        for value in told.values():
            yield from ids_in(value)
    elif isinstance(told, list):
        for value in told:
            yield from ids_in(value)
    elif isinstance(told, str) and ID.fullmatch(told):
        yield told


async def stored_by(running: Gateway, key: str) -> tuple[set[str], str, str]:
    """Ids of all that a caller has made and was told of, in every event of every way to be told; and a conversation
    and an item in it."""

    async def post(path: str, **fields: Any) -> Any:
        return await running.post(path, json.dumps(fields).encode(), **bearing(key))

    told: list[Any] = []
    conversation = (await post("/v1/conversations", items=[{"role": "user", "content": "Hi"}])).body
    items = (await running.get(f"/v1/conversations/{conversation['id']}/items", **bearing(key))).body
    told += [conversation, items]
    common = {"model": "gpt-oss", "input": "Hi"}
    for more in ({}, {"background": True}, {"conversation": conversation["id"]}):
        streamed = await post("/v1/responses", **common, stream=True, **more)
        assert streamed.status == 200, streamed.raw
        assert streamed.events
        told += streamed.events
    whole = await post("/v1/responses", **common)
    told += [whole.body, dict(whole.headers)]
    chat = await post("/v1/chat/completions", model="gpt-oss", messages=[{"role": "user", "content": "Hi"}])
    told += [chat.body, dict(chat.headers)]
    async with connect(
        running.url.replace("http", "ws", 1) + "/v1/responses", additional_headers=bearing(key)
    ) as socket:
        await socket.send(json.dumps({"type": "response.create", **common}))
        while told[-1].get("type") != "response.completed":
            told.append(json.loads(await socket.recv()))
    found = set(ids_in(told))
    assert {name.partition("_")[0] for name in found} >= {"resp", "conv", "msg", "rs", "req"}
    return found, conversation["id"], items["data"][0]["id"]


def missing_as(id: str) -> str:
    """An id of the same form that nobody has."""
    kind, _, rest = id.partition("_")
    return f"{kind}_{'0' * len(rest)}"


def comparable(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in ("x-request-id", "date")}


async def test_what_is_another_tenants_answers_as_what_was_never_there(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    _, ann = await ring.issue("ann's")
    _, bob = await ring.issue("bob's")
    found, conversation, item = await stored_by(running, ann)
    for place in WITH_IDS:
        for id in sorted(found):
            first, *others = place.parameters
            told = {first: id, **dict.fromkeys(others, item)}
            never = {first: missing_as(id), **dict.fromkeys(others, missing_as(item))}
            theirs = await asked(running, place, place.at(**told), **bearing(bob))
            nobodys = await asked(running, place, place.at(**never), **bearing(bob))
            said = (
                theirs[2].replace(id.encode(), never[first].encode()).replace(item.encode(), missing_as(item).encode())
            )
            assert theirs[0] == nobodys[0], (place, id)
            assert theirs[0] in (400, 404), (place, id, theirs)
            assert said == nobodys[2], (place, id)
            assert comparable(theirs[1]) == comparable(nobodys[1]), (place, id)
    # All of it is there still, for whom it belongs to.
    for id in found:
        if id.startswith("resp_"):
            assert (await running.get(f"/v1/responses/{id}", **bearing(ann))).status == 200
    assert (await running.get(f"/v1/conversations/{conversation}/items/{item}", **bearing(ann))).status == 200


LEANING: dict[str, Any] = {
    "previous_response_id": lambda id: {"input": "Hi", "previous_response_id": id},
    "conversation": lambda id: {"input": "Hi", "conversation": id},
    "an item": lambda id: {"input": [{"type": "item_reference", "id": id}]},
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("leaning", LEANING.values(), ids=LEANING)
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True}], ids=["whole", "stream", "background"])
async def test_nothing_is_continued_that_is_another_tenants(
    site: tuple[Gateway, Ring], leaning: Any, more: dict[str, Any]
) -> None:
    running, ring = site
    _, ann = await ring.issue("ann's")
    _, bob = await ring.issue("bob's")
    found, _, _ = await stored_by(running, ann)
    for id in sorted(found):
        answers = []
        for named in (id, missing_as(id)):
            body = {"model": "gpt-oss", **leaning(named), **more}
            answer = await running.post("/v1/responses", json.dumps(body).encode(), **bearing(bob))
            assert answer.status in (400, 404), (id, answer.raw)
            answers.append(answer.raw.replace(named.encode(), b"ID"))
        assert answers[0] == answers[1], id


async def test_keys_of_one_tenant_share_what_they_store(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    _, one = await ring.issue("team")
    _, two = await ring.issue("team")
    made = await running.post("/v1/responses", b'{"model": "gpt-oss", "input": "Hi"}', **bearing(one))
    assert (await running.get(f"/v1/responses/{made.body['id']}", **bearing(two))).body == made.body
    assert (await running.get(f"/v1/responses/{made.body['id']}", **bearing(MASTER))).status == 404


async def test_an_idempotency_key_is_the_tenants_own(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    made = []
    for tenant in ("ann's", "bob's"):
        _, key = await ring.issue(tenant)
        headers = {**bearing(key), "idempotency_key": "the same"}
        made.append(await running.post("/v1/responses", b'{"model": "gpt-oss", "input": "Hi"}', **headers))
    assert [answer.status for answer in made] == [200, 200]
    assert made[0].body["id"] != made[1].body["id"]
