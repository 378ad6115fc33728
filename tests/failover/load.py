"""Requests to gateways during a failover, and the record of everything that was acknowledged to a client."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.e2e.hosting import DOCS, calls
from tests.e2e.wires import ENCODING
from tests.fakes import VllmScript
from tests.mcp.conftest import Upstream

CALLS = 3
CALL_S = 0.25
RESULT = "<|start|>functions.docs__slow to=assistant"
ASSISTANT = ENCODING.encode_marked("<|start|>assistant")
FINISHED = ("completed", "incomplete", "failed", "cancelled")
Json = dict[str, Any]


def script(asked: Json) -> VllmScript:
    """The rest of the step that the prompt ends in. A question `tools m1` gets three calls, named m1.0 to m1.2."""
    prompt: list[int] = asked["prompt"]
    text = ENCODING.decode(prompt)
    question = re.findall(r"(tools|plain) (m\d+)", text)[-1]
    number = text.count(RESULT)
    if question[0] == "tools" and number < CALLS:
        said = calls("slow", seconds=CALL_S, name=f"{question[1]}.{number}")
    else:
        said = f"<|channel|>final<|message|>{answer_to(question[1])}<|return|>"
    tokens = ENCODING.encode_marked(said)
    for done in range(len(tokens), -1, -1):
        if prompt[len(prompt) - done - 2 :] == ASSISTANT + tokens[:done]:
            return VllmScript(tokens=tokens[done:], per_chunk=4, delay_s=0.01)
    raise AssertionError(f"the prompt ends in nothing that was generated: {text[-300:]}")


def answer_to(question: str) -> str:
    return " ".join(f"{question}-{n}" for n in range(12))


@dataclass
class Ledger:
    """Everything acknowledged, and every failure that a client saw."""

    stored: dict[str, str] = field(default_factory=dict)
    background: dict[str, str] = field(default_factory=dict)
    conversations: dict[str, str] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    samples: dict[str, str] = field(default_factory=dict)
    questions: list[str] = field(default_factory=list)
    """Those whose tools were to be called."""

    @property
    def acknowledged(self) -> int:
        return len(self.stored) + len(self.background) + len(self.conversations)


@dataclass
class Outcome:
    """What was found at the end of a run."""

    setting: str
    seed: int
    fault: str
    acknowledged: int
    lost: list[str]
    unfinished: list[str]
    called_twice: list[str]
    calls: int
    failures: Counter[str]
    unknown: int
    statuses: Counter[str]
    samples: dict[str, str]
    served_after_s: float
    """Seconds from the fault until every gateway acknowledged a write again, the duration of the fault included."""
    failovers: int

    def __str__(self) -> str:
        bad = f"lost {len(self.lost)}, unfinished {len(self.unfinished)}, called twice {len(self.called_twice)}"
        return (
            f"{self.setting} seed {self.seed} [{self.fault}]: {self.acknowledged} acknowledged, {bad} of {self.calls}; "
            f"served after {self.served_after_s:.1f} s, {self.failovers} failovers; outcome unknown {self.unknown}; "
            f"ended {dict(self.statuses)}; failures {dict(self.failures)}"
        )


class Clients:
    """Workers that send requests to `urls` until stopped."""

    def __init__(self, urls: list[str], session: aiohttp.ClientSession, chance: random.Random) -> None:
        self.urls = urls
        self.ledger = Ledger()
        self._session = session
        self._chance = chance
        self._numbers = itertools.count()
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        kinds = (self._tools, self._tools, self._plain, self._stored, self._stored, self._conversation)
        async with asyncio.TaskGroup() as group:
            for kind in kinds:
                group.create_task(self._repeat(kind))

    async def served(self, within_s: float) -> None:
        """Return when each gateway acknowledges a write."""
        async with asyncio.timeout(within_s):
            await asyncio.gather(*(_acknowledges_writes(self._session, url) for url in self.urls))

    def stop(self) -> None:
        self._stopped.set()

    async def _repeat(self, kind: Any) -> None:
        while not self._stopped.is_set():
            try:
                await kind(f"m{next(self._numbers)}")
            except (aiohttp.ClientError, TimeoutError):
                self.ledger.failures["connection"] += 1
            await asyncio.sleep(self._chance.uniform(0.0, 0.1))

    async def _tools(self, name: str) -> None:
        self.ledger.questions.append(name)
        body = await self._post("/v1/responses", self._question("tools", name, background=True, tools=[DOCS]))
        if body is not None:
            self.ledger.background[body["id"]] = name

    async def _plain(self, name: str) -> None:
        body = await self._post("/v1/responses", self._question("plain", name, background=True))
        if body is not None:
            self.ledger.background[body["id"]] = name

    async def _stored(self, name: str) -> None:
        body = await self._post("/v1/responses", self._question("plain", name))
        if body is not None:
            if body["status"] == "completed":
                self.ledger.stored[body["id"]] = name
            else:
                self.ledger.failures[f"{body['status']} {(body['error'] or {}).get('code')}"] += 1

    async def _conversation(self, name: str) -> None:
        item = {"type": "message", "role": "user", "content": name}
        body = await self._post("/v1/conversations", {"items": [item]})
        if body is not None:
            self.ledger.conversations[body["id"]] = name

    @staticmethod
    def _question(kind: str, name: str, **fields: Any) -> Json:
        return {"model": "gpt-oss", "input": f"{kind} {name}", **fields}

    async def _post(self, path: str, body: Json) -> Any:
        url = self._chance.choice(self.urls)
        timeout = aiohttp.ClientTimeout(total=20)
        async with self._session.post(url + path, json=body, timeout=timeout) as answer:
            found = await answer.json()
            if answer.status == 200:
                return found
            code = f"{answer.status} {found['error']['code']}"
            self.ledger.failures[code] += 1
            self.ledger.samples[code] = found["error"]["message"]
            return None


@dataclass
class Audit:
    """Compares a ledger with what a gateway at `url` has."""

    url: str
    session: aiohttp.ClientSession
    # Longer than one more failover of a busy host takes.
    within_s: float = 60.0
    lost: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    unknown: int = 0
    statuses: Counter[str] = field(default_factory=Counter)

    async def check(self, ledger: Ledger) -> None:
        async with asyncio.timeout(self.within_s):
            await _acknowledges_writes(self.session, self.url)
        for id, name in ledger.stored.items():
            body = await self._get(f"/v1/responses/{id}")
            if body is None or text_of(body) != answer_to(name):
                self.lost.append(f"stored {name} {id}: {body and body['status']}")
        for id, name in ledger.conversations.items():
            body = await self._get(f"/v1/conversations/{id}/items")
            if body is None or body["data"][0]["content"][0]["text"] != name:
                self.lost.append(f"conversation {name} {id}")
        deadline = asyncio.get_running_loop().time() + self.within_s
        for id, name in ledger.background.items():
            await self._finished(id, name, deadline)

    async def _finished(self, id: str, name: str, deadline: float) -> None:
        while True:
            body = await self._get(f"/v1/responses/{id}")
            if body is None:
                self.lost.append(f"background {name} {id}")
                return
            if body["status"] in FINISHED:
                self.statuses[body["status"] + (f" {body['error']['code']}" if body["error"] else "")] += 1
                self.unknown += sum(item["type"] == "mcp_call" and bool(item["error"]) for item in body["output"])
                if body["status"] == "completed" and text_of(body) != answer_to(name):
                    self.lost.append(f"text of {name} {id}")
                return
            if asyncio.get_running_loop().time() > deadline:
                self.unfinished.append(f"{name} {id}")
                return
            await asyncio.sleep(0.1)

    async def _get(self, path: str) -> Any:
        async with asyncio.timeout(self.within_s):
            while True:
                async with self.session.get(self.url + path) as answer:
                    if answer.status == 404:
                        return None
                    if answer.status == 200:
                        return await answer.json()
                await asyncio.sleep(0.1)


async def _acknowledges_writes(session: aiohttp.ClientSession, url: str) -> None:
    """Return when the gateway at `url` acknowledges a write."""
    while True:
        async with session.post(url + "/v1/conversations", json={}) as answer:
            if answer.status == 200:
                return
        await asyncio.sleep(0.1)


def text_of(body: Json) -> str:
    return "".join(part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"])


def called_twice(upstream: Upstream, questions: list[str]) -> tuple[list[str], int]:
    """Calls that the tool server began more than once, and how many it began at all."""
    began = Counter(line.removeprefix("slow begins ") for line in upstream.noted("slow begins m"))
    return [call for call, times in began.items() if times > 1], len(began)
