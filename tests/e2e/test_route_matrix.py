"""Every listed route of the gateway with every kind of key.

Keys are missing, wrong, revoked, expired, or allowed for another model or tenant. A foreign object and an unknown
object get the same response, byte for byte.
"""

from __future__ import annotations

import itertools
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
from tests.e2e.keyed import MASTER, Place, Ring, bearing, keyed, places_of, raw_answer
from tests.fakes import FakeVllm
from unisono.access.keys import Mint
from unisono.api.admin.roles import PERMISSIONS
from unisono.bootstrap import fastapi_routes
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"


def config() -> dict[str, Any]:
    """Configure two models: `gpt-oss`, with the alias `gpt-4o`, and another one."""
    config_ = config_of("vllm@http://127.0.0.1:9")
    config_["model_list"] += config_of("vllm@http://127.0.0.1:9", name="gpt-oss-other")["model_list"]
    # The tests send many invalid keys.
    gateway_settings = {"raw_completions": True, "failed_authentication": {"max_per_minute": 0}}
    settings = {"router_settings": {"model_group_alias": {"gpt-4o": "gpt-oss"}}, "unisono": gateway_settings}
    return {**config_, **settings}


ROUTES = tuple(places_of(fastapi_routes.ROUTES))
# `/` is the page, which contains no data; its files are open as well.
OPEN_PATHS = frozenset({"/health/liveliness", "/health/liveness", "/health/readiness", "/ping", "/", "/docs"})
CLOSED_ROUTES = [place for place in ROUTES if place.path not in OPEN_PATHS]
# The permissions of admin routes follow from roles: tests/e2e/test_admin_roles.py.
ROUTES_WITH_IDS = [
    place
    for place in CLOSED_ROUTES
    if place.parameters and place.parameters != ("model",) and place.path not in PERMISSIONS
]


def is_variant(place: Place) -> bool:
    """Return whether another listed route has the same handler, with another method or prefix."""
    with_prefix = Place(place.method, f"/v1{place.path}")
    return place.method == "HEAD" or place.path.startswith("/open-responses/") or with_prefix in ROUTES


MODEL_PATHS = re.compile(
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
MODEL_ROUTES = [place for place in CLOSED_ROUTES if place.method == "POST" and MODEL_PATHS.fullmatch(place.path)]
# Follows the prefix of an id that does not exist.
UNKNOWN_ID = "0" * 32


def test_all_routes_and_their_aliases_are_listed() -> None:
    assert len(ROUTES) > 50
    assert {place.path for place in ROUTES} >= OPEN_PATHS
    for place in ROUTES:
        if place.path.startswith("/v1/"):
            assert Place(place.method, place.path.removeprefix("/v1")) in ROUTES, place
    assert sum(place.method == "WEBSOCKET" for place in ROUTES) == 4
    assert len(MODEL_ROUTES) == 20
    assert len(ROUTES_WITH_IDS) > 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keyed")


@pytest.fixture
async def site(folder: Path) -> AsyncIterator[tuple[Gateway, Ring]]:
    async with FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake:
        config_ = config()
        for entry in config_["model_list"]:
            entry["litellm_params"]["api_base"] = fake.url
        async with keyed(config_, folder) as running:
            yield running


def filled_path(place: Place) -> str:
    return place.at(**{name: f"{name[:4]}_{UNKNOWN_ID}" for name in place.parameters})


async def send(
    running: Gateway, place: Place, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body; for a WebSocket those of the rejection, or 101."""
    if place.method == "WEBSOCKET":
        try:
            async with connect(running.url.replace("http", "ws", 1) + path, additional_headers=headers):
                return 101, {}, b""
        except InvalidStatus as rejected:
            response = rejected.response
            return (
                response.status_code,
                {name.lower(): value for name, value in response.headers.items()},
                bytes(response.body or b""),
            )
    all_headers = {**headers, "content-type": "application/json"} if place.method == "POST" else headers
    data = json.dumps({} if body is None else body).encode() if place.method == "POST" else None
    async with running.session.request(place.method, running.url + path, data=data, headers=all_headers) as reply:
        return (
            reply.status,
            {name.lower(): value for name, value in reply.headers.items()},
            await reply.read(),
        )


def is_refusal(body: bytes, place: Place, code: str, error_type: str) -> bool:
    """Whether a body is an error with this code, or with this type in Anthropic's format."""
    error_body = json.loads(body)
    assert ("type" in error_body) is ("/messages" in place.path)
    return bool(
        (error_body["error"]["type"] == error_type)
        if "/messages" in place.path
        else (error_body["error"]["code"] == code)
    )


# Invalid keys


async def bad_keys(ring: Ring) -> dict[str, str]:
    revoked, revoked_key = await ring.issue()
    await ring.revoke(revoked)
    _, expired = await ring.issue(expires_at=time.time() - 1)
    _, good = await ring.issue()
    _, blocked = await ring.issue(is_blocked=True)
    owners = {}
    for kind in (EntryKind.TEAM, EntryKind.USER):
        entry = DirectoryEntry(kind, f"blocked {kind} {time.time()}", 1.0, is_blocked=True)
        await ring.store.put_entry(entry)
        owner = {"tenant": entry.id} if kind is EntryKind.TEAM else {"user": entry.id}
        owners[f"of a blocked {kind}"] = (await ring.issue(**owner))[1]
    return {
        "wrong": MASTER[:-1],
        "empty virtual": "sk-uni-",
        "of another gateway": Mint(b"another salt").new(),
        "well-formed": "sk-uni-" + "A" * 56,
        "one letter changed": good[:-1] + ("A" if good[-1] != "A" else "B"),
        "never stored": ring.mint.new(),
        "revoked": revoked_key,
        "expired": expired,
        "key id": revoked.id,
        "blocked": blocked,
        **owners,
    }


async def test_only_health_and_page_routes_answer_without_a_valid_key(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    keys = await bad_keys(ring)
    # Every handler gets all keys once. Each variant of its route gets three of them in turn.
    turns = itertools.cycle(keys.items())
    for place in CLOSED_ROUTES:
        path, bodies = filled_path(place), set()
        status, headers, body = await send(running, place, path)
        assert (status, headers.get("www-authenticate")) == (401, "Bearer"), place
        assert place.method == "HEAD" or is_refusal(body, place, "invalid_api_key", "authentication_error")
        for name, key in itertools.islice(turns, 3) if is_variant(place) else keys.items():
            status, headers, body = await send(running, place, path, **bearing(key))
            assert status == 401, (place, name)
            bodies.add(body.replace(headers["x-request-id"].encode(), b""))
        # The error does not tell which key it was.
        assert len(bodies) == 1, place
    for path in (*OPEN_PATHS, "/page/app.js", "/page/page.css"):
        async with running.session.get(running.url + path) as response:
            assert response.status in (200, 503), path


@pytest.mark.slow
async def test_every_route_accepts_a_valid_key(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    _, good = await ring.issue("team", raw=True)
    for key in (good, MASTER):
        for place in CLOSED_ROUTES:
            if place.path in PERMISSIONS:
                continue  # its permissions follow from roles
            status, _, body = await send(running, place, filled_path(place), **bearing(key))
            assert status not in (401, 403), (place, body)


# Only the path decides, not the host or a spelling that resembles an open path.
TARGETS = {
    "host with a path": ("/v1/models", "127.0.0.1/health/liveliness?y="),
    "host with a fragment": ("/v1/models", "127.0.0.1#/health/liveliness"),
    "two slashes": ("//v1/models", "127.0.0.1"),
    "two slashes and health": ("//health/liveliness", "127.0.0.1"),
    "path traversal from health": ("/health/liveliness/../../v1/models", "127.0.0.1"),
    "encoded path traversal from health": ("/health/liveliness/%2e%2e/%2e%2e/v1/models", "127.0.0.1"),
    "encoded letters": ("/%76%31/models", "127.0.0.1"),
    "encoded slash": ("/v1%2fmodels", "127.0.0.1"),
    "encoded twice": ("/health%252fliveliness", "127.0.0.1"),
    "health after a semicolon": ("/v1/models;/health/liveliness", "127.0.0.1"),
    "health in the query": ("/v1/models?/health/liveliness", "127.0.0.1"),
    "slash after health": ("/health/liveliness/", "127.0.0.1"),
    "health in capitals": ("/HEALTH/liveliness", "127.0.0.1"),
    "absolute target": ("http://127.0.0.1/v1/models", "127.0.0.1"),
    "absolute target with host `health`": ("http://health/v1/models", "health"),
}


@pytest.mark.parametrize(("target", "host"), TARGETS.values(), ids=TARGETS)
async def test_no_spelling_of_a_path_or_host_bypasses_authentication(
    site: tuple[Gateway, Ring], target: str, host: str
) -> None:
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
    response = await raw_answer(running.url, "\r\n".join(lines).encode())
    assert response.split()[1] in (b"401", b"400"), response
    assert b"gpt-oss" not in response


# Models


def body_for(place: Place, model: str) -> Any:
    return {"model": model, **next(body for kind, body in BODIES.items() if place.path.endswith(f"/{kind}"))}


async def test_a_key_can_request_only_its_models(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    _, restricted = await ring.issue(models=frozenset({"gpt-oss-other"}), raw=True)
    _, by_alias = await ring.issue(models=frozenset({"gpt-4o"}), raw=True)
    _, by_group = await ring.issue(models=frozenset({"gpt-oss"}), raw=True)
    table = (
        (restricted, {"gpt-oss-other": 200, "gpt-oss": 403, "gpt-4o": 403, "gpt-none": 403}),
        (by_alias, {"gpt-4o": 200, "gpt-oss": 403, "gpt-oss-other": 403}),
        (by_group, {"gpt-4o": 200, "gpt-oss": 200, "gpt-oss-other": 403}),
        (MASTER, {"gpt-4o": 200, "gpt-oss-other": 200, "gpt-none": 404}),
    )
    for place in MODEL_ROUTES:
        for key, models in table:
            refusals = set()
            for model, expected in models.items():
                status, headers, body = await send(running, place, place.path, body_for(place, model), **bearing(key))
                assert status == expected, (place, model, body)
                if status == 403:
                    assert is_refusal(body, place, "model_not_allowed", "permission_error")
                    body = body.replace(headers["x-request-id"].encode(), b"")
                    refusals.add(body.replace(f"`{model}`".encode(), b""))
            # The error does not tell whether the model exists.
            assert len(refusals) <= 1


async def test_a_key_without_permission_cannot_send_raw_prompts(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    _, key = await ring.issue()
    for path in ("/v1/completions", "/completions"):
        # The permission is checked before the body.
        for body in ({"model": "gpt-oss", "prompt": "Hi"}, {"model": "gpt-none"}, {}):
            status, _, error_body = await send(running, Place("POST", path), path, body, **bearing(key))
            assert (status, json.loads(error_body)["error"]["code"]) == (403, "permission_denied")
            assert b"unisono keys create --raw" in error_body


async def test_a_key_lists_only_its_models(site: tuple[Gateway, Ring]) -> None:
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


# Ids


ID = re.compile(r"[a-z]{2,12}_[0-9A-Za-z-]{20,}")


def ids_in(value: Any) -> Iterator[str]:
    """Yield every id in a JSON value."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from ids_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from ids_in(inner)
    elif isinstance(value, str) and ID.fullmatch(value):
        yield value


async def create_objects(running: Gateway, key: str) -> tuple[set[str], str, str]:
    """Create objects in every way; return all reported ids, a conversation and an item in it."""

    async def post(path: str, **fields: Any) -> Any:
        return await running.post(path, json.dumps(fields).encode(), **bearing(key))

    replies: list[Any] = []
    conversation = (await post("/v1/conversations", items=[{"role": "user", "content": "Hi"}])).body
    items = (await running.get(f"/v1/conversations/{conversation['id']}/items", **bearing(key))).body
    replies += [conversation, items]
    common = {"model": "gpt-oss", "input": "Hi"}
    for extra in ({}, {"background": True}, {"conversation": conversation["id"]}):
        streamed = await post("/v1/responses", **common, stream=True, **extra)
        assert streamed.status == 200, streamed.raw
        assert streamed.events
        replies += streamed.events
    response = await post("/v1/responses", **common)
    replies += [response.body, dict(response.headers)]
    chat = await post("/v1/chat/completions", model="gpt-oss", messages=[{"role": "user", "content": "Hi"}])
    replies += [chat.body, dict(chat.headers)]
    async with connect(
        running.url.replace("http", "ws", 1) + "/v1/responses", additional_headers=bearing(key)
    ) as socket:
        await socket.send(json.dumps({"type": "response.create", **common}))
        while replies[-1].get("type") != "response.completed":
            replies.append(json.loads(await socket.recv()))
    ids = set(ids_in(replies))
    assert {name.partition("_")[0] for name in ids} >= {"resp", "conv", "msg", "rs", "req"}
    return ids, conversation["id"], items["data"][0]["id"]


def unknown_id_like(id: str) -> str:
    """Return an unknown id of the same form."""
    kind, _, rest = id.partition("_")
    return f"{kind}_{'0' * len(rest)}"


def comparable(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in ("x-request-id", "date")}


async def test_an_object_of_another_tenant_is_indistinguishable_from_an_unknown_one(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    _, ann = await ring.issue("ann's")
    _, bob = await ring.issue("bob's")
    ids, conversation, item = await create_objects(running, ann)
    one_of_each_kind = {id.partition("_")[0]: id for id in sorted(ids)}.values()
    for place in ROUTES_WITH_IDS:
        for id in one_of_each_kind if is_variant(place) else sorted(ids):
            first, *others = place.parameters
            known_ids = {first: id, **dict.fromkeys(others, item)}
            unknown_ids = {first: unknown_id_like(id), **dict.fromkeys(others, unknown_id_like(item))}
            foreign = await send(running, place, place.at(**known_ids), **bearing(bob))
            unknown = await send(running, place, place.at(**unknown_ids), **bearing(bob))
            foreign_body = (
                foreign[2]
                .replace(id.encode(), unknown_ids[first].encode())
                .replace(item.encode(), unknown_id_like(item).encode())
            )
            assert foreign[0] == unknown[0], (place, id)
            assert foreign[0] in (400, 404), (place, id, foreign)
            assert foreign_body == unknown[2], (place, id)
            assert comparable(foreign[1]) == comparable(unknown[1]), (place, id)
    # All objects are still there for their owner.
    for id in ids:
        if id.startswith("resp_"):
            assert (await running.get(f"/v1/responses/{id}", **bearing(ann))).status == 200
    assert (await running.get(f"/v1/conversations/{conversation}/items/{item}", **bearing(ann))).status == 200


REFERENCES: dict[str, Any] = {
    "previous_response_id": lambda id: {"input": "Hi", "previous_response_id": id},
    "conversation": lambda id: {"input": "Hi", "conversation": id},
    "item reference": lambda id: {"input": [{"type": "item_reference", "id": id}]},
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("reference", REFERENCES.values(), ids=REFERENCES)
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}], ids=["whole", "stream", "background"])
async def test_a_response_of_another_tenant_cannot_be_continued(
    site: tuple[Gateway, Ring], reference: Any, fields: dict[str, Any]
) -> None:
    running, ring = site
    _, ann = await ring.issue("ann's")
    _, bob = await ring.issue("bob's")
    ids, _, _ = await create_objects(running, ann)
    for id in sorted(ids):
        bodies = []
        for referenced_id in (id, unknown_id_like(id)):
            body = {"model": "gpt-oss", **reference(referenced_id), **fields}
            response = await running.post("/v1/responses", json.dumps(body).encode(), **bearing(bob))
            assert response.status in (400, 404), (id, response.raw)
            bodies.append(response.raw.replace(referenced_id.encode(), b"ID"))
        assert bodies[0] == bodies[1], id


async def test_keys_of_one_tenant_share_stored_objects(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    _, first_key = await ring.issue("team")
    _, second_key = await ring.issue("team")
    response = await running.post("/v1/responses", b'{"model": "gpt-oss", "input": "Hi"}', **bearing(first_key))
    assert (await running.get(f"/v1/responses/{response.body['id']}", **bearing(second_key))).body == response.body
    assert (await running.get(f"/v1/responses/{response.body['id']}", **bearing(MASTER))).status == 404


async def test_idempotency_keys_are_separate_per_tenant(site: tuple[Gateway, Ring]) -> None:
    running, ring = site
    responses = []
    for tenant in ("ann's", "bob's"):
        _, key = await ring.issue(tenant)
        headers = {**bearing(key), "idempotency_key": "the same"}
        responses.append(await running.post("/v1/responses", b'{"model": "gpt-oss", "input": "Hi"}', **headers))
    assert [response.status for response in responses] == [200, 200]
    assert responses[0].body["id"] != responses[1].body["id"]
