"""Finding backends on this machine: gpt-oss is found, anything else on those ports is left alone."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes import Refusal, Seen, Sleep, Step, WireServer
from unisono.cli import discover as discovery
from unisono.cli.discover import FINDERS, PORTS, DiscoveredBackend, discover

Answer = dict[str, Any] | list[Any] | str | int | None
"""By path: a JSON body, a raw body, a status, or None for silence."""


def by_path(answers: dict[str, Answer]) -> Callable[[Seen], list[Step]]:
    def respond(seen: Seen) -> list[Step]:
        answer = answers.get(seen.path, 404)
        match answer:
            case None:
                return [Sleep(60)]
            case int():
                return Refusal(answer, b"{}", headers={"location": "/version"}).steps()
            case str():
                return Refusal(200, answer.encode()).steps()
            case _:
                return Refusal(200, json.dumps(answer).encode()).steps()

    return respond


def models(*models: Any) -> dict[str, Any]:
    return {"object": "list", "data": list(models)}


@pytest.fixture
def free_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(discovery, "FIRST_TOKEN_TIMEOUT_S", 0.3)


VERSION = {"version": "0.32.0"}
VLLM: dict[str, tuple[dict[str, Answer], list[str]]] = {
    "by its name": (
        {"/version": VERSION, "/v1/models": models({"id": "openai/gpt-oss-20b"})},
        ["openai/gpt-oss-20b"],
    ),
    "by what it was loaded from": (
        {"/version": VERSION, "/v1/models": models({"id": "assistant", "root": "openai/gpt-oss-20b"})},
        ["assistant"],
    ),
    "only the gpt-oss ones": (
        {"/version": VERSION, "/v1/models": models({"id": "qwen3"}, {"id": "GPT-OSS-120b"}, {"id": None}, "x", 7)},
        ["GPT-OSS-120b"],
    ),
    "another model": ({"/version": VERSION, "/v1/models": models({"id": "qwen3"})}, []),
    "another server": ({"/v1/models": models({"id": "gpt-oss-20b"})}, []),
    "a web page": ({"/version": "<html>", "/v1/models": "<html>"}, []),
    "an error": ({"/version": VERSION, "/v1/models": 500}, []),
    "a redirect": ({"/version": 302, "/v1/models": models({"id": "gpt-oss-20b"})}, []),
    "a list without models": ({"/version": VERSION, "/v1/models": []}, []),
    "odd JSON": ({"/version": VERSION, "/v1/models": {"data": {"id": "gpt-oss"}}}, []),
    "silence": ({"/version": None}, []),
    "far too much": ({"/version": VERSION, "/v1/models": " " * 3_000_000 + "{}"}, []),
}


@pytest.mark.parametrize(("answers", "found"), VLLM.values(), ids=VLLM)
async def test_vllm_is_found_by_its_own_api(answers: dict[str, Answer], found: list[str], free_port: int) -> None:
    async with WireServer(by_path(answers)) as server:
        assert await discover({"vllm": server.port, "mlx_server": free_port}) == [
            DiscoveredBackend("vllm", name, server.url) for name in found
        ]
        assert not server.requests, "nothing is generated on a server that says what it serves"


OK = {"status": "ok"}
GPT_OSS = models({"id": "gpt-oss"})
SPEAKS = {"choices": [{"text": "analysis"}]}
FOLDER = "/Users/me/models/gpt-oss-20b-MXFP4-Q8"
MLX: dict[str, tuple[dict[str, Answer], str | None]] = {
    "a downloaded snapshot": (
        {"/health": OK, "/v1/models": models({"id": "mlx-community/gpt-oss-20b"}), "/v1/completions": SPEAKS},
        "mlx-community/gpt-oss-20b",
    ),
    "the folder it was started with": (
        {
            "/health": OK,
            "/v1/models": models({"id": "mlx-community/gpt-oss-120b"}, {"id": FOLDER}),
            "/v1/completions": SPEAKS,
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
    "no gpt-oss": ({"/health": OK, "/v1/models": models({"id": "qwen"}), "/v1/completions": SPEAKS}, None),
    "not well": (
        {"/health": {"status": "unavailable"}, "/v1/models": models({"id": "gpt-oss"}), "/v1/completions": SPEAKS},
        None,
    ),
    "cannot generate": ({"/health": OK, "/v1/models": models({"id": "gpt-oss"}), "/v1/completions": 404}, None),
    "hangs when it generates": (
        {"/health": OK, "/v1/models": models({"id": "gpt-oss"}), "/v1/completions": None},
        None,
    ),
    "answers oddly": (
        {"/health": OK, "/v1/models": models({"id": "gpt-oss"}), "/v1/completions": {"choices": []}},
        None,
    ),
}


@pytest.mark.parametrize(("answers", "found"), MLX.values(), ids=MLX)
async def test_an_mlx_server_has_to_prove_that_it_runs_gpt_oss(
    answers: dict[str, Answer], found: str | None, free_port: int
) -> None:
    async with WireServer(by_path(answers)) as server:
        expected = [DiscoveredBackend("mlx_server", found, server.url)] if found else []
        assert await discover({"vllm": free_port, "mlx_server": server.port}) == expected


async def test_both_are_found_and_closed_ports_cost_nothing(free_port: int) -> None:
    assert await discover(dict.fromkeys(PORTS, free_port)) == []
    vllm = WireServer(by_path({"/version": VERSION, "/v1/models": models({"id": "gpt-oss-120b"})}))
    mlx = WireServer(by_path({"/health": OK, "/v1/models": models({"id": "gpt-oss-20b"}), "/v1/completions": SPEAKS}))
    async with vllm, mlx:
        ports = {"vllm": vllm.port, "mlx_server": mlx.port}
        assert [found.kind for found in await discover(ports)] == ["vllm", "mlx_server"]


PROPS = {"default_generation_settings": {"n_ctx": 4096}, "model_path": "/models/gpt-oss-20b-mxfp4.gguf"}
OTHERS: dict[str, tuple[str, dict[str, Answer], list[str]]] = {
    "llama-server by its file": ("llamacpp", {"/props": PROPS}, ["gpt-oss-20b-mxfp4"]),
    "llama-server by its alias": ("llamacpp", {"/props": PROPS | {"model_alias": "house"}}, ["house"]),
    "llama-server with another model": ("llamacpp", {"/props": PROPS | {"model_path": "/models/qwen.gguf"}}, []),
    "not llama-server": ("llamacpp", {"/props": {"model_path": "gpt-oss"}}, []),
    "llama-server is no mlx_lm.server": (
        "mlx_server",
        {"/health": OK, "/props": PROPS, "/v1/models": models({"id": "gpt-oss"}), "/v1/completions": SPEAKS},
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
    "Ollama without it": ("ollama", {"/api/version": VERSION, "/api/tags": {"models": []}}, []),
    "not Ollama": ("ollama", {"/api/tags": {"models": [{"name": "gpt-oss:20b"}]}}, []),
}


@pytest.mark.parametrize(("kind", "answers", "found"), OTHERS.values(), ids=OTHERS)
async def test_each_kind_is_told_by_its_own_api(kind: str, answers: dict[str, Answer], found: list[str]) -> None:
    async with WireServer(by_path(answers)) as server:
        assert await discover({kind: server.port}) == [DiscoveredBackend(kind, name, server.url) for name in found]


def test_every_kind_with_a_server_is_looked_for() -> None:
    assert PORTS.keys() == FINDERS.keys()


@pytest.mark.parametrize(
    ("model", "name"),
    [("openai/gpt-oss-20b", "gpt-oss-20b"), (FOLDER, "gpt-oss-20b-MXFP4-Q8"), ("gpt-oss:20b", "gpt-oss:20b")],
)
def test_clients_see_a_name_and_no_path(model: str, name: str) -> None:
    assert DiscoveredBackend("vllm", model, "http://x").model_name == name
