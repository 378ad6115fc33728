"""Model lists in the formats of OpenAI, Codex, Anthropic and LiteLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi import FastAPI

from tests.api.asgi import Exchange, mount
from unisono.access.keys import NoKeys
from unisono.api.asgi_layers import asgi_layers
from unisono.api.fastapi_app import register
from unisono.api.messages.error_format import ERROR_FORMATS
from unisono.api.model_facts import MODEL_FACTS
from unisono.api.models import MODELS, ModelCards


@dataclass(frozen=True)
class Card:
    id: str
    context: int | None
    owned_by: str = "unisono"
    passes: bool = False
    mode: str = "chat"
    can_read_images: bool | None = False


CARDS = (Card("gpt-oss-120b", 131072), Card("openai/gpt-oss-20b", None))


def app(cards: Sequence[Card] = CARDS) -> FastAPI:
    gateway = FastAPI(
        docs_url=None,
        openapi_url=None,
        middleware=asgi_layers(authenticate=NoKeys().identify, keyless=True, new_id=lambda: "0", formats=ERROR_FORMATS),
    )
    register(gateway)
    mount(gateway, [*MODELS.routes, *MODEL_FACTS.routes], ModelCards(lambda _: cards, created=1700000000))
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
            "mode": "chat",
            "context_length": 131072,
            "max_model_len": 131072,
        },
        {"id": "openai/gpt-oss-20b", "object": "model", "created": 1700000000, "owned_by": "unisono", "mode": "chat"},
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


NAMES = ("a", "b", "c", "d")
# Query; names of the page; whether there are more.
PAGES: dict[str, tuple[str, str, bool]] = {
    "no limit": ("", "abcd", False),
    "the limit of Claude Code": ("limit=1000", "abcd", False),
    "first page": ("limit=3", "abc", True),
    "last page": ("limit=3&after_id=c", "d", False),
    "after the last": ("after_id=d", "", False),
    "page before": ("limit=2&before_id=d", "bc", True),
    "first page, from behind": ("limit=2&before_id=c", "ab", False),
    "before the first": ("limit=2&before_id=a", "", False),
    "between two": ("after_id=a&before_id=d", "bc", False),
    "beginning after the end": ("after_id=c&before_id=b", "", False),
}


@pytest.mark.parametrize(("query", "names", "has_more"), PAGES.values(), ids=PAGES)
async def test_anthropics_list_has_pages(query: str, names: str, has_more: bool) -> None:
    gateway = app([Card(name, None) for name in NAMES])
    body = (await Exchange(gateway, "GET", f"/v1/models?{query}", headers=ANTHROPIC).run()).json()
    assert [model["id"] for model in body["data"]] == [*names]
    assert body["has_more"] is has_more
    assert (body["first_id"], body["last_id"]) == ((names[0], names[-1]) if names else (None, None))


BAD_PAGES = {
    "limit=0": "'limit' must be a number from 1 to 1000.",
    "limit=1001": "'limit' must be a number from 1 to 1000.",
    "limit=x": "'limit' must be a number from 1 to 1000.",
    "limit=": "'limit' must be a number from 1 to 1000.",
    "after_id=z": "'after_id': the list of models has no 'z'; use the `id` of a listed model.",
    "before_id=": "'before_id': the list of models has no ''; use the `id` of a listed model.",
}


@pytest.mark.parametrize(("query", "message"), BAD_PAGES.items(), ids=BAD_PAGES)
async def test_a_wrong_page_is_rejected_in_anthropics_format_only(query: str, message: str) -> None:
    response = await Exchange(app(), "GET", f"/v1/models?{query}", headers=ANTHROPIC).run()
    error = response.json()["error"]
    assert (response.status, error["type"], error["message"]) == (400, "invalid_request_error", message)
    assert (await Exchange(app(), "GET", f"/v1/models?{query}").run()).status == 200


async def codex_catalogue(*cards: Card) -> list[Any]:
    body = (await Exchange(app(cards), "GET", "/v1/models?client_version=0.169.0").run()).json()
    assert [model["id"] for model in body["data"]] == [card.id for card in cards]
    catalogue: list[Any] = body["models"]
    return catalogue


# Fields without which Codex 0.169.0 rejects the list.
REQUIRED = {
    *("slug", "display_name", "supported_reasoning_levels", "shell_type", "visibility", "supported_in_api"),
    *("priority", "base_instructions", "support_verbosity", "truncation_policy", "experimental_supported_tools"),
    *("description", "availability_nux", "upgrade", "default_verbosity", "apply_patch_tool_type"),
    *("supports_parallel_tool_calls", "supports_reasoning_summaries"),
}


async def test_codex_finds_its_catalogue_beside_the_list() -> None:
    first, second = await codex_catalogue(*CARDS)
    assert first.keys() >= REQUIRED
    assert first["slug"] == first["auto_review_model_override"] == "gpt-oss-120b"
    assert [level["effort"] for level in first["supported_reasoning_levels"]] == ["low", "medium", "high"]
    assert (first["apply_patch_tool_type"], first["shell_type"]) == ("freeform", "shell_command")
    assert first["input_modalities"] == ["text"]
    assert [model["priority"] for model in (first, second)] == [0, 1]


CONTEXTS = {"known": (65536, 65536), "unknown": (None, 131072)}


@pytest.mark.parametrize(("context", "window"), CONTEXTS.values(), ids=CONTEXTS)
async def test_codex_reads_the_context_window_of_the_backend(context: int | None, window: int) -> None:
    (model,) = await codex_catalogue(Card("gpt-oss", context))
    assert model["context_window"] == model["max_context_window"] == window


async def test_codexs_catalogue_has_no_pass_through_models() -> None:
    assert [model["slug"] for model in await codex_catalogue(Card("gpt-5.5", None, passes=True), *CARDS)] == [
        "gpt-oss-120b",
        "openai/gpt-oss-20b",
    ]


async def test_other_clients_get_no_catalogue() -> None:
    assert (await Exchange(app(), "GET", "/v1/models").run()).json().keys() == {"object", "data"}


@pytest.mark.parametrize("name", ["gpt-oss-120b", "openai/gpt-oss-20b"])
async def test_one_model_is_found_by_its_name(name: str) -> None:
    assert (await Exchange(app(), "GET", f"/v1/models/{name}").run()).json()["id"] == name
    assert (await Exchange(app(), "GET", f"/models/{name}").run()).json()["id"] == name


async def test_an_unknown_model_is_not_found() -> None:
    response = await Exchange(app(), "GET", "/v1/models/gpt-9").run()
    assert response.status == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"


async def test_a_model_group_has_the_mode_of_its_model() -> None:
    cards = (*CARDS, Card("embed", 8192, passes=True, mode="embedding"))
    body = (await Exchange(app(cards), "GET", "/model_group/info").run()).json()
    assert [group["mode"] for group in body["data"]] == ["chat", "chat", "embedding"]


async def test_a_model_group_has_the_capabilities_of_its_model() -> None:
    cards = (
        Card("gpt-oss", None),
        Card("describes", None, can_read_images=True),
        Card("vl", None, passes=True, can_read_images=True),
        Card("other", None, passes=True, can_read_images=None),
    )
    body = (await Exchange(app(cards), "GET", "/model_group/info").run()).json()
    assert {
        group["model_group"]: (
            group["supports_function_calling"],
            group["supports_parallel_function_calling"],
            group["supports_vision"],
        )
        for group in body["data"]
    } == {
        "gpt-oss": (True, True, False),
        "describes": (True, True, True),
        "vl": (False, False, True),
        "other": (False, False, False),
    }
