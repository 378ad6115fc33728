"""The gateway built from a configuration: rejected configurations, requests, access control, imports."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from importlib.metadata import entry_points
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.api.asgi import Exchange
from tests.fakes import FakeMlxServer, FakeVllm
from unisono.api.layered_app import LayeredApp
from unisono.app import build
from unisono.bootstrap import deployments
from unisono.bootstrap.deployments import build_pool
from unisono.bootstrap.fastapi_routes import ROUTES
from unisono.config import ModelRegistry, parse
from unisono.errors import ConfigError, StoreUnavailable
from unisono.harmony.encoding import load_encoding

KEY = "sk-unisono-test"
ANSWER = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
TOKENS = load_encoding().encode_marked(ANSWER)


def entry(name: str, model: str, api_base: str | None = "http://127.0.0.1:9", **rest: Any) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": model, "api_base": api_base}, **rest}


def built(*entries: dict[str, Any], key: str | None = None, **sections: Any) -> LayeredApp:
    general = {"general_settings": {"master_key": key}} if key else {}
    store = {"store": {"url": "memory://"}}
    return build(parse({"model_list": list(entries), **general, **store, **sections}, {}).config)


@asynccontextmanager
async def running(app: LayeredApp) -> AsyncIterator[LayeredApp]:
    async with app.lifespan():
        await app.state.gateway.pool.wait_for_probes(5)
        yield app


async def chat(app: LayeredApp, model: str = "gpt-oss", **fields: Any) -> Exchange:
    body = {"model": model, "messages": [{"role": "user", "content": "2+2?"}], **fields}
    return await Exchange(app, "POST", "/v1/chat/completions", json=body).run()


KINDS = "llamacpp, mlx, mlx_server, ollama, replay, sglang, vllm"
REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "no model": ([], "`model_list` is empty; add a model"),
    "missing backend kind": (
        [entry("gpt-oss", "gpt-oss-20b")],
        f"model_list[0].litellm_params.model: must be `<backend kind>/<model>`, not `gpt-oss-20b`; kinds: {KINDS}",
    ),
    "backend kind without a model": (
        [entry("gpt-oss", "vllm/")],
        f"model_list[0].litellm_params.model: must be `<backend kind>/<model>`, not `vllm/`; kinds: {KINDS}",
    ),
    "provider of litellm": (
        [entry("a", "vllm/gpt-oss"), entry("b", "openai/gpt-4o")],
        f"model_list[1].litellm_params.model: `openai` is not a backend kind of Unisono ({KINDS}), and litellm, "
        "which serves other providers, is not installed; run `pip install 'litellm!=1.82.7,!=1.82.8,>=1.90'`.",
    ),
    "gpt-oss with a provider prefix": (
        [entry("a", "openai/openai/gpt-oss-20b")],
        f"model_list[0].litellm_params.model: `openai` is not a backend kind of Unisono ({KINDS}), and litellm, "
        "which serves other providers, is not installed; run `pip install 'litellm!=1.82.7,!=1.82.8,>=1.90'`. Or "
        "if api_base is your own server, write the backend kind of the server instead of `openai`, such as "
        "`model: vllm/openai/gpt-oss-20b`; only then does the gateway use Harmony.",
    ),
    "Harmony model of an unknown kind": (
        [entry("a", "openai/some", model_info={"harmony": True})],
        "model_list[0].litellm_params.model: unknown backend kind `openai`, so the model cannot be served as Harmony; "
        f"kinds: {KINDS} (and hosted_vllm, ollama_chat)",
    ),
    "unknown adapter setting": (
        [entry("gpt-oss", "vllm/a", unisono={"backend": {"stream_interval": 4, "batch": 2}})],
        "model_list[0].unisono.backend.batch: the vllm adapter has no setting `batch`; remove it",
    ),
    "invalid adapter setting": (
        [entry("gpt-oss", "vllm/a", unisono={"backend": {"stream_interval": 0}})],
        "model_list[0].unisono.backend.stream_interval: must be a whole number of tokens, 1 or more",
    ),
    "unknown recovery": (
        [entry("gpt-oss", "vllm/a", unisono={"recoveries": {"repetition": "off", "typos": "off"}})],
        "model_list[0].unisono.recoveries.typos: `typos` is not a rule that can be switched off; use one of: "
        "code-fence, dangling-preamble, regenerated-answer, regenerated-call, repetition, undeclared-tool",
    ),
    "model other than gpt-oss": (
        [entry("qwen", "mlx/qwen3")],
        "model_list[0].litellm_params.model: neither `qwen` nor `mlx/qwen3` contains gpt-oss, and `mlx` serves only "
        "Harmony models; if this is a Harmony model, set `model_info: {harmony: true}`",
    ),
    "duplicate deployment id": (
        [entry("gpt-oss", "vllm/a", model_info={"id": "x"}), entry("gpt-oss", "vllm/b", model_info={"id": "x"})],
        "model_list[1].model_info.id: the id `x` is already used by another entry; set a different id",
    ),
    "missing api_base": (
        [entry("gpt-oss", "vllm/a", None)],
        "model_list[0].litellm_params.api_base: missing; set the address of the backend server",
    ),
    "api_base with a query": (
        [entry("gpt-oss", "vllm/a", "http://h:8000/v1?key=1")],
        "model_list[0].litellm_params.api_base: must not contain `?` or `#`; set only the address of the server",
    ),
    "api_base with a fragment": (
        [entry("gpt-oss", "vllm/a", "http://h:8000/#/models")],
        "model_list[0].litellm_params.api_base: must not contain `?` or `#`; set only the address of the server",
    ),
}


@pytest.mark.parametrize(("entries", "message"), REFUSED.values(), ids=REFUSED)
def test_an_entry_that_cannot_be_served_is_rejected_with_its_path(entries: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        built(*entries)
    assert str(refused.value) == message


def test_a_kind_without_an_installed_adapter_is_rejected_with_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {point.name: point for point in entry_points(group="unisono.backends") if point.name != "sglang"}
    monkeypatch.setattr("unisono.bootstrap.deployments._installed", lambda group: installed)
    with pytest.raises(ConfigError) as refused:
        built(entry("gpt-oss", "sglang/gpt-oss"))
    assert str(refused.value) == (
        "model_list[0].litellm_params.model: no adapter is installed for the backend kind `sglang`; kinds: "
        f"{KINDS.replace('sglang, ', '')} (and hosted_vllm, ollama_chat)"
    )


async def test_a_reload_finds_an_adapter_that_was_installed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [point for point in entry_points(group="unisono.backends") if point.name != "sglang"]
    monkeypatch.setattr("unisono.bootstrap.deployments.entry_points", lambda group: installed)
    deployments._installed.cache_clear()
    before, after = (
        parse({"model_list": [entry("gpt-oss", f"{kind}/gpt-oss")]}, {}).config for kind in ("vllm", "sglang")
    )
    try:
        pool = build_pool(before, ModelRegistry(before))
        installed += [*entry_points(group="unisono.backends", name="sglang")]
        reloaded = build_pool(after, ModelRegistry(after), keep=pool)
    finally:
        deployments._installed.cache_clear()
    assert [status.name for status in reloaded.status()] == ["sglang-1"]


async def test_metrics_and_fidelity_use_the_names_after_a_reload() -> None:
    async with FakeVllm(tokens=TOKENS) as first, FakeVllm(tokens=TOKENS) as second, FakeVllm(tokens=TOKENS) as third:
        # Deployments without an id are named by their position.
        entries = [entry("gpt-oss", "vllm/tiny", fake.url) for fake in (first, second, third)]
        before, after = (
            parse({"model_list": kept, "unisono": {"fidelity": {"gpt-oss": {"reference": reference}}}}, {}).config
            for kept, reference in ((entries, "vllm-3"), (entries[1:], "vllm-1"))
        )
        async with running(build(before)) as old, running(build(after, keep=old.state.gateway)) as new:
            page = await new.state.gateway.parts.observing.metrics_page()
            [model] = new.state.gateway.pool.members().values()
    up = {line for line in page.decode().splitlines() if line.startswith("unisono_backend_up{")}
    assert up == {f'unisono_backend_up{{backend="vllm-{number}",model="gpt-oss"}} 1.0' for number in (1, 2)}
    compared = [(live.name, live.fidelity and live.fidelity.reference) for live in model]
    assert compared == [("vllm-1", None), ("vllm-2", "vllm-1")]


async def test_requests_are_answered_by_backends_of_different_kinds() -> None:
    async with FakeVllm(tokens=TOKENS) as vllm, FakeMlxServer(text=ANSWER.removesuffix("<|return|>")) as mlx:
        app = built(
            entry("gpt-oss", "hosted_vllm/tiny", f"{vllm.url}/v1"),
            entry("gpt-oss", "mlx_server/any", mlx.url),
        )
        async with running(app):
            answers = [await chat(app) for _ in range(4)]
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == ["Four."] * 4
    assert {answer.headers["x-unisono-backend"] for answer in answers} == {"vllm-1", "mlx_server-1"}


async def test_a_broken_backend_fails_over_and_enters_cooldown() -> None:
    async with FakeVllm(tokens=TOKENS) as vllm:
        app = built(
            entry("gpt-oss", "vllm/tiny", "http://127.0.0.1:9", model_info={"id": "broken"}),
            entry("gpt-oss", "vllm/tiny", vllm.url, model_info={"id": "works"}),
            router_settings={"allowed_fails": 0, "cooldown_time": 60},
        )
        async with running(app):
            answers = [await chat(app) for _ in range(4)]
    assert {answer.headers["x-unisono-backend"] for answer in answers} == {"works"}
    # No failover at all if the health probe is faster than the first request.
    assert sum(answer.json()["unisono"]["failovers"] for answer in answers) <= 1


async def test_model_names_resolve_to_their_group_and_settings() -> None:
    async with FakeVllm(tokens=TOKENS) as vllm:
        app = built(
            entry("gpt-oss", "vllm/tiny", vllm.url, unisono={"reasoning_field": "reasoning"}),
            entry("*", "vllm/tiny", vllm.url, model_info={"harmony": True}, unisono={"reasoning_field": "none"}),
            router_settings={"model_group_alias": {"gpt-4o": "gpt-oss"}},
        )
        async with running(app):
            responses = {name: (await chat(app, name)).json() for name in ("gpt-oss", "gpt-4o", "anything")}
            listed = (await Exchange(app, "GET", "/v1/models").run()).json()
    messages = {name: answer["choices"][0]["message"] for name, answer in responses.items()}
    assert messages["gpt-oss"]["reasoning"] == messages["gpt-4o"]["reasoning"] == "Easy."
    assert "reasoning_content" not in messages["gpt-4o"]
    assert "reasoning" not in messages["anything"]
    assert [responses[name]["model"] for name in responses] == list(responses)
    assert [(model["id"], model["context_length"]) for model in listed["data"]] == [
        ("gpt-oss", 131072),
        ("gpt-4o", 131072),
    ]


async def test_an_unknown_model_returns_404_without_a_backend_request() -> None:
    async with FakeVllm(tokens=TOKENS) as vllm:
        async with running(built(entry("gpt-oss", "vllm/tiny", vllm.url))) as app:
            answer = await chat(app, "gpt-5")
        assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert vllm.requests == []


async def test_readiness_returns_only_counts_and_reason_codes() -> None:
    async with FakeVllm(tokens=TOKENS) as vllm:
        works = entry("gpt-oss-secret-name", "vllm/tiny", vllm.url)
        broken = entry("gpt-oss-other", "vllm/tiny")
        for entries, status, body in (
            ([works], 200, {"status": "ready", "models": {"ready": 1, "total": 1}, "reasons": []}),
            (
                [works, broken],
                200,
                {"status": "ready", "models": {"ready": 1, "total": 2}, "reasons": ["backend_unavailable"]},
            ),
            (
                [broken],
                503,
                {"status": "not ready", "models": {"ready": 0, "total": 1}, "reasons": ["backend_unavailable"]},
            ),
        ):
            async with running(built(*entries, key=KEY)) as app:
                answer = await Exchange(app, "GET", "/health/readiness").run()
            assert (answer.status, answer.json()) == (status, body)


NO_STORE = {"url": "redis://127.0.0.1:9/0"}


@pytest.mark.slow
async def test_stateless_requests_succeed_when_the_store_is_down() -> None:
    async with (
        FakeVllm(tokens=TOKENS) as vllm,
        running(built(entry("gpt-oss", "vllm/tiny", vllm.url), store=NO_STORE)) as app,
    ):
        answer, ready = await chat(app), await Exchange(app, "GET", "/health/readiness").run()
        with pytest.raises(StoreUnavailable):
            await app.state.gateway.salt()
    assert answer.status == 200
    assert ready.status == 200
    assert set(ready.json()["reasons"]) - {"usage_unaccounted"} == {"store_unavailable"}


async def test_state_is_written_to_the_configured_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for sections, path in (
        ({"store": {"url": f"sqlite://{tmp_path}/own/state.db"}}, tmp_path / "own" / "state.db"),
        ({"store": {}}, tmp_path / "data" / "unisono" / "state.db"),
    ):
        assert not path.exists()
        async with running(built(entry("gpt-oss", "vllm/a"), **sections)) as app:
            first = await app.state.gateway.salt()
        async with running(built(entry("gpt-oss", "vllm/a"), **sections)) as app:
            assert await app.state.gateway.salt() == first
        assert path.stat().st_mode & 0o077 == 0
    async with running(built(entry("gpt-oss", "vllm/a"), unisono={"salt_key": "salt-of-this-gateway"})) as app:
        assert await app.state.gateway.salt() == b"salt-of-this-gateway"


BAD_STORES = {
    "missing scheme": "x",
    "unsupported database": "postgres://x",
    "unencoded password": "redis://u:pa/ss@x",
    "several hosts with an unencoded password": "redis+sentinel://a:canary,b/name",
}


@pytest.mark.parametrize("url", BAD_STORES.values(), ids=BAD_STORES)
def test_an_invalid_store_url_is_rejected_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^store\.url: ") as refused:
        built(entry("gpt-oss", "vllm/a"), store={"url": url})
    assert "pa" not in str(refused.value).replace("password", "").replace("path", "")
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize("path", ["/health/liveliness", "/health/liveness"])
async def test_liveness_needs_no_key_and_no_backend(path: str) -> None:
    answer = await Exchange(built(entry("gpt-oss", "vllm/a"), key=KEY), "GET", path).run()
    assert (answer.status, answer.json()) == (200, {"status": "alive"})


def all_paths() -> list[str]:
    """Return all route paths of a gateway."""
    return sorted({str(getattr(route, "path", "")).replace("{model:path}", "gpt-oss") for route in ROUTES})


PUBLIC_PATHS = {"/health/liveliness", "/health/liveness", "/health/readiness", "/", "/docs", "/ping"}
DISGUISES = {
    "unchanged": "{path}",
    "doubled slash": "/{path}",
    "parent folder segment": "/health/..{path}",
    "parent segment after a public path": "/health/liveness/..{path}",
    "trailing slash": "{path}/",
    "absolute request target": "http://localhost:4000/health/liveness{path}",
}
HOSTS = ["localhost:4000", "x/health/liveness?y=", "localhost:4000/health/liveness", ""]
KEYS: dict[str, list[tuple[str, str]]] = {
    "no key": [],
    "wrong key": [("authorization", f"Bearer {KEY}x")],
    "key in another scheme": [("authorization", f"Basic {KEY}")],
    "key sent twice": [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")],
    "forwarding headers": [
        ("x-forwarded-for", "127.0.0.1"),
        ("x-forwarded-host", "localhost"),
        ("x-original-url", "/"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("headers", KEYS.values(), ids=KEYS)
async def test_only_health_and_the_web_page_are_served_without_the_key(headers: list[tuple[str, str]]) -> None:
    unlimited = {"failed_authentication": {"max_per_minute": 0}}
    app = built(entry("gpt-oss", "vllm/a"), key=KEY, unisono=unlimited)
    paths = [path for path in all_paths() if path not in PUBLIC_PATHS]
    assert {"/v1/chat/completions", "/v1/models", "/model/info"} < set(paths)
    # The key is checked before any route, so a few paths suffice for the disguises.
    plain = ((path, "{path}", HOSTS[0]) for path in [*paths, "/redoc", "/openapi.json"])
    for path, disguise, host in (*plain, *product(paths[::10], DISGUISES.values(), HOSTS)):
        for method in ("GET", "POST", "OPTIONS"):
            answer = await Exchange(app, method, disguise.format(path=path), headers=[("host", host), *headers]).run()
            assert answer.status == 401, (method, disguise, path, host)


async def test_the_master_key_is_accepted() -> None:
    app = built(entry("gpt-oss", "vllm/a"), key=KEY)
    answer = await Exchange(app, "GET", "/v1/models", headers=[("authorization", f"Bearer {KEY}")]).run()
    assert answer.status == 200


async def test_the_documentation_pages_of_the_framework_are_not_served() -> None:
    app = built(entry("gpt-oss", "vllm/a"), key=KEY)
    headers = [("authorization", f"Bearer {KEY}")]
    assert (await Exchange(app, "GET", "/redoc", headers=headers).run()).status == 404
    # This page loads its scripts from another host.
    assert b"swagger" not in (await Exchange(app, "GET", "/docs", headers=headers).run()).body


async def test_configured_body_limit_and_cors_origins_apply() -> None:
    app = built(entry("gpt-oss", "vllm/a"), unisono={"max_body_bytes": 100, "cors_origins": ["https://a.example"]})
    assert (await chat(app, padding="x" * 100)).status == 413
    shared = await Exchange(app, "GET", "/v1/models", headers=[("origin", "https://a.example")]).run()
    assert shared.headers["access-control-allow-origin"] == "https://a.example"
    asked = [("origin", "https://a.example"), ("access-control-request-method", "PATCH")]
    preflight = await Exchange(app, "OPTIONS", "/model/x/update", headers=asked).run()
    assert preflight.headers["access-control-allow-methods"] == "DELETE, GET, HEAD, PATCH, POST"


async def test_a_request_is_rejected_as_overloaded_when_slots_and_queue_are_full() -> None:
    async with FakeVllm(tokens=TOKENS, first_delay_s=0.5) as vllm:
        deployment = entry("gpt-oss", "vllm/tiny", vllm.url)
        deployment["litellm_params"]["max_parallel_requests"] = 1
        app = built(deployment, unisono={"max_queue": 0})
        async with running(app):
            body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "2+2?"}]}
            first = Exchange(app, "POST", "/v1/chat/completions", json=body).start()
            await vllm.asked(1)
            second = await chat(app)
            await first.ended()
    assert first.status == 200
    assert (second.status, second.json()["error"]["code"]) == (503, "backend_overloaded")
    assert "retry-after" in second.headers


IMPORT_AND_BUILD = """
import sys, time
seen = []
outside = ("socket.", "subprocess.", "urllib.", "os.fork", "os.exec", "os.posix_spawn")
sys.addaudithook(lambda name, args: seen.append(name) if name.startswith(outside) else None)
began = time.perf_counter()
import unisono
import unisono.app
import unisono.cli.serve
took = time.perf_counter() - began
imported = list(seen)
first_use = ("redis", "sqlite3", "cryptography", "websockets", "mcp", "difflib", "backports.zstd", "compression.zstd",
    "unisono.api.responses.schema", "unisono.api.messages.schema", "fastapi")
early = [name for name in first_use if name in sys.modules]
from unisono.config import parse
model = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/a", "api_base": "http://192.0.2.1:8000"}}
unisono.app.build(parse({"model_list": [model]}, {}).config)
unisono.app.build(parse({"model_list": [model], "store": {"url": "redis://192.0.2.1"}}, {}).config)
other = {"model_name": "qwen", "litellm_params": {"model": "vllm/qwen", "api_base": "http://192.0.2.1:8000"}}
unisono.app.build(parse({"model_list": [model, other]}, {}).config)
late = ("unisono.passthrough.litellm_backend", "litellm")
heavy = [name for name in (*late, "mlx", "mlx_lm", "numpy", "transformers") if name in sys.modules]
import json
print(json.dumps({"imported": imported, "built": seen, "heavy": heavy, "early": early, "took": took}))
"""


def test_import_and_build_use_no_network_and_no_heavy_library() -> None:
    started_at = time.perf_counter()
    completed = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_BUILD], capture_output=True, text=True, check=True, timeout=60
    )
    duration_s = time.perf_counter() - started_at
    report = json.loads(completed.stdout)
    assert report["imported"] == []
    assert report["built"] == []
    assert report["heavy"] == []
    assert report["early"] == []
    # Each step takes about half a second; a library that uses the network or compiles at import takes longer.
    assert report["took"] < 20
    assert duration_s < 40


IMPORTS_AT_START = """
import asyncio, json, sys
import unisono.app
from unisono.config import parse
config = json.loads(sys.argv[1])
app = unisono.app.build(parse(config, {}).config)
async def started():
    built = "mcp" in sys.modules
    async with app.lifespan():
        print(json.dumps([built, "mcp" in sys.modules, "unisono.mcp.calls" in sys.modules]))
asyncio.run(started())
"""
MODEL_LIST = [{"model_name": "gpt-oss", "litellm_params": {"model": "vllm/a", "api_base": "http://127.0.0.1:9"}}]
TOOL_SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "no tool servers": ({}, False),
    "configured tool server": ({"mcp_servers": {"docs": {"url": "http://127.0.0.1:9/mcp"}}}, True),
    "tool servers of requests": ({"unisono": {"mcp_allowed_hosts": ["mcp.example.com"]}}, True),
}


@pytest.mark.slow
@pytest.mark.parametrize(("sections", "loaded"), TOOL_SETTINGS.values(), ids=TOOL_SETTINGS)
def test_the_mcp_client_is_imported_at_start_only_with_tool_servers(sections: dict[str, Any], loaded: bool) -> None:
    config = json.dumps({"model_list": MODEL_LIST, "store": {"url": "memory://"}, **sections})
    command = [sys.executable, "-c", IMPORTS_AT_START, config]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(completed.stdout) == [False, loaded, loaded]


TODAY = "the date of the run"
DATES: dict[str, tuple[dict[str, Any], str]] = {
    "fixed": ({"current_date": "2026-01-31"}, "Current date: 2026-01-31\n"),
    "YAML date": ({"current_date": date(2026, 1, 31)}, "Current date: 2026-01-31\n"),
    "none": ({"current_date": "none"}, "Knowledge cutoff: 2024-06\n\nReasoning"),
    "today": ({}, f"Current date: {TODAY}\n"),
}


@pytest.mark.parametrize(("settings", "line"), DATES.values(), ids=DATES)
async def test_prompts_contain_the_configured_date(settings: dict[str, Any], line: str) -> None:
    async with FakeVllm(tokens=TOKENS) as fake:
        app = built(entry("gpt-oss", "vllm/tiny", fake.url), unisono=settings)
        before = datetime.now(UTC)
        async with running(app):
            await chat(app)
        prompt = load_encoding().decode(fake.requests[-1].json["prompt"])
    # The request may be rendered on the day after it was sent.
    dates = {str(now.date()) for now in (before, datetime.now(UTC))}
    assert any(line.replace(TODAY, day) in prompt for day in dates)
