"""State of an earlier version: this version reads it and continues with the same prompts.

`tests/compat/record_state.py` recorded the state with the earlier version.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.api.responses.folding import fold
from tests.compat import snapshots
from tests.compat.scenario import LATER_DAY, LONG, UNFINISHED, config, continuations, last_prompt, script
from tests.contract.servers import Server
from tests.e2e.continuing import prompts_about
from tests.e2e.gateway import Gateway, gateway
from tests.e2e.keyed import bearing
from tests.fakes import FakeVllm
from unisono.cli import main


@dataclass(frozen=True)
class Recorded:
    """The restored state, and the responses of the earlier version about it."""

    store_url: str
    keys: Mapping[str, Any]
    documents: Mapping[str, Any]
    reads: Mapping[str, Any]
    commands: Mapping[str, Any]
    prompts: Mapping[str, list[int]]

    def bearer(self, key: str = "reader") -> dict[str, str]:
        return bearing(self.keys[key]["key"])


@pytest.fixture(params=snapshots.KINDS)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Recorded:
    if request.param == "redis":
        server: Server = request.getfixturevalue("redis_server")
        with server.client() as client:
            client.flushall()
            snapshots.restore_keys(client)
        url = server.url
    else:
        snapshots.restore_database(tmp_path / "state.db")
        url = f"sqlite://{tmp_path}/state.db"
    return Recorded(url, **snapshots.documents_of(request.param))


def losses(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield each value of the earlier document that is absent or different now.

    New fields are allowed.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key in after:
                yield from losses(value, after[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}: absent"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from losses(one, other, f"{path}[{number}]")
    elif before != after:
        yield f"{path}: {before!r} became {after!r}"


async def completed(running: Gateway, path: str, headers: Mapping[str, str]) -> Any:
    async with asyncio.timeout(30):
        while True:
            body = (await running.get(path, **headers)).body
            if body["status"] not in ("queued", "in_progress"):
                return body
            await asyncio.sleep(0.02)


async def test_stored_objects_are_read_unchanged(recorded: Recorded) -> None:
    async with FakeVllm(script=script) as fake, gateway(config(recorded.store_url, fake.url, LATER_DAY)) as running:
        for path, before in recorded.reads.items():
            answer = await running.get(path, **recorded.bearer())
            assert (path, answer.status, list(losses(before, answer.body))) == (path, 200, [])


async def test_keys_have_the_same_permissions_and_budgets(recorded: Recorded) -> None:
    async with FakeVllm(script=script) as fake, gateway(config(recorded.store_url, fake.url, LATER_DAY)) as running:
        answers = {name: await running.get("/v1/models", **recorded.bearer(name)) for name in recorded.keys}
        assert {name: answer.status for name, answer in answers.items()} == {
            "reader": 200,
            "night": 200,
            "spent": 200,
            "revoked": 401,
        }
        body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()
        refused = await running.post("/v1/chat/completions", body, **recorded.bearer("spent"))
        assert (refused.status, refused.body["error"]["code"]) == (429, "insufficient_quota")
        allowed = await running.post("/v1/chat/completions", body, **recorded.bearer())
        assert (allowed.status, allowed.headers["x-ratelimit-limit-requests"]) == (200, "1000")
        # Another tenant sees the same answer as for an unknown id.
        response = recorded.documents["response"]["id"]
        assert (await running.get(f"/v1/responses/{response}", **recorded.bearer("night"))).status == 404


async def test_answers_continue_with_the_same_prompts(recorded: Recorded) -> None:
    async with FakeVllm(script=script) as fake, gateway(config(recorded.store_url, fake.url, LATER_DAY)) as running:
        unfinished = recorded.documents["unfinished"]["id"]
        await completed(running, f"/v1/responses/{unfinished}", recorded.bearer("night"))
        requests = continuations(recorded.documents)
        assert requests.keys() == recorded.prompts.keys()
        for name, (path, body) in requests.items():
            answer = await running.post(path, json.dumps(body).encode(), **recorded.bearer())
            assert (name, answer.status, last_prompt(fake)) == (name, 200, recorded.prompts[name])


async def test_an_unfinished_background_response_is_completed(recorded: Recorded) -> None:
    unfinished = recorded.documents["unfinished"]
    headers = recorded.bearer("night")
    async with FakeVllm(script=script) as fake, gateway(config(recorded.store_url, fake.url, LATER_DAY)) as running:
        path = f"/v1/responses/{unfinished['id']}"
        response = await completed(running, path, headers)
        assert response["status"] == "completed"
        assert response["output"][-1]["content"][0]["text"] == LONG.text
        stream = await running.get(f"{path}?stream=true", **headers)
        assert stream.done
        assert list(losses(unfinished["events"], stream.events[: len(unfinished["events"])])) == []
        assert fold(stream.events).response == response
        [prompt] = prompts_about(fake, UNFINISHED)
        # The stored tokens are part of the prompt, so they are not generated again.
        assert LONG.said(prompt) > 20


def test_commands_print_the_same(recorded: Recorded, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(recorded.store_url, "http://127.0.0.1:9", LATER_DAY)))
    assert any(name.startswith("trace req_") for name in recorded.commands)
    for command, before in recorded.commands.items():
        result = CliRunner().invoke(main, [*command.split(), "--config", str(path)])
        assert (command, result.exit_code, list(losses(before, json.loads(result.stdout)))) == (command, 0, [])
        if command.startswith("trace req_"):
            words = [word for word in command.split() if word != "--json"]
            replayed = CliRunner().invoke(main, [*words, "--replay", "--config", str(path)])
            assert (replayed.exit_code, replayed.output.splitlines()[-1]) == (0, "The same as recorded.")
