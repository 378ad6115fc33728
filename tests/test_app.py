"""The whole gateway, built from a configuration: what it refuses to build, what it answers, what it keeps closed."""

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
from fastapi import FastAPI

from tests.api.asgi import Exchange
from tests.fakes import FakeMlxServer, FakeVllm
from unisono.app import build
from unisono.config import parse
from unisono.errors import ConfigError, StoreUnavailable
from unisono.harmony.encoding import load_encoding

KEY = "sk-unisono-test"
ANSWER = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
TOKENS = load_encoding().encode_marked(ANSWER)


def entry(name: str, model: str, api_base: str | None = "http://127.0.0.1:9", **rest: Any) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": model, "api_base": api_base}, **rest}


def built(*entries: dict[str, Any], key: str | None = None, **sections: Any) -> FastAPI:
    general = {"general_settings": {"master_key": key}} if key else {}
    kept = {"store": {"url": "memory://"}}
    return build(parse({"model_list": list(entries), **general, **kept, **sections}, {}).config)


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[FastAPI]:
    async with app.router.lifespan_context(app):
        await app.state.gateway.pool.settled(5)
        yield app


async def asked(app: FastAPI, model: str = "gpt-oss", **fields: Any) -> Exchange:
    body = {"model": model, "messages": [{"role": "user", "content": "2+2?"}], **fields}
    return await Exchange(app, "POST", "/v1/chat/completions", json=body).run()


KINDS_THERE = "llamacpp, mlx, mlx_server, ollama, replay, sglang, vllm"
REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "no model": ([], "`model_list` is empty; add a model"),
    "no kind": (
        [entry("gpt-oss", "gpt-oss-20b")],
        "model_list[0].litellm_params.model: must be `<backend kind>/<model>`, not `gpt-oss-20b`; "
        f"kinds: {KINDS_THERE}",
    ),
    "no model behind the kind": (
        [entry("gpt-oss", "vllm/")],
        f"model_list[0].litellm_params.model: must be `<backend kind>/<model>`, not `vllm/`; kinds: {KINDS_THERE}",
    ),
    "a foreign provider": (
        [entry("a", "vllm/gpt-oss"), entry("b", "openai/gpt-4o")],
        f"model_list[1].litellm_params.model: `openai` is not a backend kind of Unisono ({KINDS_THERE}), and litellm, "
        "which serves other providers, is not installed; run `pip install 'unisono[litellm]'`.",
    ),
    "a gpt-oss taken for a foreign provider": (
        [entry("a", "openai/openai/gpt-oss-20b")],
        f"model_list[0].litellm_params.model: `openai` is not a backend kind of Unisono ({KINDS_THERE}), and litellm, "
        "which serves other providers, is not installed; run `pip install 'unisono[litellm]'`. Or if api_base is your "
        "own server, use its backend kind to serve the model as Harmony, such as `model: vllm/openai/gpt-oss-20b`.",
    ),
    "Harmony of a foreign provider": (
        [entry("a", "openai/some", model_info={"harmony": True})],
        "model_list[0].litellm_params.model: unknown backend kind `openai`, so the model cannot be served as Harmony; "
        f"kinds: {KINDS_THERE} (and hosted_vllm, ollama_chat)",
    ),
    "a setting its adapter does not know": (
        [entry("gpt-oss", "vllm/a", unisono={"backend": {"stream_interval": 4, "batch": 2}})],
        "model_list[0].unisono.backend.batch: unknown key `batch` for the vllm adapter",
    ),
    "a setting its adapter refuses": (
        [entry("gpt-oss", "vllm/a", unisono={"backend": {"stream_interval": 0}})],
        "model_list[0].unisono.backend.stream_interval: must be a whole number of tokens, 1 or more",
    ),
    "a recovery nobody knows": (
        [entry("gpt-oss", "vllm/a", unisono={"recoveries": {"repetition": "off", "typos": "off"}})],
        "model_list[0].unisono.recoveries.typos: `typos` is not a rule that can be switched off; rules: code-fence, "
        "regenerated-answer, regenerated-call, repetition",
    ),
    "another model": (
        [entry("qwen", "mlx/qwen3")],
        "model_list[0].litellm_params.model: neither `qwen` nor `mlx/qwen3` contains gpt-oss, and `mlx` serves only "
        "Harmony models; if this is one, set `model_info: {harmony: true}`",
    ),
    "one name for two": (
        [entry("gpt-oss", "vllm/a", model_info={"id": "x"}), entry("gpt-oss", "vllm/b", model_info={"id": "x"})],
        "model_list[1].model_info.id: another entry has the name `x` too; set another id",
    ),
    "no address": (
        [entry("gpt-oss", "vllm/a", None)],
        "model_list[0].litellm_params.api_base: missing; this backend kind needs the address of its server",
    ),
}


@pytest.mark.parametrize(("entries", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused_by_its_path(entries: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        built(*entries)
    assert str(refused.value) == message


def test_a_kind_whose_adapter_is_not_installed_is_refused_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [point for point in entry_points(group="unisono.backends") if point.name != "sglang"]
    monkeypatch.setattr("unisono.bootstrap.adapter_factories.entry_points", lambda group: there)
    with pytest.raises(ConfigError) as refused:
        built(entry("gpt-oss", "sglang/gpt-oss"))
    assert str(refused.value) == (
        "model_list[0].litellm_params.model: no adapter is installed for the backend kind `sglang`; kinds: "
        f"{KINDS_THERE.replace('sglang, ', '')} (and hosted_vllm, ollama_chat)"
    )


async def test_a_question_gets_its_answer_from_whatever_backend_there_is() -> None:
    async with FakeVllm(tokens=TOKENS) as vllm, FakeMlxServer(text=ANSWER.removesuffix("<|return|>")) as mlx:
        app = built(
            entry("gpt-oss", "hosted_vllm/tiny", f"{vllm.url}/v1"),
            entry("gpt-oss", "mlx_server/any", mlx.url),
        )
        async with running(app):
            answers = [await asked(app) for _ in range(4)]
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == ["Four."] * 4
    assert {answer.headers["x-unisono-backend"] for answer in answers} == {"vllm-1", "mlx_server-1"}


async def test_a_broken_backend_is_replaced_and_then_rests() -> None:
    async with FakeVllm(tokens=TOKENS) as vllm:
        app = built(
            entry("gpt-oss", "vllm/tiny", "http://127.0.0.1:9", model_info={"id": "broken"}),
            entry("gpt-oss", "vllm/tiny", vllm.url, model_info={"id": "works"}),
            router_settings={"allowed_fails": 0, "cooldown_time": 60},
        )
        async with running(app):
            answers = [await asked(app) for _ in range(4)]
    assert {answer.headers["x-unisono-backend"] for answer in answers} == {"works"}
    # Not even one, where the probe was faster than the first request.
    assert sum(answer.json()["unisono"]["failovers"] for answer in answers) <= 1


async def test_names_lead_to_their_group_and_settings() -> None:
    async with FakeVllm(tokens=TOKENS) as vllm:
        app = built(
            entry("gpt-oss", "vllm/tiny", vllm.url, unisono={"reasoning_field": "reasoning"}),
            entry("*", "vllm/tiny", vllm.url, model_info={"harmony": True}, unisono={"reasoning_field": "none"}),
            router_settings={"model_group_alias": {"gpt-4o": "gpt-oss"}},
        )
        async with running(app):
            shown = {name: (await asked(app, name)).json() for name in ("gpt-oss", "gpt-4o", "anything")}
            listed = (await Exchange(app, "GET", "/v1/models").run()).json()
    messages = {name: answer["choices"][0]["message"] for name, answer in shown.items()}
    assert messages["gpt-oss"]["reasoning"] == messages["gpt-4o"]["reasoning"] == "Easy."
    assert "reasoning_content" not in messages["gpt-4o"]
    assert "reasoning" not in messages["anything"]
    assert [shown[name]["model"] for name in shown] == list(shown)
    assert [(model["id"], model["context_length"]) for model in listed["data"]] == [
        ("gpt-oss", 131072),
        ("gpt-4o", 131072),
    ]


async def test_an_unknown_model_is_a_404_and_reaches_no_backend() -> None:
    async with FakeVllm(tokens=TOKENS) as vllm:
        async with running(built(entry("gpt-oss", "vllm/tiny", vllm.url))) as app:
            answer = await asked(app, "gpt-5")
        assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert vllm.requests == []


async def test_readiness_tells_counts_and_codes_and_nothing_else() -> None:
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
async def test_a_store_that_is_down_is_a_reason_and_nothing_that_needs_no_state_fails() -> None:
    async with (
        FakeVllm(tokens=TOKENS) as vllm,
        running(built(entry("gpt-oss", "vllm/tiny", vllm.url), store=NO_STORE)) as app,
    ):
        answer, ready = await asked(app), await Exchange(app, "GET", "/health/readiness").run()
        with pytest.raises(StoreUnavailable):
            await app.state.gateway.salt()
    assert answer.status == 200
    assert ready.status == 200
    assert set(ready.json()["reasons"]) - {"usage_unaccounted"} == {"store_unavailable"}


async def test_state_is_in_the_configured_store_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    "no address": "x",
    "another database": "postgres://x",
    "a password that is not encoded": "redis://u:pa/ss@x",
    "several hosts and such a password": "redis+sentinel://a:canary,b/name",
}


@pytest.mark.parametrize("url", BAD_STORES.values(), ids=BAD_STORES)
def test_a_store_that_cannot_be_meant_is_refused_by_its_path(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^store\.url: ") as refused:
        built(entry("gpt-oss", "vllm/a"), store={"url": url})
    assert "pa" not in str(refused.value).replace("password", "").replace("path", "")
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize("path", ["/health/liveliness", "/health/liveness"])
async def test_liveness_needs_no_key_and_no_backend(path: str) -> None:
    answer = await Exchange(built(entry("gpt-oss", "vllm/a"), key=KEY), "GET", path).run()
    assert (answer.status, answer.json()) == (200, {"status": "alive"})


def paths_of(app: FastAPI) -> list[str]:
    """Every path of the application."""
    return sorted({str(getattr(route, "path", "")).replace("{model:path}", "gpt-oss") for route in app.routes})


OPEN = {"/health/liveliness", "/health/liveness", "/health/readiness", "/"}
DISGUISES = {
    "as it is": "{path}",
    "doubled slash": "/{path}",
    "through a parent": "/health/..{path}",
    "behind an open path": "/health/liveness/..{path}",
    "with a trailing slash": "{path}/",
    "as an absolute target": "http://localhost:4000/health/liveness{path}",
}
HOSTS = ["localhost:4000", "x/health/liveness?y=", "localhost:4000/health/liveness", ""]
KEYS: dict[str, list[tuple[str, str]]] = {
    "no key": [],
    "wrong key": [("authorization", f"Bearer {KEY}x")],
    "the key in another scheme": [("authorization", f"Basic {KEY}")],
    "the key twice": [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")],
    "a proxy's word": [("x-forwarded-for", "127.0.0.1"), ("x-forwarded-host", "localhost"), ("x-original-url", "/")],
}


@pytest.mark.parametrize("headers", KEYS.values(), ids=KEYS)
async def test_no_path_but_health_and_the_page_opens_without_the_key(headers: list[tuple[str, str]]) -> None:
    app = built(entry("gpt-oss", "vllm/a"), key=KEY)
    paths = [path for path in paths_of(app) if path not in OPEN]
    assert {"/v1/chat/completions", "/v1/models", "/model/info"} < set(paths)
    for path, disguise, host in product([*paths, "/docs", "/openapi.json"], DISGUISES.values(), HOSTS):
        for method in ("GET", "POST", "OPTIONS"):
            answer = await Exchange(app, method, disguise.format(path=path), headers=[("host", host), *headers]).run()
            assert answer.status == 401, (method, disguise, path, host)


async def test_the_key_opens() -> None:
    app = built(entry("gpt-oss", "vllm/a"), key=KEY)
    answer = await Exchange(app, "GET", "/v1/models", headers=[("authorization", f"Bearer {KEY}")]).run()
    assert answer.status == 200


async def test_no_page_lists_the_paths_even_with_the_key() -> None:
    app = built(entry("gpt-oss", "vllm/a"), key=KEY)
    for path in ("/docs", "/redoc"):
        answer = await Exchange(app, "GET", path, headers=[("authorization", f"Bearer {KEY}")]).run()
        assert answer.status == 404


async def test_the_configured_limits_are_the_ones_in_force() -> None:
    app = built(entry("gpt-oss", "vllm/a"), unisono={"max_body_bytes": 100, "cors_origins": ["https://a.example"]})
    assert (await asked(app, padding="x" * 100)).status == 413
    shared = await Exchange(app, "GET", "/v1/models", headers=[("origin", "https://a.example")]).run()
    assert shared.headers["access-control-allow-origin"] == "https://a.example"


async def test_a_full_backend_makes_others_wait_and_then_says_busy() -> None:
    async with FakeVllm(tokens=TOKENS, first_delay_s=0.5) as vllm:
        one = entry("gpt-oss", "vllm/tiny", vllm.url)
        one["litellm_params"]["max_parallel_requests"] = 1
        app = built(one, unisono={"max_queue": 0})
        async with running(app):
            body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "2+2?"}]}
            first = Exchange(app, "POST", "/v1/chat/completions", json=body).start()
            await vllm.asked(1)
            second = await asked(app)
            await first.ended()
    assert first.status == 200
    assert (second.status, second.json()["error"]["code"]) == (503, "backend_overloaded")
    assert "retry-after" in second.headers


QUIET = """
import sys, time
seen = []
outside = ("socket.", "subprocess.", "urllib.", "os.fork", "os.exec", "os.posix_spawn")
sys.addaudithook(lambda name, args: seen.append(name) if name.startswith(outside) else None)
began = time.perf_counter()
import unisono
import unisono.app
took = time.perf_counter() - began
imported = list(seen)
early = [name for name in ("redis", "sqlite3", "cryptography", "websockets", "mcp") if name in sys.modules]
from unisono.config import parse
model = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/a", "api_base": "http://192.0.2.1:8000"}}
unisono.app.build(parse({"model_list": [model]}, {}).config)
unisono.app.build(parse({"model_list": [model], "store": {"url": "redis://192.0.2.1"}}, {}).config)
other = {"model_name": "qwen", "litellm_params": {"model": "vllm/qwen", "api_base": "http://192.0.2.1:8000"}}
unisono.app.build(parse({"model_list": [model, other]}, {}).config)
late = ("unisono.passthrough.providers", "litellm")
heavy = [name for name in (*late, "mlx", "mlx_lm", "numpy", "transformers") if name in sys.modules]
import json
print(json.dumps({"imported": imported, "built": seen, "heavy": heavy, "early": early, "took": took}))
"""


def test_importing_and_building_touch_no_network_and_no_model() -> None:
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, check=True, timeout=60)
    took = time.perf_counter() - began
    found = json.loads(done.stdout)
    assert found["imported"] == []
    assert found["built"] == []
    assert found["heavy"] == []
    assert found["early"] == []
    # Far from what it takes (half a second each), near enough to notice a library that phones or compiles at import.
    assert found["took"] < 20
    assert took < 40


STARTED = """
import asyncio, json, sys
import unisono.app
from unisono.config import parse
config = json.loads(sys.argv[1])
app = unisono.app.build(parse(config, {}).config)
async def started():
    built = "mcp" in sys.modules
    async with app.router.lifespan_context(app):
        print(json.dumps([built, "mcp" in sys.modules, "unisono.mcp.calls" in sys.modules]))
asyncio.run(started())
"""
MODEL_LIST = [{"model_name": "gpt-oss", "litellm_params": {"model": "vllm/a", "api_base": "http://127.0.0.1:9"}}]
TOOLS_NAMED: dict[str, tuple[dict[str, Any], bool]] = {
    "no tool servers": ({}, False),
    "the operator's": ({"mcp_servers": {"docs": {"url": "http://127.0.0.1:9/mcp"}}}, True),
    "those of requests": ({"unisono": {"mcp_allowed_hosts": ["mcp.example.com"]}}, True),
}


@pytest.mark.slow
@pytest.mark.parametrize(("sections", "loaded"), TOOLS_NAMED.values(), ids=TOOLS_NAMED)
def test_what_talks_to_tool_servers_is_loaded_at_start_where_there_are_some(
    sections: dict[str, Any], loaded: bool
) -> None:
    config = json.dumps({"model_list": MODEL_LIST, "store": {"url": "memory://"}, **sections})
    asked = [sys.executable, "-c", STARTED, config]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [False, loaded, loaded]


DATES: dict[str, tuple[dict[str, Any], str]] = {
    "fixed": ({"current_date": "2026-01-31"}, "Current date: 2026-01-31\n"),
    "as YAML has it": ({"current_date": date(2026, 1, 31)}, "Current date: 2026-01-31\n"),
    "none": ({"current_date": "none"}, "Knowledge cutoff: 2024-06\n\nReasoning"),
    "today": ({}, f"Current date: {datetime.now(UTC).date()}\n"),
}


@pytest.mark.parametrize(("settings", "line"), DATES.values(), ids=DATES)
async def test_prompts_tell_the_day_as_configured(settings: dict[str, Any], line: str) -> None:
    async with FakeVllm(tokens=TOKENS) as fake:
        app = built(entry("gpt-oss", "vllm/tiny", fake.url), unisono=settings)
        async with running(app):
            await asked(app)
        assert line in load_encoding().decode(fake.requests[-1].json["prompt"])
