"""Requests that a backend fails on: they take it away from nobody, and their own client gets what can be had."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, config_of, gateway, message_of
from tests.e2e.keyed import MASTER, bearing, keyed
from tests.e2e.obeying import ENCODING, KINDS, START, Kind, answers
from tests.fakes import Refusal, Reset, Stall, Step, reset_at

POISON = "arsenic"
FAILED = Refusal(500, b'{"error": {"message": "Internal Server Error", "code": 500}}')

RIGHT, WRONG = '{"name":"Abc"}', '{"name":"abc"}'


def named(pattern: str) -> dict[str, Any]:
    """A request for an answer whose name matches."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": pattern}},
        "required": ["name"],
        "additionalProperties": False,
    }
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}}


UNCOMPILED, KILLING = r"^\p{Lu}\p{Ll}{1,5}$", "^[A-Z][a-z]{1,5}$"
TOOL = {"type": "function", "function": {"name": "f" * 64, "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class Does:
    """What a server does in the place of an answer."""

    steps_: tuple[Step, ...]

    def steps(self, asked: dict[str, Any]) -> list[Step]:
        return list(self.steps_)


@dataclass(frozen=True)
class Poison:
    """`fields` of a request, and what the server does with it. With a `pattern` it is the schema that the server fails
    on; without one it is the whole request, whatever it is constrained to."""

    fields: dict[str, Any] = field(default_factory=dict)
    does: Refusal | Does | None = FAILED
    faults: tuple[Any, ...] = ()
    pattern: str = ""
    patience_s: float = 10.0


POISONS = {
    "a pattern that is not compiled": Poison(named(UNCOMPILED), pattern=UNCOMPILED),
    "a schema that it drops the connection on": Poison(named(KILLING), Does((Reset(),)), pattern=KILLING),
    "a bias": Poison({"logit_bias": {"1000": 100}}),
    "stop strings": Poison({"stop": ["\u0000", "a" * 500]}),
    "extreme sampling": Poison({"temperature": 2, "top_p": 1e-9, "presence_penalty": -2}),
    "long names of tools": Poison({"tools": [TOOL]}),
    "a prompt that it drops the connection on": Poison(does=Does((Reset(),))),
    "a prompt that it breaks off at": Poison(does=None, faults=(reset_at(3),)),
    "a prompt that it never answers": Poison(does=Does((Stall(),)), patience_s=1.0),
    "too many tokens": Poison({"max_tokens": 100_000}),
}
ROUNDS, AT_ONCE = 3, 4


@dataclass
class Model:
    """Of one server: answers everybody, but fails on poison. Free to write what it likes, it is wrong every other
    time."""

    kind: Kind
    poison: Poison
    written: int = 0

    def __call__(self, asked: dict[str, Any]) -> Any:
        prompt = asked["prompt"]
        marked = prompt if isinstance(prompt, str) else ENCODING.decode(prompt)
        held, more = self.kind.held(asked), {}
        if self._is_poisoned(marked, json.dumps(held.schema) if held is not None else ""):
            if self.poison.does is not None:
                return self.poison.does
            more = {"faults": self.poison.faults}
        behind = marked.rpartition(START)[2]
        if not behind.endswith("<|message|>"):
            return self.kind.script(answers("Fine."), **more)
        self.written += 1
        free = held is None and self.written % 2
        return self.kind.script((WRONG if free else RIGHT) + "<|return|>", **more)

    def _is_poisoned(self, prompt: str, schema: str) -> bool:
        if self.poison.pattern:
            return json.dumps(self.poison.pattern) in schema
        return POISON in prompt


def serve(fake: Any, model: Model) -> None:
    fake.script = model
    # What a server says of its load is a moment old: requests move by that too.
    fake.pages = {}


def config(kind: Kind, *fakes: Any, patience_s: float = 10.0, **settings: Any) -> dict[str, Any]:
    made = config_of(*(f"{kind.name}@{fake.url}" for fake in fakes), router_settings={"num_retries": 1}, **settings)
    for entry in made["model_list"]:
        entry["litellm_params"]["stream_timeout"] = patience_s
        entry["unisono"] = {"first_token_timeout_s": patience_s}
    return made


@dataclass(frozen=True)
class Client:
    gateway: Gateway
    key: str = ""

    async def chat(self, content: str = "Hi", **fields: Any) -> Answer:
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": content}], **fields}
        sent = bearing(self.key) if self.key else {}
        return await self.gateway.post("/v1/chat/completions", json.dumps(body).encode(), **sent)


async def homes(neighbour: Client) -> dict[str, str]:
    """The backends by name, each with a `prompt_cache_key` that leads to it."""
    found: dict[str, str] = {}
    async with asyncio.timeout(60):
        while len(found) < 2:
            # Whichever is examined first has all of them until the other one is.
            keys = [f"key {number}" for number in range(20)]
            asked = [await neighbour.chat(prompt_cache_key=key) for key in keys]
            found = {answer.headers["x-unisono-backend"]: key for key, answer in zip(keys, asked, strict=True)}
    return found


async def troubles(running: Gateway) -> list[str]:
    """Why backends are not used, or not like others."""
    reasons = set((await running.get("/health/readiness")).body["reasons"])
    return sorted(reasons - {"usage_unaccounted"})


QUICK = {
    ("vllm", name) for name in ("a prompt that it breaks off at", "stop strings", "a pattern that is not compiled")
}
"""In mid-answer, with a 500 by the options of a request, and with a 500 by its schema."""
CASES = [
    pytest.param(kind, name, id=f"{name} with {kind}", marks=[] if (kind, name) in QUICK else [pytest.mark.slow])
    for kind in ("vllm", "llamacpp", "ollama")
    for name in POISONS
]


@pytest.mark.parametrize(("kind", "name"), CASES)
async def test_what_one_key_asks_takes_no_backend_from_its_neighbours(kind: str, name: str, tmp_path: Path) -> None:
    poison = POISONS[name]
    made = KINDS[kind]
    async with made.fake() as one, made.fake() as other:
        for fake in (one, other):
            serve(fake, Model(made, poison))
        async with keyed(config(made, one, other, patience_s=poison.patience_s), tmp_path) as (running, ring):
            neighbour, hostile = [Client(running, (await ring.issue())[1]) for _ in range(2)]
            await hold_out(running, neighbour, hostile, poison, one, other)


async def hold_out(running: Gateway, neighbour: Client, hostile: Client, poison: Poison, *fakes: Any) -> None:
    places = await homes(neighbour)
    generations = [fake.patient.generations for fake in fakes]
    refused = 0
    for _ in range(ROUNDS):
        asked = (hostile.chat(f"Take {POISON}.", **poison.fields) for _ in range(AT_ONCE))
        for answer in await asyncio.gather(*asked):
            refused += answer.status == 400
            if poison.pattern:
                check_validated(answer)
        for name, key in places.items():
            answer = await neighbour.chat(prompt_cache_key=key)
            assert (answer.status, answer.headers["x-unisono-backend"]) == (200, name)
            assert message_of(answer).content == "Fine."
            assert message_of(answer).note["failovers"] == 0
    if not (poison.pattern or refused):
        # Every one of them failed there, so that a probe had to decide.
        async with asyncio.timeout(30):
            while any(fake.patient.generations == before for fake, before in zip(fakes, generations, strict=True)):
                await asyncio.sleep(0.05)
    assert await troubles(running) == []
    for name, key in places.items():
        assert (await neighbour.chat(prompt_cache_key=key)).headers["x-unisono-backend"] == name


def check_validated(answer: Answer) -> None:
    """The answer to a request whose schema the backend failed on."""
    assert answer.status == 200, answer.raw
    said = message_of(answer)
    assert said.content == RIGHT
    assert "unmet" not in said.note
    assert [note for note in said.note["notes"] if "constraint (json_schema)" in note]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in POISONS])
async def test_without_keys_a_request_that_is_repeated_takes_no_backend_from_others(name: str) -> None:
    poison, made = POISONS[name], KINDS["vllm"]
    async with made.fake() as one, made.fake() as other:
        for fake in (one, other):
            serve(fake, Model(made, poison))
        async with gateway(config(made, one, other, patience_s=poison.patience_s)) as running:
            await hold_out(running, Client(running), Client(running), poison, one, other)


async def test_a_refused_constraint_is_counted_and_not_sent_again() -> None:
    poison, made = POISONS["a pattern that is not compiled"], KINDS["vllm"]
    async with made.fake() as fake:
        fake.script = Model(made, poison)
        async with gateway(config(made, fake)) as running:
            for stream in (False, True):
                answer = await running.chat(stream=stream, **poison.fields)
                assert (answer.status, message_of(answer).content) == (200, RIGHT)
            constrained = [seen for seen in fake.requests if "structured_outputs" in seen.json]
            assert len(constrained) == 1
            page = await metrics(Client(running))
    counted = [line for line in page.splitlines() if line.startswith("unisono_constraints_refused_total{")]
    assert sorted(counted) == [
        'unisono_constraints_refused_total{backend="vllm-1",model="gpt-oss",reason="remembered"} 1.0',
        'unisono_constraints_refused_total{backend="vllm-1",model="gpt-oss",reason="server_error"} 1.0',
    ]


async def metrics(client: Client) -> str:
    headers = bearing(client.key) if client.key else {}
    async with client.gateway.session.get(client.gateway.url + "/metrics", headers=headers) as response:
        return await response.text()


def fails_always(kind: Kind) -> Callable[[dict[str, Any]], Any]:
    return lambda asked: FAILED


def fails_behind_headers(kind: Kind) -> Callable[[dict[str, Any]], Any]:
    def does(asked: dict[str, Any]) -> Any:
        marked = ENCODING.decode(asked["prompt"])
        return FAILED if marked.endswith("<|message|>") else kind.script(answers("Fine."))

    return does


OPEN = 'unisono_backend_circuit_state{backend="vllm-1",kind="error",model="gpt-oss"} 2.0'
Behaviour = Callable[[Kind], Callable[[dict[str, Any]], Any]]
BROKEN: dict[str, tuple[Behaviour, dict[str, Any]]] = {
    "always, asked for a form": (fails_always, named(UNCOMPILED)),
    "always": (fails_always, {}),
    "with a constraint and without": (fails_behind_headers, named(UNCOMPILED)),
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("fails", "fields"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("is_keyed", [True, False], ids=["one key", "without one"])
async def test_a_backend_that_fails_by_itself_rests_whoever_asks(
    fails: Behaviour, fields: dict[str, Any], is_keyed: bool, tmp_path: Path
) -> None:
    made = KINDS["vllm"]
    async with made.fake() as broken:
        broken.script = lambda asked: made.script(answers("Fine."))
        settings = config(made, broken)
        settings["router_settings"] = {"num_retries": 0, "allowed_fails": 3, "cooldown_time": 60}
        async with keyed(settings, tmp_path) as (running, ring):
            client = Client(running, (await ring.issue())[1] if is_keyed else MASTER)
            assert (await client.chat()).status == 200
            broken.script = fails(made)
            broken.patient.refusal = FAILED
            for _ in range(4):
                assert (await client.chat(**fields)).status == 502
            async with asyncio.timeout(30):
                while OPEN not in await metrics(client):
                    await asyncio.sleep(0.05)
