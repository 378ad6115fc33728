"""Model list in OpenAI's and in LiteLLM's format."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from fastapi import FastAPI

from tests.api.asgi import Exchange
from unisono.access.keys import NoKeys
from unisono.api.asgi_layers import asgi_layers
from unisono.api.error_responses import register
from unisono.api.models import MODELS, ModelCards
from unisono.api.route_table import mount


@dataclass(frozen=True)
class Card:
    id: str
    context: int | None
    owned_by: str = "unisono"
    passes: bool = False


def app() -> FastAPI:
    gateway = FastAPI(
        docs_url=None,
        openapi_url=None,
        middleware=asgi_layers(authenticate=NoKeys().identify, keyless=True, new_id=lambda: "0"),
    )
    register(gateway)
    cards = [Card("gpt-oss-120b", 131072), Card("openai/gpt-oss-20b", None)]
    mount(gateway, MODELS.routes, ModelCards(lambda _: cards, created=1700000000))
    return gateway


@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_the_list_has_openais_format(prefix: str) -> None:
    body = (await Exchange(app(), "GET", f"{prefix}/models").run()).json()
    assert body["object"] == "list"
    assert body["data"] == [
        {
            "id": "gpt-oss-120b",
            "object": "model",
            "created": 1700000000,
            "owned_by": "unisono",
            "context_length": 131072,
            "max_model_len": 131072,
        },
        {"id": "openai/gpt-oss-20b", "object": "model", "created": 1700000000, "owned_by": "unisono"},
    ]


ANTHROPIC = (("anthropic-version", "2023-06-01"),)


async def test_the_list_has_anthropics_format_for_its_clients() -> None:
    body = (await Exchange(app(), "GET", "/v1/models", headers=ANTHROPIC).run()).json()
    assert {name: body[name] for name in ("has_more", "first_id", "last_id")} == {
        "has_more": False,
        "first_id": "gpt-oss-120b",
        "last_id": "openai/gpt-oss-20b",
    }
    assert body["data"][0] == {
        "id": "gpt-oss-120b",
        "type": "model",
        "display_name": "gpt-oss-120b",
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": 131072,
        "max_tokens": 131072,
    }
    one = (await Exchange(app(), "GET", "/v1/models/gpt-oss-120b", headers=ANTHROPIC).run()).json()
    assert one == body["data"][0]
    assert body["data"][1]["max_input_tokens"] is None


@pytest.mark.parametrize("name", ["gpt-oss-120b", "openai/gpt-oss-20b"])
async def test_one_model_is_found_by_its_name(name: str) -> None:
    assert (await Exchange(app(), "GET", f"/v1/models/{name}").run()).json()["id"] == name
    assert (await Exchange(app(), "GET", f"/models/{name}").run()).json()["id"] == name


async def test_an_unknown_model_is_not_found() -> None:
    response = await Exchange(app(), "GET", "/v1/models/gpt-9").run()
    assert response.status == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"


@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_model_info_has_litellms_format_and_no_address(prefix: str) -> None:
    first, second = (await Exchange(app(), "GET", f"{prefix}/model/info").run()).json()["data"]
    assert first["model_name"] == "gpt-oss-120b"
    assert first["litellm_params"] == {"model": "gpt-oss-120b"}
    assert first["model_info"]["max_input_tokens"] == 131072
    assert second["model_info"]["max_input_tokens"] is None
