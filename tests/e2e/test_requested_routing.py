"""Fallbacks and retries that a request chooses, on every API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, gateway
from tests.e2e.keyed import keyed
from tests.fakes import FakeVllm, Refusal, VllmScript
from tests.fakes.openai_api import FakeOpenAi
from unisono.harmony.encoding import load_encoding

MODELS = ("gpt-oss-a", "gpt-oss-b", "gpt-oss-c")
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 500}
SURFACES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hi", "store": False},
    "/v1/messages": CHAT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 50},
}
SURFACE = pytest.mark.parametrize("path", SURFACES)
NO_COOLDOWN = {"allowed_fails": 100_000, "cooldown_time": 0.01}


def down(body: Any) -> Refusal:
    return Refusal(500, b'{"error":"down"}')


def answering(text: str) -> Any:
    tokens = load_encoding().encode_marked(f"<|channel|>final<|message|>{text}<|return|>")
    return lambda body: VllmScript(tokens=tokens)


class Site:
    """A gateway with three models; the backend of the first one is down."""

    def __init__(self, running: Gateway, fakes: dict[str, FakeVllm]) -> None:
        self.running = running
        self.fakes = fakes

    async def ask(self, path: str = "/v1/chat/completions", **fields: Any) -> Answer:
        body = {"model": MODELS[0], **SURFACES[path], **fields}
        return await self.running.post(path, json.dumps(body).encode())

    @property
    def asked(self) -> list[int]:
        """Number of generations that each backend was asked for, since the last reading."""
        counts = []
        for fake in self.fakes.values():
            posted = [request.json for request in fake.requests if request.method == "POST"]
            counts.append(sum(bool(body.get("stream")) for body in posted))
            fake.requests.clear()
        return counts


def config_of(fakes: dict[str, FakeVllm], **sections: Any) -> dict[str, Any]:
    entries = [
        {"model_name": name, "litellm_params": {"model": "vllm/tiny", "api_base": fake.url}}
        for name, fake in fakes.items()
    ]
    settings = {**NO_COOLDOWN, "num_retries": 0, **sections.pop("router_settings", {})}
    unisono = {"raw_completions": True}
    return {"model_list": entries, "router_settings": settings, "unisono": unisono, **sections}


@asynccontextmanager
async def fakes() -> AsyncIterator[dict[str, FakeVllm]]:
    async with AsyncExitStack() as stack:
        servers = {name: await stack.enter_async_context(FakeVllm()) for name in MODELS}
        for name, fake in servers.items():
            fake.script = down if name == MODELS[0] else answering(f"From {name}.")
        yield servers


@asynccontextmanager
async def site(**sections: Any) -> AsyncIterator[Site]:
    async with fakes() as servers, gateway(config_of(servers, **sections)) as running:
        found = Site(running, servers)
        assert found.asked is not None
        yield found


@pytest.mark.sampled(one_in=2)
@SURFACE
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_requests_own_fallback_answers(path: str, stream: bool) -> None:
    async with site(router_settings={"fallbacks": [{MODELS[0]: [MODELS[1]]}]}) as found:
        # The configured fallback answers without the field, the request's own one with it.
        for fields, expected in (({}, [1, 1, 0]), ({"fallbacks": [MODELS[2]]}, [1, 0, 1])):
            answer = await found.ask(path, stream=stream, **fields)
            assert answer.status == 200, answer.raw
            assert answer.headers["x-unisono-backend"] == f"vllm-{expected.index(1, 1) + 1}"
            assert found.asked == expected


@pytest.mark.sampled(one_in=2)
@SURFACE
@pytest.mark.parametrize("fields", [{"fallbacks": []}, {"disable_fallbacks": True}], ids=str)
async def test_a_request_can_switch_fallbacks_off(path: str, fields: dict[str, Any]) -> None:
    async with site(router_settings={"default_fallbacks": [MODELS[1]]}) as found:
        answer = await found.ask(path, **fields)
        assert answer.status in (502, 503, 529)
        assert found.asked == [1, 0, 0]


async def test_fallbacks_are_tried_in_their_order() -> None:
    async with site() as found:
        found.fakes[MODELS[2]].script = down
        assert (await found.ask(fallbacks=[{"model": MODELS[2]}, MODELS[1]])).status == 200
        assert found.asked == [1, 1, 1]


@SURFACE
async def test_num_retries_bounds_the_attempts(path: str) -> None:
    """One deployment is asked again after a pause, so every retry reaches the same backend."""
    async with site(router_settings={"num_retries": 1}) as found:
        for fields, attempts in (({"num_retries": 0}, 1), ({"max_retries": 0}, 1), ({}, 2), ({"num_retries": 2}, 3)):
            assert (await found.ask(path, **fields)).status >= 500
            assert found.asked == [attempts, 0, 0]


@SURFACE
async def test_a_bad_value_is_an_error_that_names_the_field(path: str) -> None:
    async with site() as found:
        for fields, param in (
            ({"num_retries": -1}, "num_retries"),
            ({"fallbacks": [{"model": MODELS[1], "messages": []}]}, "fallbacks.0.messages"),
            ({"mock_response": "Hi"}, "mock_response"),
            ({"mock_response": ""}, "mock_response"),
        ):
            answer = await found.ask(path, **fields)
            assert answer.status == 400
            # Anthropic's errors have no field of their own for the name.
            assert f"'{param}'" in answer.body["error"]["message"]
        unknown = await found.ask(path, fallbacks=["unknown"])
        assert unknown.status == 404
        assert found.asked == [0, 0, 0]


async def test_fallbacks_need_the_permission_of_the_key(tmp_path: Path) -> None:
    async with fakes() as servers:
        config = config_of(servers)
        config["model_list"][2]["model_info"] = {"access_groups": ["group"]}
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(models=frozenset({MODELS[0], "group"}))
            for fallback, status in ((MODELS[1], 403), ("unknown", 403), (MODELS[2], 200)):
                answer = await running.chat_as(key, model=MODELS[0], fallbacks=[fallback])
                assert answer.status == status, answer.raw
                if status == 403:
                    assert answer.body["error"]["param"] == "fallbacks.0"


async def test_the_guardrails_of_a_fallback_apply() -> None:
    rule = {"keyword": "zebra", "action": "BLOCK"}
    params = {"guardrail": "litellm_content_filter", "mode": "pre_call", "blocked_words": [rule], "default_on": False}
    async with fakes() as servers:
        config = config_of(servers, guardrails=[{"guardrail_name": "words", "litellm_params": params}])
        config["model_list"][1]["litellm_params"]["guardrails"] = ["words"]
        async with gateway(config) as running:
            ask = {"model": MODELS[0], "messages": [{"role": "user", "content": "A zebra"}]}
            assert (await running.chat(**ask, fallbacks=[MODELS[2]])).status == 200
            blocked = await running.chat(**ask, fallbacks=[MODELS[1]])
            assert (blocked.status, blocked.body["error"]["code"]) == (400, "content_blocked")


async def test_the_budget_of_a_fallback_applies(tmp_path: Path) -> None:
    async with fakes() as servers:
        prices = {MODELS[2]: {"input": 1_000_000.0, "output": 1_000_000.0}}
        # The budget is spent by the first answer of the expensive model, which belongs to the only provider.
        config = config_of(servers, litellm_settings={"max_budget": 1.0})
        for entry in config["model_list"]:
            entry["unisono"] = {"price": prices.get(entry["model_name"], {"input": 0.0, "output": 0.0})}
        async with gateway(config) as running:
            refused = await running.chat(model=MODELS[0], fallbacks=[MODELS[2]], max_tokens=50)
            assert (refused.status, refused.body["error"]["code"]) == (429, "insufficient_quota")
            assert (await running.chat(model=MODELS[0], fallbacks=[MODELS[1]], max_tokens=50)).status == 200


async def test_a_pass_through_model_is_a_fallback_where_it_can_answer() -> None:
    async with fakes() as servers, FakeOpenAi() as there:
        config = config_of(servers)
        params = {"model": "vllm/other", "api_base": there.url}
        config["model_list"].append({"model_name": "other", "litellm_params": params})
        async with gateway(config) as running:
            found = Site(running, servers)
            assert (await found.ask(fallbacks=["other"])).status == 200
            sent = [request.json for request in there.requests if request.method == "POST"]
            assert len(sent) == 1
            # The fields of the gateway are not for the backend.
            assert "fallbacks" not in sent[0]
            refused = await found.ask("/v1/messages", fallbacks=["other"])
            assert (refused.status, "is a pass-through model" in refused.body["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    "field", [{"num_retries": 0}, {"max_retries": 0}, {"fallbacks": []}, {"disable_fallbacks": True}], ids=str
)
async def test_a_background_response_has_no_routing_of_its_own(field: dict[str, Any]) -> None:
    async with site() as found:
        answer = await found.ask("/v1/responses", background=True, store=True, **field)
        assert (answer.status, answer.body["error"]["param"]) == (400, next(iter(field)))


# -- tags

TAGS = {"vllm-1": ["team-a"], "vllm-2": ["team-b"], "vllm-3": ["default"]}
TAG_FIELDS: dict[str, dict[str, Any]] = {
    "tags": {"tags": ["team-b"]},
    "metadata": {"metadata": {"tags": ["team-b"]}},
    "litellm_metadata": {"litellm_metadata": {"tags": ["team-b"]}},
}


@asynccontextmanager
async def tagged(*, enabled: bool = True) -> AsyncIterator[Gateway]:
    """Run a gateway with three deployments of one model."""
    async with fakes() as servers:
        servers[MODELS[0]].script = answering("From the first.")
        config = config_of(servers, router_settings={"enable_tag_filtering": enabled})
        for entry, tags in zip(config["model_list"], TAGS.values(), strict=True):
            entry["model_name"] = "gpt-oss"
            entry["litellm_params"]["tags"] = tags
        async with gateway(config) as running:
            yield running


async def post(running: Gateway, path: str, **fields: Any) -> Answer:
    return await running.post(path, json.dumps({"model": "gpt-oss", **SURFACES[path], **fields}).encode())


@SURFACE
async def test_tags_select_deployments(path: str) -> None:
    async with tagged() as running:
        for fields in TAG_FIELDS.values():
            answer = await post(running, path, **fields)
            assert (answer.status, answer.headers["x-unisono-backend"]) == (200, "vllm-2")
            assert "x-unisono-notes" not in answer.headers
        for fields in ({}, {"tags": []}, {"tags": ["unknown"]}):
            for _ in range(2):
                answer = await post(running, path, **fields)
                assert (answer.status, answer.headers["x-unisono-backend"]) == (200, "vllm-3")
        for fields, param in (({"tags": ["team-a", 5]}, "tags.1"), ({"tags": ["&team-c"]}, "tags")):
            answer = await post(running, path, **fields)
            assert (answer.status, f"'{param}'" in answer.body["error"]["message"]) == (400, True)


async def test_a_background_response_has_no_tags_of_its_own() -> None:
    async with tagged() as running:
        for name, fields in TAG_FIELDS.items():
            answer = await post(running, "/v1/responses", background=True, store=True, **fields)
            expected = "tags" if name == "tags" else f"{name}.tags"
            assert (answer.status, answer.body["error"]["param"]) == (400, expected)
            assert answer.body["error"]["message"].startswith(f"'{expected}' is not supported")


@SURFACE
async def test_the_header_of_litellm_names_tags_too(path: str) -> None:
    body = json.dumps({"model": "gpt-oss", **SURFACES[path]}).encode()
    async with tagged() as running:
        for header, backend in (("team-b", "vllm-2"), (" team-b , unknown", "vllm-2"), (" , ", "vllm-3")):
            answer = await running.post(path, body, x_litellm_tags=header)
            assert (answer.status, answer.headers["x-unisono-backend"]) == (200, backend)
        answer = await running.post(path, body, x_litellm_tags="x" * 129)
        assert answer.status == 400
        assert "x-litellm-tags" in answer.body["error"]["message"]


@pytest.mark.sampled(one_in=2)
@SURFACE
@pytest.mark.parametrize("value", [["team-b"], []], ids=str)
async def test_tags_are_noted_where_they_select_nothing(path: str, value: list[str]) -> None:
    async with tagged(enabled=False) as running:
        answer = await post(running, path, tags=value)
        assert (answer.status, answer.headers["x-unisono-notes"]) == (200, "tags")


@SURFACE
async def test_the_header_is_noted_where_tags_select_nothing(path: str) -> None:
    body = json.dumps({"model": "gpt-oss", **SURFACES[path]}).encode()
    async with tagged(enabled=False) as running:
        answer = await running.post(path, body, x_litellm_tags="team-b")
        assert (answer.status, answer.headers["x-unisono-notes"]) == (200, "x-litellm-tags")


@SURFACE
async def test_the_operator_selects_a_deployment(path: str) -> None:
    async with tagged() as running:
        body = json.dumps({"model": "gpt-oss", "fallbacks": [], **SURFACES[path]}).encode()
        for name in ("vllm-2", "vllm-1", "vllm-2", "vllm-3"):
            answer = await running.post(path, body, x_unisono_deployment=name)
            assert (answer.status, answer.headers["x-unisono-backend"]) == (200, name)
        answer = await running.post(path, body, x_unisono_deployment="vllm-9")
        assert answer.status == 400
        assert "x-unisono-deployment" in answer.body["error"]["message"]


# Ids of deployments, and their form in headers.
HEADER_FORMS = {
    "vllm 1": "vllm 1",
    "pä%n 1": "p%C3%A4%25n 1",
    "pö%n 1": "p%C3%B6%25n 1",
    "a%20b": "a%2520b",
    "日本": "%E6%97%A5%E6%9C%AC",
}


async def test_the_name_in_a_response_header_selects_the_same_deployment() -> None:
    async with FakeVllm(script=answering("Hi.")) as fake:
        config = config_of({"gpt-oss": fake})
        (entry,) = config["model_list"]
        config["model_list"] = [{**entry, "model_info": {"id": id}} for id in HEADER_FORMS]
        async with gateway(config) as running:
            body = json.dumps({"model": "gpt-oss", **CHAT}).encode()
            for id, header in HEADER_FORMS.items():
                answer = await running.post("/v1/chat/completions", body, x_unisono_deployment=header)
                assert (answer.body["unisono"]["backend"], answer.headers["x-unisono-backend"]) == (id, header)


async def test_a_selected_deployment_has_no_fallback_and_needs_the_master_key() -> None:
    async with site(
        router_settings={"default_fallbacks": [MODELS[1]]}, general_settings={"master_key": "sk-master"}
    ) as found:
        body = json.dumps({"model": MODELS[0], **CHAT}).encode()
        path, master = "/v1/chat/completions", {"authorization": "Bearer sk-master"}
        assert (await found.running.post(path, body, **master)).headers["x-unisono-backend"] == "vllm-2"
        found.asked  # noqa: B018 - forgets the requests so far
        answer = await found.running.post(path, body, x_unisono_deployment="vllm-1", **master)
        assert (answer.status, found.asked) == (502, [1, 0, 0])
        made = await found.running.post("/key/generate", b"{}", **master)
        virtual = {"authorization": f"Bearer {made.body['key']}"}
        answer = await found.running.post(path, body, x_unisono_deployment="vllm-1", **virtual)
        assert (answer.status, answer.body["error"]["param"]) == (403, "x-unisono-deployment")
        assert found.asked == [0, 0, 0]
