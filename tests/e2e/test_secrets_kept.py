"""Secrets planted wherever there is a place for one are found nowhere that others read: logs at debug level, metrics,
spans and errors, recordings and what commands print, while all goes well and while all of it fails.

Recordings hold what was said, as they are for that, and nothing else of the kind."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
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
from tests.mcp.conftest import Upstream, start_upstream
from unisono.cli import main

PLANTED = {
    "master key": "sk-planted-master-1f9a",
    "wrong key": "sk-planted-wrong-77be",
    "backend key": "planted-backend-key-a1",
    "backend user": "planted-user-pass-b2",
    "backend query": "planted-query-token-c3",
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
OWN = {"prompt", "tool argument", "thought", "answer", "metadata", "user"}
"""What clients get back, as it is theirs."""


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with start_upstream(tmp_path_factory.mktemp("upstream")) as (_, found):
        yield found


def planted(fake: FakeVllm | Listener, dead: str, upstream: Upstream, spans: str, store: str) -> dict[str, Any]:
    """A configuration with a secret in every place."""
    of = PLANTED
    at = fake.url.removeprefix("http://")

    def entry(name: str, base: str, **params: Any) -> dict[str, Any]:
        return {"model_name": name, "litellm_params": {"model": "vllm/tiny", "api_base": base, **params}}

    return {
        "model_list": [
            entry("gpt-oss", fake.url, api_key=of["backend key"]),
            entry("gpt-oss-userinfo", f"http://somebody:{of['backend user']}@{at}"),
            entry("gpt-oss-query", f"{dead}?token={of['backend query']}"),
            entry("gpt-oss-dead", dead.replace("//", f"//somebody:{of['backend user']}@")),
        ],
        "mcp_servers": {
            "docs": {
                "url": f"{upstream.urls['modern']}?key={of['tool query']}",
                "require_approval": "never",
                "static_headers": {"x-secret": of["tool header"]},
            },
            "gone": {
                "url": f"{dead}/mcp?key={of['tool query']}",
                "auth_type": "bearer_token",
                "authentication_token": of["tool token"],
                "require_approval": "never",
            },
        },
        "general_settings": {"master_key": of["master key"]},
        "store": {"url": store},
        "unisono": {
            "salt_key": of["salt"],
            "log_level": "debug",
            "otel": {
                "endpoint": f"{spans}?k={of['collector query']}",
                "headers": {"x-key": of["collector key"]},
                "timeout_s": 1,
            },
        },
    }


THOUGHT = f"<|channel|>analysis<|message|>{PLANTED['thought']}<|end|><|start|>assistant"


class Talk:
    """Says everything there is to say, and keeps what came back: `errors` are answers that are none of the client's
    own words."""

    def __init__(self, url: str, session: aiohttp.ClientSession, key: str = PLANTED["master key"]) -> None:
        self._url = url
        self._session = session
        self._key = {"authorization": f"Bearer {key}"}
        self.errors: list[str] = []
        self.answers: list[str] = []

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> int:
        async with self._session.post(self._url + path, json=body, headers={**self._key, **headers}) as answer:
            text = f"{dict(answer.headers)} {await answer.text()}"
            (self.answers if answer.status == 200 else self.errors).append(text)
            return answer.status

    async def metrics(self) -> str:
        async with self._session.get(f"{self._url}/metrics", headers=self._key) as answer:
            assert answer.status == 200
            return await answer.text()

    async def everything(self) -> None:
        docs: dict[str, Any] = {"type": "mcp", "server_label": "docs"}
        client = {**docs, "server_label": "gone", "headers": {"authorization": PLANTED["client tool token"]}}
        messages = [{"role": "user", "content": PLANTED["prompt"]}]
        more = {"metadata": {"note": PLANTED["metadata"]}, "user": PLANTED["user"]}
        said = {"model": "gpt-oss", "input": PLANTED["prompt"], **more}
        for model in ("gpt-oss", "gpt-oss-userinfo", "gpt-oss-query", "gpt-oss-dead", PLANTED["prompt"]):
            await self.post("/v1/chat/completions", {"model": model, "messages": messages, "user": PLANTED["user"]})
            await self.post("/v1/chat/completions", {"model": model, "messages": messages, "stream": True})
            asked = {"model": model, "messages": messages, "max_tokens": 50, "metadata": {"user_id": PLANTED["user"]}}
            await self.post("/v1/messages", {**asked, "stream": True, "thinking": {"type": "adaptive"}})
            await self.post("/v1/messages", asked, **{"x-api-key": PLANTED["wrong key"]})
        for tool in (docs, client, {**docs, "server_label": "gone"}):
            await self.post("/v1/responses", {**said, "tools": [tool]})
        other = {"type": "mcp", "server_label": "x", "server_url": f"http://127.0.0.1:9/?k={PLANTED['tool query']}"}
        await self.post("/v1/responses", {**said, "tools": [other]})
        await self.post("/v1/responses", {**said, "background": True})
        wrong = {"authorization": f"Bearer {PLANTED['wrong key']}"}
        await self.post("/v1/chat/completions", {"model": "gpt-oss", "messages": messages}, **wrong)
        await self.post("/v1/chat/completions", {"model": "gpt-oss", "messages": PLANTED["prompt"]})


def leaks(where: str, text: str, allowed: frozenset[str] = frozenset(), **more: str) -> list[tuple[str, str]]:
    """Which secrets, and which of `more`, are found in a text, however they are spelled."""
    looked_for = {name: secret for name, secret in PLANTED.items() if name not in allowed} | more
    spelled = {name: {secret, quote(secret, safe="")} for name, secret in looked_for.items()}
    return [(where, name) for name, ways in spelled.items() if any(way in text for way in ways)]


STORES = {
    "a file": "sqlite:///{folder}/state.db",
    "a Redis that is not there": "redis://:" + quote(PLANTED["store password"], safe="") + "@127.0.0.1:9/0",
}


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
@pytest.mark.parametrize("collects", [True, False], ids=["spans are taken", "spans are refused"])
async def test_no_secret_and_no_word_of_a_client_is_found_outside(
    upstream: Upstream, tmp_path: Path, store: str, collects: bool
) -> None:
    dead = "http://127.0.0.1:9"
    outputs = [
        calls("echo", thought=THOUGHT, text=PLANTED["tool argument"]),
        ANSWER.replace("ok", PLANTED["answer"]),
    ]
    async with collector() as spans, FakeVllm() as fake, aiohttp.ClientSession() as session:
        spans.status = 200 if collects else 503
        asked = 0

        def script(_: Any) -> VllmScript | Refusal:
            nonlocal asked
            asked += 1
            if asked % 7 == 0:
                return Refusal(500, json.dumps({"error": {"message": f"Bearer {PLANTED['backend key']}"}}).encode())
            return VllmScript(tokens=ENCODING.encode_marked(outputs[asked % 2]))

        fake.script = script
        config = planted(fake, dead, upstream, spans.url, store.format(folder=tmp_path))
        async with replica(tmp_path, config) as one:
            talk = Talk(one.url, session)
            for _ in range(2):
                await talk.everything()
            metrics = await talk.metrics()
            async with asyncio.timeout(15):
                while not spans.raw:
                    await asyncio.sleep(0.1)
        found = leaks("log", one.log) + leaks("metrics", metrics)
        for body in spans.raw:
            found += leaks("spans", body.decode("latin-1"))
        # What a client said is told to that client; nothing else is.
        for text in talk.errors + talk.answers:
            found += leaks("answers", text, frozenset(OWN))
        assert found == []
        assert talk.errors
        # Where words are told they are there to be leaked.
        assert all(PLANTED[name] in "".join(talk.answers) for name in ("tool argument", "thought", "answer"))
        assert one.log.count("\n") > 3


# -- what a team has besides: virtual keys, hooks, recordings, commands

HOOK = """
from unisono.core.hooks import Hook

class Planted(Hook):
    def __init__(self, options):
        self.settings = {name: options.get(name) for name in ("key", "address")}

    async def before(self, request):
        # As libraries do that name the address they could not reach.
        raise RuntimeError(f"cannot ask: {self.settings}")
"""


def with_a_team(config: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The configuration with hooks and recordings; one of the hooks is a package of its own and fails."""
    info = folder / "planted-1.dist-info"
    info.mkdir()
    (folder / "planted_hook.py").write_text(HOOK)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[unisono.hooks]\nplanted = planted_hook:Planted\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    address = f"http://somebody:{quote(PLANTED['hook password'], safe='')}@127.0.0.1:9/moderate"
    hooks = [
        {"planted": {"key": PLANTED["hook key"], "address": address, "fail": "open"}},
        {"blocklist": {"patterns": {"told": PLANTED["hook pattern"]}}},
    ]
    return {**config, "unisono": {**config["unisono"], "hooks": hooks, "traces": {"mode": "all"}}}


async def printed(config: Path, *arguments: str) -> str:
    """Everything a command says."""
    result = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--config", str(config)])
    return result.output


async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A backend that names the key it does not take."""
    await reader.readuntil(b"\r\n\r\n")
    body = json.dumps({"error": {"message": f"I do not know {PLANTED['backend key']}."}}).encode()
    writer.write(b"HTTP/1.1 401 No\r\ncontent-type: application/json\r\nconnection: close\r\n")
    writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
    await writer.drain()


@pytest.mark.slow
async def test_no_secret_is_found_in_what_a_team_reads(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [calls("echo", thought=THOUGHT, text=PLANTED["tool argument"]), ANSWER]
    server = Server(tmp_path / "redis")
    asked = 0

    def script(_: Any) -> VllmScript:
        nonlocal asked
        asked += 1
        return VllmScript(tokens=ENCODING.encode_marked(outputs[asked % 2]))

    store = f"redis://:{quote(PLANTED['store password'], safe='')}@127.0.0.1:{server.port}/0"
    config_path = tmp_path / "gateway" / "config.json"
    try:
        with server.start().client() as client:
            client.config_set("requirepass", PLANTED["store password"])
        async with (
            collector() as spans,
            FakeVllm() as fake,
            listening(refuses) as refusing,
            aiohttp.ClientSession() as session,
        ):
            fake.script = script
            config = with_a_team(planted(fake, "http://127.0.0.1:9", upstream, spans.url, store), tmp_path, monkeypatch)
            talkative = tmp_path / "talkative.json"
            talkative.write_text(json.dumps(planted(refusing, "http://127.0.0.1:9", upstream, spans.url, store)))
            async with replica(tmp_path / "gateway", config) as one:
                made = json.loads(await printed(config_path, "keys", "create", "--json", "--tenant", "ann"))
                key = str(made["key"])
                talk = Talk(one.url, session, key)
                await talk.everything()
                metrics = await talk.metrics()
                await one.logged("a hook failed")
                said = {
                    "keys": await printed(config_path, "keys", "list"),
                    "keys as JSON": await printed(config_path, "keys", "list", "--json"),
                    "check": await printed(config_path, "check"),
                    "check of a backend that names the key": await printed(talkative, "check", "--json"),
                    "check as JSON": await printed(config_path, "check", "--json"),
                    "usage": await printed(config_path, "usage", "--json"),
                    "traces": await printed(config_path, "trace", "--tenant", "ann"),
                }
                recordings = json.loads(await printed(config_path, "trace", "--tenant", "ann", "--json"))
                assert recordings
                told = [
                    await printed(config_path, "trace", recording["id"], "--tenant", "ann", *how)
                    for recording in recordings
                    for how in ((), ("--json",))
                ]
            found = leaks("log", one.log, key=key) + leaks("metrics", metrics, key=key)
            for where, text in said.items():
                found += leaks(where, text, key=key)
            for text in told:
                found += leaks("recordings", text, frozenset(OWN), key=key)
            for body in spans.raw:
                found += leaks("spans", body.decode("latin-1"), key=key)
            for text in talk.errors + talk.answers:
                found += leaks("answers", text, frozenset(OWN), key=key)
            with redis.Redis.from_url(store) as client:
                client.config_set("rdbcompression", "no")
                client.save()
            dumped = (server.folder / "dump.rdb").read_bytes().decode("latin-1")
            assert '"ann"' in dumped
            found += leaks("the store", dumped, frozenset(OWN), key=key)
            assert found == []
            assert all(said.values())
            assert "I do not know [redacted]." in said["check of a backend that names the key"]
            # Where words are told they are there to be leaked.
            assert PLANTED["prompt"] in "".join(told)
    finally:
        server.end()
