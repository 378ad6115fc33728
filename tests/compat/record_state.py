"""Recorder of `tests/golden/state`: state written by format 1, before the modules of version 0.1.0 were renamed.

`python -m tests.compat.record_state` extracts that version of the gateway from git. It runs it as a process on SQLite
and on a real Redis, and sends requests to it. It saves the stores and the documents that clients received. The current
version must read this state; `tests/compat/test_recorded_state.py` checks that.

A fresh recording has other ids and times. Repeat it only to add requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from tests.compat import snapshots
from tests.compat.earlier import command_output, extract
from tests.compat.scenario import (
    FIRST_DAY,
    LATER_DAY,
    LOOK_UP,
    MESSAGES_TOOL,
    SEALED,
    TOOL,
    UNFINISHED,
    Json,
    call_result,
    config,
    continuations,
    last_prompt,
    script,
)
from tests.contract.servers import Server
from tests.e2e.replicas import Client, Replica, Told
from tests.fakes import FakeVllm

# Options of the keys by name. The budget of `spent` is less than one answer.
KEYS: Mapping[str, tuple[str, ...]] = {
    "reader": (
        *("--tenant", "search", "--models", "gpt-oss", "--rpm", "1000", "--tpm", "1000000", "--expires", "2126-01-01"),
        *("--token-budget", "1000000", "--money-budget", "5", "--budget-period", "none", "--tag", "team=blue"),
    ),
    "night": ("--tenant", "batch", "--max-parallel", "4"),
    "spent": ("--token-budget", "90"),
    "revoked": (),
}


@dataclass
class Recording:
    """Requests to the earlier version, and everything that it answered.

    `documents` are answers by name, `reads` are answers of GET by path, and `commands` is the output of commands.
    """

    replica: Replica
    fake: FakeVllm
    session: aiohttp.ClientSession
    keys: dict[str, Json] = field(default_factory=dict)
    documents: dict[str, Json] = field(default_factory=dict)
    reads: dict[str, Any] = field(default_factory=dict)
    commands: dict[str, Any] = field(default_factory=dict)

    def client(self) -> Client:
        return Client(self.replica.url, self.session)

    def command(self, *arguments: str) -> Any:
        told = command_output(dict(self.replica.environment), [*arguments, "--config", str(self.replica.path)])
        return json.loads(told)

    def bearer(self, key: str = "reader") -> Json:
        return {"Authorization": f"Bearer {self.keys[key]['key']}"}

    async def post(self, path: str, body: Json, key: str = "reader") -> Json:
        answer: Json = await self.client().post(path, {"model": "gpt-oss", **body}, **self.bearer(key))
        return answer

    async def add(self, name: str, path: str, body: Json) -> Json:
        self.documents[name] = await self.post(path, body)
        return self.documents[name]

    async def read(self, path: str) -> Any:
        status, body = await self.client().asks("GET", path, **self.bearer())
        assert status == 200, body
        self.reads[path] = body
        return body


async def respond(here: Recording) -> None:
    """Make responses, a conversation, a background response and answers of the other APIs."""
    instructions = {"instructions": "Be brief.", "metadata": {"of": "a test"}, "reasoning": {"effort": "low"}}
    first = await here.add("response", "/v1/responses", {"input": "First question.", **instructions})
    body = {"input": "Second question.", "previous_response_id": first["id"]}
    await here.add("second response", "/v1/responses", body)
    await here.add("call", "/v1/responses", {"input": LOOK_UP, "tools": [TOOL]})
    body = {"input": [call_result(here.documents)], "previous_response_id": here.documents["call"]["id"]}
    await here.add("returned", "/v1/responses", {**body, "tools": [TOOL]})
    await here.add("malformed", "/v1/responses", {"input": "Malformed."})

    items = [{"type": "message", "role": "user", "content": "Earlier."}]
    client = here.client()
    talk = await client.post("/v1/conversations", {"items": items, "metadata": {"a": "b"}}, **here.bearer())
    here.documents["conversation"] = talk
    for question in ("In a conversation.", "Again."):
        await here.add(question, "/v1/responses", {"input": question, "conversation": talk["id"]})

    made = await here.add("background", "/v1/responses", {"input": "Work.", "background": True})
    while made["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.05)
        made = await here.read(f"/v1/responses/{made['id']}")

    await here.add("sealed call", "/v1/responses", {"input": LOOK_UP, "tools": [TOOL], **SEALED})
    await here.add("compaction", "/v1/responses/compact", {"input": "Remember the number 7."})
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = [{"role": "user", "content": LOOK_UP}]
    body = {"messages": asked, "max_tokens": 4096, "thinking": thinking, "tools": [MESSAGES_TOOL]}
    await here.add("message", "/v1/messages", body)
    await here.add("chat", "/v1/chat/completions", {"messages": asked})
    await here.post("/v1/responses", {"input": "Too much."}, "spent")


async def read_all(here: Recording) -> None:
    """Read everything that is stored, over HTTP and by commands."""
    for document in list(here.documents.values()):
        if document.get("object") == "response" and document["store"]:
            await here.read(f"/v1/responses/{document['id']}")
            await here.read(f"/v1/responses/{document['id']}/input_items?order=asc")
    talk = here.documents["conversation"]["id"]
    await here.read(f"/v1/conversations/{talk}")
    items = (await here.read(f"/v1/conversations/{talk}/items?order=asc&limit=100"))["data"]
    for item in items:
        await here.read(f"/v1/conversations/{talk}/items/{item['id']}")
    day = here.command("usage", "--by", "day", "--json")
    days = sorted(row["day"] for row in day)
    await here.read(f"/v1/usage?since={days[0]}&until={days[-1]}")


async def read_by_commands(here: Recording) -> None:
    here.commands["keys list --json"] = here.command("keys", "list", "--json")
    for by in ("key", "served-model", "day", "tenant"):
        here.commands[f"usage --json --by {by}"] = here.command("usage", "--json", "--by", by)
    traces = here.command("trace", "--json", "--last", "100")
    here.commands["trace --json --last 100"] = traces
    # One with a recovery, and one with calls.
    shown = [one["id"] for one in traces if one["recoveries"] or one["surface"] == "messages"]
    for name in shown:
        here.commands[f"trace {name} --json"] = here.command("trace", name, "--json")


async def leave_unfinished(here: Recording) -> None:
    """Kill the gateway while it generates a background response."""
    body = {"input": UNFINISHED, "background": True, "stream": True}
    told = Told()
    url = here.replica.url + "/v1/responses"
    async with here.session.post(url, json={"model": "gpt-oss", **body}, headers=here.bearer("night")) as answer:
        async for line in answer.content:
            if line.startswith(b"data: "):
                told.events.append(json.loads(line[6:]))
            if len(told.events) == 30:
                break
        here.replica.kill()
    await here.replica.ended()
    here.documents["unfinished"] = {"id": told.id, "events": told.events}


async def record(kind: str, folder: Path, environment: dict[str, str]) -> None:
    async with AsyncExitStack() as stack:
        server = Server(folder / "redis", ("appendonly yes",))
        database = folder / "state.db"
        if kind == "redis":
            stack.callback(server.end)
            server.start()
        url = server.url if kind == "redis" else f"sqlite://{database}"
        fake = await stack.enter_async_context(FakeVllm(script=script))
        replica = Replica(folder / "gateway", config(url, fake.url, FIRST_DAY), environment=environment)
        stack.push_async_callback(replica.end)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        here = Recording(replica, fake, session)
        await replica.start()
        for name, options in KEYS.items():
            here.keys[name] = here.command("keys", "create", "--json", "--name", name, *options)
        await respond(here)
        command_output(environment, ["keys", "revoke", here.keys["revoked"]["id"], "--config", str(replica.path)])
        await read_all(here)
        await leave_unfinished(here)
        await read_by_commands(here)
        if kind == "redis":
            with server.client() as client:
                snapshots.save_keys(client)
        else:
            snapshots.save_database(database)
        prompts = await continue_all(here)
    recorded = {
        "keys": here.keys,
        "documents": here.documents,
        "reads": here.reads,
        "commands": here.commands,
        "prompts": prompts,
    }
    (snapshots.FOLDER / f"{kind}.documents.json").write_text(to_text(recorded))


async def continue_all(here: Recording) -> Mapping[str, list[int]]:
    """Let the earlier version continue from the saved state, and return the prompts of its backend."""
    here.replica.write(config(here.replica.config["store"]["url"], here.fake.url, LATER_DAY))
    here.replica.config = json.loads(here.replica.path.read_text())
    await here.replica.start()
    client, unfinished = here.client(), here.documents["unfinished"]["id"]
    while True:
        status, answer = await client.asks("GET", f"/v1/responses/{unfinished}", **here.bearer("night"))
        assert status == 200, answer
        if answer["status"] not in ("queued", "in_progress"):
            break
        await asyncio.sleep(0.05)
    prompts = {}
    for name, (path, body) in continuations(here.documents).items():
        await client.post(path, body, **here.bearer())
        prompts[name] = last_prompt(here.fake)
    return prompts


def to_text(recorded: Mapping[str, Mapping[str, Any]]) -> str:
    """Return JSON with one entry per line."""
    sections = []
    for name, entries in recorded.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
        sections.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


async def main() -> None:
    snapshots.FOLDER.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        environment = extract(folder / "source")
        for kind in snapshots.KINDS:
            await record(kind, folder / kind, environment)


if __name__ == "__main__":
    asyncio.run(main())
