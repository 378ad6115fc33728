"""Discovery of local backends: gpt-oss is found, and other servers are ignored."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes import Refusal, Seen, Sleep, Step, WireServer
from unisono.cli import discover as discovery
from unisono.cli.discover import FINDERS, PORTS, DiscoveredBackend, discover

# Response of a path: a JSON body, a raw body, a status, or None for no response.
Response = dict[str, Any] | list[Any] | str | int | None


def by_path(responses: dict[str, Response]) -> Callable[[Seen], list[Step]]:
    def respond(seen: Seen) -> list[Step]:
        response = responses.get(seen.path, 404)
        match response:
            case None:
                return [Sleep(60)]
            case int():
                return Refusal(response, b"{}", headers={"location": "/version"}).steps()
            case str():
                return Refusal(200, response.encode()).steps()
            case _:
                return Refusal(200, json.dumps(response).encode()).steps()

    return respond


def models(*models: Any) -> dict[str, Any]:
    return {"object": "list", "data": list(models)}


@pytest.fixture
def free_port() -> Iterator[int]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(discovery, "FIRST_TOKEN_TIMEOUT_S", 0.3)


VERSION = {"version": "0.32.0"}
VLLM: dict[str, tuple[dict[str, Response], list[str]]] = {
    "model name": (
        {"/version": VERSION, "/v1/models": models({"id": "openai/gpt-oss-20b"})},
        ["openai/gpt-oss-20b"],
    ),
    "model root": (
        {"/version": VERSION, "/v1/models": models({"id": "assistant", "root": "openai/gpt-oss-20b"})},
        ["assistant"],
    ),
    "only gpt-oss models": (
        {"/version": VERSION, "/v1/models": models({"id": "qwen3"}, {"id": "GPT-OSS-120b"}, {"id": None}, "x", 7)},
        ["GPT-OSS-120b"],
    ),
    "another model": ({"/version": VERSION, "/v1/models": models({"id": "qwen3"})}, []),
    "another server": ({"/v1/models": models({"id": "gpt-oss-20b"})}, []),
    "a web page": ({"/version": "<html>", "/v1/models": "<html>"}, []),
    "an error": ({"/version": VERSION, "/v1/models": 500}, []),
    "a redirect": ({"/version": 302, "/v1/models": models({"id": "gpt-oss-20b"})}, []),
    "a list without models": ({"/version": VERSION, "/v1/models": []}, []),
    "unexpected JSON": ({"/version": VERSION, "/v1/models": {"data": {"id": "gpt-oss"}}}, []),
    "no response": ({"/version": None}, []),
    "response too large": ({"/version": VERSION, "/v1/models": " " * 3_000_000 + "{}"}, []),
}


@pytest.mark.parametrize(("responses", "found"), VLLM.values(), ids=VLLM)
async def test_vllm_is_found_by_its_own_api(responses: dict[str, Response], found: list[str], free_port: int) -> None:
    async with WireServer(by_path(responses)) as server:
        assert await discover({"vllm": server.port, "mlx_server": free_port}) == [
            DiscoveredBackend("vllm", name, server.url) for name in found
        ]
        assert not server.requests, "discovery of vLLM must not generate"


OK = {"status": "ok"}
GPT_OSS = models({"id": "gpt-oss"})
HARMONY_COMPLETION = {"choices": [{"text": "analysis"}]}
FOLDER = "/Users/me/models/gpt-oss-20b-MXFP4-Q8"
MLX: dict[str, tuple[dict[str, Response], str | None]] = {
    "a downloaded snapshot": (
        {
            "/health": OK,
            "/v1/models": models({"id": "mlx-community/gpt-oss-20b"}),
            "/v1/completions": HARMONY_COMPLETION,
        },
        "mlx-community/gpt-oss-20b",
    ),
    "the folder it was started with": (
        {
            "/health": OK,
            "/v1/models": models({"id": "mlx-community/gpt-oss-120b"}, {"id": FOLDER}),
            "/v1/completions": HARMONY_COMPLETION,
        },
        FOLDER,
    ),
    "gpt-oss on disk, another model running": (
        {
            "/health": OK,
            "/v1/models": models({"id": "gpt-oss-20b"}),
            "/v1/completions": {"choices": [{"text": "Hello"}]},
        },
        None,
    ),
    "no gpt-oss": ({"/health": OK, "/v1/models": models({"id": "qwen"}), "/v1/completions": HARMONY_COMPLETION}, None),
    "unhealthy": (
        {
            "/health": {"status": "unavailable"},
            "/v1/models": models({"id": "gpt-oss"}),
            "/v1/completions": HARMONY_COMPLETION,
        },
        None,
    ),
    "cannot generate": ({"/health": OK, "/v1/models": models({"id": "gpt-oss"}), "/v1/completions": 404}, None),
    "hangs during generation": (
        {"/health": OK, "/v1/models": models({"id": "gpt-oss"}), "/v1/completions": None},
        None,
    ),
    "unexpected response": (
        {"/health": OK, "/v1/models": models({"id": "gpt-oss"}), "/v1/completions": {"choices": []}},
        None,
    ),
}


@pytest.mark.parametrize(("responses", "found"), MLX.values(), ids=MLX)
async def test_an_mlx_server_is_found_only_if_it_generates_harmony(
    responses: dict[str, Response], found: str | None, free_port: int
) -> None:
    async with WireServer(by_path(responses)) as server:
        expected = [DiscoveredBackend("mlx_server", found, server.url)] if found else []
        assert await discover({"vllm": free_port, "mlx_server": server.port}) == expected


async def test_two_backends_are_found_and_closed_ports_are_skipped(free_port: int) -> None:
    assert await discover(dict.fromkeys(PORTS, free_port)) == []
    vllm = WireServer(by_path({"/version": VERSION, "/v1/models": models({"id": "gpt-oss-120b"})}))
    mlx = WireServer(
        by_path({"/health": OK, "/v1/models": models({"id": "gpt-oss-20b"}), "/v1/completions": HARMONY_COMPLETION})
    )
    async with vllm, mlx:
        ports = {"vllm": vllm.port, "mlx_server": mlx.port}
        assert [found.kind for found in await discover(ports)] == ["vllm", "mlx_server"]


PROPS = {"default_generation_settings": {"n_ctx": 4096}, "model_path": "/models/gpt-oss-20b-mxfp4.gguf"}
OTHERS: dict[str, tuple[str, dict[str, Response], list[str]]] = {
    "llama-server by file name": ("llamacpp", {"/props": PROPS}, ["gpt-oss-20b-mxfp4"]),
    "llama-server by alias": ("llamacpp", {"/props": PROPS | {"model_alias": "house"}}, ["house"]),
    "llama-server with another model": ("llamacpp", {"/props": PROPS | {"model_path": "/models/qwen.gguf"}}, []),
    "not llama-server": ("llamacpp", {"/props": {"model_path": "gpt-oss"}}, []),
    "llama-server on the port of mlx_lm.server": (
        "mlx_server",
        {
            "/health": OK,
            "/props": PROPS,
            "/v1/models": models({"id": "gpt-oss"}),
            "/v1/completions": HARMONY_COMPLETION,
        },
        [],
    ),
    "SGLang": (
        "sglang",
        {"/model_info": {"tokenizer_path": "openai/gpt-oss-20b"}, "/v1/models": models({"id": "openai/gpt-oss-20b"})},
        ["openai/gpt-oss-20b"],
    ),
    "not SGLang": ("sglang", {"/model_info": {}, "/v1/models": models({"id": "openai/gpt-oss-20b"})}, []),
    "Ollama": (
        "ollama",
        {
            "/api/version": VERSION,
            "/api/tags": {"models": [{"name": "gpt-oss:20b"}, {"name": "qwen3"}, {"name": 7}, 7]},
        },
        ["gpt-oss:20b"],
    ),
    "Ollama without gpt-oss": ("ollama", {"/api/version": VERSION, "/api/tags": {"models": []}}, []),
    "not Ollama": ("ollama", {"/api/tags": {"models": [{"name": "gpt-oss:20b"}]}}, []),
}


@pytest.mark.parametrize(("kind", "responses", "found"), OTHERS.values(), ids=OTHERS)
async def test_each_kind_is_identified_by_its_own_api(
    kind: str, responses: dict[str, Response], found: list[str]
) -> None:
    async with WireServer(by_path(responses)) as server:
        assert await discover({kind: server.port}) == [DiscoveredBackend(kind, name, server.url) for name in found]


def test_every_kind_with_a_port_has_a_finder() -> None:
    assert PORTS.keys() == FINDERS.keys()


@pytest.mark.parametrize(
    ("model", "name"),
    [("openai/gpt-oss-20b", "gpt-oss-20b"), (FOLDER, "gpt-oss-20b-MXFP4-Q8"), ("gpt-oss:20b", "gpt-oss:20b")],
)
def test_the_model_name_has_no_path(model: str, name: str) -> None:
    assert DiscoveredBackend("vllm", model, "http://x").model_name == name
