"""Requests that make a backend fail: other clients keep the backend.

Their own client gets the best possible answer.
"""

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

VALID, INVALID = '{"name":"Abc"}', '{"name":"abc"}'


def named(pattern: str) -> dict[str, Any]:
    """Fields of a request for an answer with a name that matches the pattern."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": pattern}},
        "required": ["name"],
        "additionalProperties": False,
    }
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}}


UNCOMPILED, CRASHING = r"^\p{Lu}\p{Ll}{1,5}$", "^[A-Z][a-z]{1,5}$"
TOOL = {"type": "function", "function": {"name": "f" * 64, "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class ServerBehaviour:
    """Steps of a server instead of an answer."""

    steps_: tuple[Step, ...]

    def steps(self, request: dict[str, Any]) -> list[Step]:
        return list(self.steps_)


@dataclass(frozen=True)
class Poison:
    """Fields of a request, and the behaviour of the server for it.

    With a `pattern` the server fails on the schema, otherwise on the whole request.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    behaviour: Refusal | ServerBehaviour | None = FAILED
    faults: tuple[Any, ...] = ()
    pattern: str = ""
    patience_s: float = 10.0


POISONS = {
    "pattern that does not compile": Poison(named(UNCOMPILED), pattern=UNCOMPILED),
    "schema that drops the connection": Poison(named(CRASHING), ServerBehaviour((Reset(),)), pattern=CRASHING),
    "logit bias": Poison({"logit_bias": {"1000": 100}}),
    "stop strings": Poison({"stop": ["\u0000", "a" * 500]}),
    "extreme sampling": Poison({"temperature": 2, "top_p": 1e-9, "presence_penalty": -2}),
    "long tool names": Poison({"tools": [TOOL]}),
    "prompt that drops the connection": Poison(behaviour=ServerBehaviour((Reset(),))),
    "prompt that aborts the stream": Poison(behaviour=None, faults=(reset_at(3),)),
    "prompt that never gets an answer": Poison(behaviour=ServerBehaviour((Stall(),)), patience_s=1.0),
    "too many tokens": Poison({"max_tokens": 100_000}),
}
ROUNDS, CONCURRENCY = 3, 4


@dataclass
class Model:
    """Model of a server that fails on poison and answers all other requests.

    Without a constraint, every second answer does not match the schema.
    """

    kind: Kind
    poison: Poison
    answer_count: int = 0

    def __call__(self, request: dict[str, Any]) -> Any:
        prompt = request["prompt"]
        marked = prompt if isinstance(prompt, str) else ENCODING.decode(prompt)
        constraint, options = self.kind.held(request), {}
        if self._is_poisoned(marked, json.dumps(constraint.schema) if constraint is not None else ""):
            if self.poison.behaviour is not None:
                return self.poison.behaviour
            options = {"faults": self.poison.faults}
        prefix = marked.rpartition(START)[2]
        if not prefix.endswith("<|message|>"):
            return self.kind.script(answers("Fine."), **options)
        self.answer_count += 1
        is_invalid = constraint is None and self.answer_count % 2
        return self.kind.script((INVALID if is_invalid else VALID) + "<|return|>", **options)

    def _is_poisoned(self, prompt: str, schema: str) -> bool:
        if self.poison.pattern:
            return json.dumps(self.poison.pattern) in schema
        return POISON in prompt


def serve(fake: Any, model: Model) -> None:
    fake.script = model
    # Reported load is slightly old and would also move requests.
    fake.pages = {}


def config(kind: Kind, *fakes: Any, patience_s: float = 10.0, **settings: Any) -> dict[str, Any]:
    result = config_of(*(f"{kind.name}@{fake.url}" for fake in fakes), router_settings={"num_retries": 1}, **settings)
    for entry in result["model_list"]:
        entry["litellm_params"]["stream_timeout"] = patience_s
        entry["unisono"] = {"first_token_timeout_s": patience_s}
    return result


@dataclass(frozen=True)
class Client:
    gateway: Gateway
    key: str = ""

    async def chat(self, content: str = "Hi", **fields: Any) -> Answer:
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": content}], **fields}
        headers = bearing(self.key) if self.key else {}
        return await self.gateway.post("/v1/chat/completions", json.dumps(body).encode(), **headers)


async def backend_keys(client: Client) -> dict[str, str]:
    """Return the backends by name, each with a `prompt_cache_key` that is routed to it."""
    keys_by_backend: dict[str, str] = {}
    async with asyncio.timeout(60):
        while len(keys_by_backend) < 2:
            # Until both backends are probed, the first one serves all requests.
            keys = [f"key {number}" for number in range(20)]
            responses = [await client.chat(prompt_cache_key=key) for key in keys]
            keys_by_backend = {
                response.headers["x-unisono-backend"]: key for key, response in zip(keys, responses, strict=True)
            }
    return keys_by_backend


async def health_reasons(running: Gateway) -> list[str]:
    """Return the reasons for restricted backends."""
    reasons = set((await running.get("/health/readiness")).body["reasons"])
    return sorted(reasons - {"usage_unaccounted"})


# Failures during the answer, by request options, and by the schema.
QUICK = {("vllm", name) for name in ("prompt that aborts the stream", "stop strings", "pattern that does not compile")}
CASES = [
    pytest.param(kind, name, id=f"{name} with {kind}", marks=[] if (kind, name) in QUICK else [pytest.mark.slow])
    for kind in ("vllm", "llamacpp", "ollama")
    for name in POISONS
]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("kind", "name"), CASES)
async def test_poison_of_one_key_takes_no_backend_from_other_keys(kind: str, name: str, tmp_path: Path) -> None:
    poison = POISONS[name]
    backend_kind = KINDS[kind]
    async with backend_kind.fake() as first, backend_kind.fake() as second:
        for fake in (first, second):
            serve(fake, Model(backend_kind, poison))
        async with keyed(config(backend_kind, first, second, patience_s=poison.patience_s), tmp_path) as (
            running,
            ring,
        ):
            neighbour, hostile = [Client(running, (await ring.issue())[1]) for _ in range(2)]
            await assert_neighbour_keeps_backends(running, neighbour, hostile, poison, first, second)


async def assert_neighbour_keeps_backends(
    running: Gateway, neighbour: Client, hostile: Client, poison: Poison, *fakes: Any
) -> None:
    keys_by_backend = await backend_keys(neighbour)
    generations = [fake.patient.generations for fake in fakes]
    rejected = 0
    for _ in range(ROUNDS):
        requests = (hostile.chat(f"Take {POISON}.", **poison.fields) for _ in range(CONCURRENCY))
        for response in await asyncio.gather(*requests):
            rejected += response.status == 400
            if poison.pattern:
                check_validated(response)
        for name, key in keys_by_backend.items():
            response = await neighbour.chat(prompt_cache_key=key)
            assert (response.status, response.headers["x-unisono-backend"]) == (200, name)
            assert message_of(response).content == "Fine."
            assert message_of(response).note["failovers"] == 0
    if not (poison.pattern or rejected):
        # Every attempt failed, so a probe had to decide about the backend.
        async with asyncio.timeout(30):
            while any(fake.patient.generations == before for fake, before in zip(fakes, generations, strict=True)):
                await asyncio.sleep(0.05)
    assert await health_reasons(running) == []
    for name, key in keys_by_backend.items():
        assert (await neighbour.chat(prompt_cache_key=key)).headers["x-unisono-backend"] == name


def check_validated(response: Answer) -> None:
    """Check the answer to a request with a schema that made the backend fail."""
    assert response.status == 200, response.raw
    message = message_of(response)
    assert message.content == VALID
    assert "unmet" not in message.note
    assert [note for note in message.note["notes"] if "constraint (json_schema)" in note]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in POISONS])
async def test_poison_without_keys_takes_no_backend_from_other_requests(name: str) -> None:
    poison, backend_kind = POISONS[name], KINDS["vllm"]
    async with backend_kind.fake() as first, backend_kind.fake() as second:
        for fake in (first, second):
            serve(fake, Model(backend_kind, poison))
        async with gateway(config(backend_kind, first, second, patience_s=poison.patience_s)) as running:
            await assert_neighbour_keeps_backends(running, Client(running), Client(running), poison, first, second)


async def test_a_rejected_constraint_is_counted_and_not_sent_again() -> None:
    poison, backend_kind = POISONS["pattern that does not compile"], KINDS["vllm"]
    async with backend_kind.fake() as fake:
        fake.script = Model(backend_kind, poison)
        async with gateway(config(backend_kind, fake)) as running:
            for stream in (False, True):
                response = await running.chat(stream=stream, **poison.fields)
                assert (response.status, message_of(response).content) == (200, VALID)
            constrained = [seen for seen in fake.requests if "structured_outputs" in seen.json]
            assert len(constrained) == 1
            page = await metrics(Client(running))
    metric_lines = [line for line in page.splitlines() if line.startswith("unisono_constraints_refused_total{")]
    assert sorted(metric_lines) == [
        'unisono_constraints_refused_total{backend="vllm-1",model="gpt-oss",reason="remembered"} 1.0',
        'unisono_constraints_refused_total{backend="vllm-1",model="gpt-oss",reason="server_error"} 1.0',
    ]


async def metrics(client: Client) -> str:
    headers = bearing(client.key) if client.key else {}
    async with client.gateway.session.get(client.gateway.url + "/metrics", headers=headers) as response:
        return await response.text()


def fails_always(kind: Kind) -> Callable[[dict[str, Any]], Any]:
    return lambda request: FAILED


def fails_after_headers(kind: Kind) -> Callable[[dict[str, Any]], Any]:
    def behaviour(request: dict[str, Any]) -> Any:
        marked = ENCODING.decode(request["prompt"])
        return FAILED if marked.endswith("<|message|>") else kind.script(answers("Fine."))

    return behaviour


OPEN = 'unisono_backend_circuit_state{backend="vllm-1",kind="error",model="gpt-oss"} 2.0'
Behaviour = Callable[[Kind], Callable[[dict[str, Any]], Any]]
BROKEN: dict[str, tuple[Behaviour, dict[str, Any]]] = {
    "always, with a schema": (fails_always, named(UNCOMPILED)),
    "always": (fails_always, {}),
    "with and without a constraint": (fails_after_headers, named(UNCOMPILED)),
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("fails", "fields"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("is_keyed", [True, False], ids=["one key", "no key"])
async def test_a_backend_that_always_fails_opens_its_circuit(
    fails: Behaviour, fields: dict[str, Any], is_keyed: bool, tmp_path: Path
) -> None:
    backend_kind = KINDS["vllm"]
    async with backend_kind.fake() as broken:
        broken.script = lambda body: backend_kind.script(answers("Fine."))
        settings = config(backend_kind, broken)
        settings["router_settings"] = {"num_retries": 0, "allowed_fails": 3, "cooldown_time": 60}
        async with keyed(settings, tmp_path) as (running, ring):
            client = Client(running, (await ring.issue())[1] if is_keyed else MASTER)
            assert (await client.chat()).status == 200
            broken.script = fails(backend_kind)
            broken.patient.refusal = FAILED
            for _ in range(4):
                assert (await client.chat(**fields)).status == 502
            async with asyncio.timeout(30):
                while OPEN not in await metrics(client):
                    await asyncio.sleep(0.05)
