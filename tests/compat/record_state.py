"""Recorder of `tests/golden/state`.

The state has format 1, from before the modules of version 0.1.0 were renamed.

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
    """Requests to the earlier version, and its responses.

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
        output = command_output(dict(self.replica.environment), [*arguments, "--config", str(self.replica.path)])
        return json.loads(output)

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


async def respond(recording: Recording) -> None:
    """Make responses, a conversation, a background response and answers of the other APIs."""
    instructions = {"instructions": "Be brief.", "metadata": {"of": "a test"}, "reasoning": {"effort": "low"}}
    first = await recording.add("response", "/v1/responses", {"input": "First question.", **instructions})
    body = {"input": "Second question.", "previous_response_id": first["id"]}
    await recording.add("second response", "/v1/responses", body)
    await recording.add("call", "/v1/responses", {"input": LOOK_UP, "tools": [TOOL]})
    body = {"input": [call_result(recording.documents)], "previous_response_id": recording.documents["call"]["id"]}
    await recording.add("returned", "/v1/responses", {**body, "tools": [TOOL]})
    await recording.add("malformed", "/v1/responses", {"input": "Malformed."})

    items = [{"type": "message", "role": "user", "content": "Earlier."}]
    client = recording.client()
    talk = await client.post("/v1/conversations", {"items": items, "metadata": {"a": "b"}}, **recording.bearer())
    recording.documents["conversation"] = talk
    for question in ("In a conversation.", "Again."):
        await recording.add(question, "/v1/responses", {"input": question, "conversation": talk["id"]})

    made = await recording.add("background", "/v1/responses", {"input": "Work.", "background": True})
    while made["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.05)
        made = await recording.read(f"/v1/responses/{made['id']}")

    await recording.add("sealed call", "/v1/responses", {"input": LOOK_UP, "tools": [TOOL], **SEALED})
    await recording.add("compaction", "/v1/responses/compact", {"input": "Remember the number 7."})
    thinking = {"type": "enabled", "budget_tokens": 1024}
    messages = [{"role": "user", "content": LOOK_UP}]
    body = {"messages": messages, "max_tokens": 4096, "thinking": thinking, "tools": [MESSAGES_TOOL]}
    await recording.add("message", "/v1/messages", body)
    await recording.add("chat", "/v1/chat/completions", {"messages": messages})
    await recording.post("/v1/responses", {"input": "Too much."}, "spent")


async def read_all(recording: Recording) -> None:
    """Read everything that is stored, over HTTP and by commands."""
    for document in list(recording.documents.values()):
        if document.get("object") == "response" and document["store"]:
            await recording.read(f"/v1/responses/{document['id']}")
            await recording.read(f"/v1/responses/{document['id']}/input_items?order=asc")
    talk = recording.documents["conversation"]["id"]
    await recording.read(f"/v1/conversations/{talk}")
    items = (await recording.read(f"/v1/conversations/{talk}/items?order=asc&limit=100"))["data"]
    for item in items:
        await recording.read(f"/v1/conversations/{talk}/items/{item['id']}")
    day = recording.command("usage", "--by", "day", "--json")
    days = sorted(row["day"] for row in day)
    await recording.read(f"/v1/usage?since={days[0]}&until={days[-1]}")


async def read_by_commands(recording: Recording) -> None:
    recording.commands["keys list --json"] = recording.command("keys", "list", "--json")
    for by in ("key", "served-model", "day", "tenant"):
        recording.commands[f"usage --json --by {by}"] = recording.command("usage", "--json", "--by", by)
    traces = recording.command("trace", "--json", "--last", "100")
    recording.commands["trace --json --last 100"] = traces
    # A trace with a recovery, and one with calls.
    ids = [trace["id"] for trace in traces if trace["recoveries"] or trace["surface"] == "messages"]
    for name in ids:
        recording.commands[f"trace {name} --json"] = recording.command("trace", name, "--json")


async def leave_unfinished(recording: Recording) -> None:
    """Kill the gateway while it generates a background response."""
    body = {"input": UNFINISHED, "background": True, "stream": True}
    received = Told()
    url = recording.replica.url + "/v1/responses"
    async with recording.session.post(
        url, json={"model": "gpt-oss", **body}, headers=recording.bearer("night")
    ) as answer:
        async for line in answer.content:
            if line.startswith(b"data: "):
                received.events.append(json.loads(line[6:]))
            if len(received.events) == 30:
                break
        recording.replica.kill()
    await recording.replica.ended()
    recording.documents["unfinished"] = {"id": received.id, "events": received.events}


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
        recording = Recording(replica, fake, session)
        await replica.start()
        for name, options in KEYS.items():
            recording.keys[name] = recording.command("keys", "create", "--json", "--name", name, *options)
        await respond(recording)
        command_output(environment, ["keys", "revoke", recording.keys["revoked"]["id"], "--config", str(replica.path)])
        await read_all(recording)
        await leave_unfinished(recording)
        await read_by_commands(recording)
        if kind == "redis":
            with server.client() as client:
                snapshots.save_keys(client)
        else:
            snapshots.save_database(database)
        prompts = await continue_all(recording)
    recorded = {
        "keys": recording.keys,
        "documents": recording.documents,
        "reads": recording.reads,
        "commands": recording.commands,
        "prompts": prompts,
    }
    (snapshots.FOLDER / f"{kind}.documents.json").write_text(to_text(recorded))


async def continue_all(recording: Recording) -> Mapping[str, list[int]]:
    """Let the earlier version continue from the saved state, and return its prompts."""
    recording.replica.write(config(recording.replica.config["store"]["url"], recording.fake.url, LATER_DAY))
    recording.replica.config = json.loads(recording.replica.path.read_text())
    await recording.replica.start()
    client, unfinished = recording.client(), recording.documents["unfinished"]["id"]
    while True:
        status, answer = await client.asks("GET", f"/v1/responses/{unfinished}", **recording.bearer("night"))
        assert status == 200, answer
        if answer["status"] not in ("queued", "in_progress"):
            break
        await asyncio.sleep(0.05)
    prompts = {}
    for name, (path, body) in continuations(recording.documents).items():
        await client.post(path, body, **recording.bearer())
        prompts[name] = last_prompt(recording.fake)
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
