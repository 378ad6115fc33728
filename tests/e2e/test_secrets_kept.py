"""Planted secrets never appear in logs, metrics, spans, errors, recordings or output.

Tested while requests succeed and while they fail. Recordings contain the conversation on purpose, but no other
secrets.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
import redis
from click.testing import CliRunner

from tests.contract.servers import Server
from tests.e2e.collector import collector
from tests.e2e.hosting import calls
from tests.e2e.replicas import replica
from tests.e2e.responses import ANSWER
from tests.e2e.wires import ENCODING
from tests.fakes import FakeVllm, Refusal, VllmScript
from tests.listening import Listener, listening
from tests.mcp.conftest import Upstream
from unisono.cli import main

SECRETS = {
    "master key": "sk-planted-master-1f9a",
    "wrong key": "sk-planted-wrong-77be",
    "backend key": "planted-backend-key-a1",
    "backend user": "planted-user-pass-b2",
    "tool header": "planted-tool-header-d4",
    "tool token": "planted-tool-token-e5",
    "tool query": "planted-tool-query-f6",
    "client tool token": "planted-client-tool-g7",
    "store password": "planted-store-p@ss-h8",
    "collector key": "planted-collector-i9",
    "collector query": "planted-collector-q-j1",
    "salt": "planted-salt-of-this-k2",
    "prompt": "planted-prompt-l3",
    "tool argument": "planted-argument-m4",
    "thought": "planted-thought-n5",
    "answer": "planted-answer-o6",
    "metadata": "planted-metadata-p7",
    "user": "planted-user-q8",
    "hook key": "planted-hook-key-r9",
    "hook password": "planted-hook-p@ss-s1",
    "hook pattern": "planted-pattern-t[0-9]2",
}
# Names of requests, which the access log and the spans contain.
NAMED = frozenset({"user"})
# Values that clients get back because they are theirs.
CLIENT_DATA = {"prompt", "tool argument", "thought", "answer", "metadata", "user"}


def config_with_secrets(
    fake: FakeVllm | Listener, dead: str, upstream: Upstream, spans: str, store: str
) -> dict[str, Any]:
    """Build a configuration with a secret in every place."""
    secrets = SECRETS
    address = fake.url.removeprefix("http://")

    def entry(name: str, base: str, **params: Any) -> dict[str, Any]:
        return {"model_name": name, "litellm_params": {"model": "vllm/tiny", "api_base": base, **params}}

    return {
        "model_list": [
            entry("gpt-oss", fake.url, api_key=secrets["backend key"]),
            entry("gpt-oss-userinfo", f"http://somebody:{secrets['backend user']}@{address}"),
            entry("gpt-oss-dead", dead.replace("//", f"//somebody:{secrets['backend user']}@")),
        ],
        "mcp_servers": {
            "docs": {
                "url": f"{upstream.urls['modern']}?key={secrets['tool query']}",
                "require_approval": "never",
                "static_headers": {"x-secret": secrets["tool header"]},
            },
            "gone": {
                "url": f"{dead}/mcp?key={secrets['tool query']}",
                "auth_type": "bearer_token",
                "authentication_token": secrets["tool token"],
                "require_approval": "never",
            },
        },
        "general_settings": {"master_key": secrets["master key"]},
        "store": {"url": store},
        "unisono": {
            "salt_key": secrets["salt"],
            "log_level": "debug",
            "otel": {
                "endpoint": f"{spans}?k={secrets['collector query']}",
                "headers": {"x-key": secrets["collector key"]},
                "timeout_s": 1,
            },
        },
    }


THOUGHT = f"<|channel|>analysis<|message|>{SECRETS['thought']}<|end|><|start|>assistant"


class LeakProbe:
    """A client with requests of every kind; `errors` and `answers` collect the replies."""

    def __init__(self, url: str, session: aiohttp.ClientSession, key: str = SECRETS["master key"]) -> None:
        self._url = url
        self._session = session
        self._key = {"authorization": f"Bearer {key}"}
        self.errors: list[str] = []
        self.answers: list[str] = []

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> int:
        async with self._session.post(self._url + path, json=body, headers={**self._key, **headers}) as response:
            text = f"{dict(response.headers)} {await response.text()}"
            (self.answers if response.status == 200 else self.errors).append(text)
            return response.status

    async def metrics(self) -> str:
        async with self._session.get(f"{self._url}/metrics", headers=self._key) as response:
            assert response.status == 200
            return await response.text()

    async def send_all(self) -> None:
        docs: dict[str, Any] = {"type": "mcp", "server_label": "docs"}
        client = {**docs, "server_label": "gone", "headers": {"authorization": SECRETS["client tool token"]}}
        messages = [{"role": "user", "content": SECRETS["prompt"]}]
        extra = {"metadata": {"note": SECRETS["metadata"]}, "user": SECRETS["user"]}
        response_body = {"model": "gpt-oss", "input": SECRETS["prompt"], **extra}
        for model in ("gpt-oss", "gpt-oss-userinfo", "gpt-oss-dead", "gpt-9"):
            await self.post("/v1/chat/completions", {"model": model, "messages": messages, "user": SECRETS["user"]})
            await self.post("/v1/chat/completions", {"model": model, "messages": messages, "stream": True})
            message_body = {
                "model": model,
                "messages": messages,
                "max_tokens": 50,
                "metadata": {"user_id": SECRETS["user"]},
            }
            await self.post("/v1/messages", {**message_body, "stream": True, "thinking": {"type": "adaptive"}})
            await self.post("/v1/messages", message_body, **{"x-api-key": SECRETS["wrong key"]})
        for tool in (docs, client, {**docs, "server_label": "gone"}):
            await self.post("/v1/responses", {**response_body, "tools": [tool]})
        foreign_server = {
            "type": "mcp",
            "server_label": "x",
            "server_url": f"http://127.0.0.1:9/?k={SECRETS['tool query']}",
        }
        await self.post("/v1/responses", {**response_body, "tools": [foreign_server]})
        await self.post("/v1/responses", {**response_body, "background": True})
        wrong_key = {"authorization": f"Bearer {SECRETS['wrong key']}"}
        await self.post("/v1/chat/completions", {"model": "gpt-oss", "messages": messages}, **wrong_key)
        await self.post("/v1/chat/completions", {"model": "gpt-oss", "messages": SECRETS["prompt"]})


def leaks(source: str, text: str, allowed: frozenset[str] = frozenset(), **extra: str) -> list[tuple[str, str]]:
    """Return the secrets, and values of `extra`, that occur in a text in any spelling."""
    searched = {name: secret for name, secret in SECRETS.items() if name not in allowed} | extra
    spellings_by_name = {name: {secret, quote(secret, safe="")} for name, secret in searched.items()}
    return [
        (source, name)
        for name, spellings in spellings_by_name.items()
        if any(spelling in text for spelling in spellings)
    ]


STORES = {
    "SQLite": "sqlite:///{folder}/state.db",
    "unreachable Redis": "redis://:" + quote(SECRETS["store password"], safe="") + "@127.0.0.1:9/0",
}


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
@pytest.mark.parametrize("accepts_spans", [True, False], ids=["spans accepted", "spans rejected"])
async def test_no_secret_or_client_data_leaks(
    upstream: Upstream, tmp_path: Path, store: str, accepts_spans: bool
) -> None:
    dead = "http://127.0.0.1:9"
    outputs = [
        calls("echo", thought=THOUGHT, text=SECRETS["tool argument"]),
        ANSWER.replace("ok", SECRETS["answer"]),
    ]
    async with collector() as spans, FakeVllm() as fake, aiohttp.ClientSession() as session:
        spans.status = 200 if accepts_spans else 503
        request_count = 0

        def script(_: Any) -> VllmScript | Refusal:
            nonlocal request_count
            request_count += 1
            if request_count % 7 == 0:
                return Refusal(500, json.dumps({"error": {"message": f"Bearer {SECRETS['backend key']}"}}).encode())
            return VllmScript(tokens=ENCODING.encode_marked(outputs[request_count % 2]))

        fake.script = script
        config = config_with_secrets(fake, dead, upstream, spans.url, store.format(folder=tmp_path))
        async with replica(tmp_path, config) as gateway:
            probe = LeakProbe(gateway.url, session)
            for _ in range(2):
                await probe.send_all()
            metrics = await probe.metrics()
            async with asyncio.timeout(15):
                while not spans.raw:
                    await asyncio.sleep(0.1)
        leaked = leaks("log", gateway.log, NAMED) + leaks("metrics", metrics)
        for body in spans.raw:
            leaked += leaks("spans", body.decode("latin-1"), NAMED)
        # Clients get their own data back and no other secrets.
        for text in probe.errors + probe.answers:
            leaked += leaks("answers", text, frozenset(CLIENT_DATA))
        assert leaked == []
        assert probe.errors
        # The client data really was in the replies.
        assert all(SECRETS[name] in "".join(probe.answers) for name in ("tool argument", "thought", "answer"))
        assert gateway.log.count("\n") > 3


# Further features: virtual keys, hooks, recordings, commands

HOOK = """
from unisono.core.hooks import Hook

class Planted(Hook):
    def __init__(self, options):
        self.settings = {name: options.get(name) for name in ("key", "address")}

    async def before(self, request):
        # As libraries do that name the address they could not reach.
        raise RuntimeError(f"cannot ask: {self.settings}")
"""


def config_with_hooks(config: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Add hooks and recordings; one of the hooks is a separate package and fails."""
    info = folder / "planted-1.dist-info"
    info.mkdir()
    (folder / "planted_hook.py").write_text(HOOK)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[unisono.hooks]\nplanted = planted_hook:Planted\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    address = f"http://somebody:{quote(SECRETS['hook password'], safe='')}@127.0.0.1:9/moderate"
    hooks = [
        {"planted": {"key": SECRETS["hook key"], "address": address, "fail": "open"}},
        {"blocklist": {"patterns": {"told": SECRETS["hook pattern"]}}},
    ]
    return {**config, "unisono": {**config["unisono"], "hooks": hooks, "traces": {"mode": "all"}}}


async def output_of(config: Path, *arguments: str) -> str:
    """Run a command and return its output."""
    result = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--config", str(config)])
    return result.output


async def reject_with_key(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve as a backend that quotes the rejected key in its error."""
    await reader.readuntil(b"\r\n\r\n")
    body = json.dumps({"error": {"message": f"I do not know {SECRETS['backend key']}."}}).encode()
    writer.write(b"HTTP/1.1 401 No\r\ncontent-type: application/json\r\nconnection: close\r\n")
    writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
    await writer.drain()


@pytest.mark.slow
async def test_no_secret_leaks_into_command_output_or_recordings(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [calls("echo", thought=THOUGHT, text=SECRETS["tool argument"]), ANSWER]
    server = Server(tmp_path / "redis")
    request_count = 0

    def script(_: Any) -> VllmScript:
        nonlocal request_count
        request_count += 1
        return VllmScript(tokens=ENCODING.encode_marked(outputs[request_count % 2]))

    store = f"redis://:{quote(SECRETS['store password'], safe='')}@127.0.0.1:{server.port}/0"
    config_path = tmp_path / "gateway" / "config.json"
    try:
        with server.start().client() as client:
            client.config_set("requirepass", SECRETS["store password"])
        async with (
            collector() as spans,
            FakeVllm() as fake,
            listening(reject_with_key) as quoting_backend,
            aiohttp.ClientSession() as session,
        ):
            fake.script = script
            config = config_with_hooks(
                config_with_secrets(fake, "http://127.0.0.1:9", upstream, spans.url, store), tmp_path, monkeypatch
            )
            quoting_config = tmp_path / "talkative.json"
            quoting_config.write_text(
                json.dumps(config_with_secrets(quoting_backend, "http://127.0.0.1:9", upstream, spans.url, store))
            )
            async with replica(tmp_path / "gateway", config) as gateway:
                created = json.loads(await output_of(config_path, "keys", "create", "--json", "--tenant", "ann"))
                key = str(created["key"])
                probe = LeakProbe(gateway.url, session, key)
                await probe.send_all()
                metrics = await probe.metrics()
                await gateway.logged("a hook failed")
                outputs_by_command = {
                    "keys": await output_of(config_path, "keys", "list"),
                    "keys as JSON": await output_of(config_path, "keys", "list", "--json"),
                    "check": await output_of(config_path, "check"),
                    "check of a backend that names the key": await output_of(quoting_config, "check", "--json"),
                    "check as JSON": await output_of(config_path, "check", "--json"),
                    "usage": await output_of(config_path, "usage", "--json"),
                    "traces": await output_of(config_path, "trace", "--tenant", "ann"),
                }
                recordings = json.loads(await output_of(config_path, "trace", "--tenant", "ann", "--json"))
                assert recordings
                shown_recordings = [
                    await output_of(config_path, "trace", recording["id"], "--tenant", "ann", *options)
                    for recording in recordings
                    for options in ((), ("--json",))
                ]
            leaked = leaks("log", gateway.log, NAMED, key=key) + leaks("metrics", metrics, key=key)
            for command, text in outputs_by_command.items():
                leaked += leaks(command, text, key=key)
            for text in shown_recordings:
                leaked += leaks("recordings", text, frozenset(CLIENT_DATA), key=key)
            for body in spans.raw:
                leaked += leaks("spans", body.decode("latin-1"), NAMED, key=key)
            for text in probe.errors + probe.answers:
                leaked += leaks("answers", text, frozenset(CLIENT_DATA), key=key)
            with redis.Redis.from_url(store) as client:
                client.config_set("rdbcompression", "no")
                client.save()
            dumped = (server.folder / "dump.rdb").read_bytes().decode("latin-1")
            assert '"ann"' in dumped
            leaked += leaks("the store", dumped, frozenset(CLIENT_DATA), key=key)
            assert leaked == []
            assert all(outputs_by_command.values())
            assert "I do not know [redacted]." in outputs_by_command["check of a backend that names the key"]
            # The client data really was in the recordings.
            assert SECRETS["prompt"] in "".join(shown_recordings)
    finally:
        server.end()
