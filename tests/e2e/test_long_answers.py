"""Long answers: checked outside of the event loop, and deeply nested JSON is no failure."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from random import Random
from typing import Any, Final

import pytest
import pytest_asyncio

from tests.e2e.canary import STEP_S, Canary, singing
from tests.e2e.gateway import Answer, Gateway, config_of, gateway
from tests.e2e.obeying import KINDS, SURFACES, Desk, answers, calls, desk
from tests.e2e.thread_watch import watching
from tests.e2e.wires import WIRES, Fake, deployment
from tests.fakes import VllmScript, stall_at
from tests.schemas.suite import closed
from unisono.api import tool_calls
from unisono.harmony.encoding import load_encoding
from unisono.schemas import validation

SCHEMA: Final = closed(items={"type": "array", "items": {"type": "integer"}})
LONG: Final = json.dumps({"items": [Random(1).randrange(10**6) + number for number in range(20_000)]})
PUT: Final = {"type": "function", "function": {"name": "put", "parameters": SCHEMA, "strict": True}}
FORM: Final = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA, "strict": True}}
MAX_ATTEMPTS: Final = 20

pytestmark = pytest.mark.asyncio(loop_scope="module")

both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
on_each = pytest.mark.parametrize("surface", SURFACES)


# Checks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[Desk]:
    async with desk(KINDS["vllm, unguided"]) as running:
        yield running


def fields_for(surface: str, **fields: Any) -> dict[str, Any]:
    # Stored responses have a smaller limit.
    limits = {"store": False} if surface == "responses" else {}
    return {**fields, **limits, **({"max_tokens": 120_000} if surface == "messages" else {})}


@pytest.mark.sampled(one_in=4)
@both_forms
@on_each
@pytest.mark.parametrize("kind", ["answer", "call"])
async def test_a_long_body_is_checked_outside_of_the_event_loop(
    harness: Desk, kind: str, surface: str, stream: bool
) -> None:
    fields = {"response_format": FORM} if kind == "answer" else {"tools": [PUT]}
    with watching(validation) as watch:
        for _ in range(MAX_ATTEMPTS):
            harness.think(answers(LONG) if kind == "answer" else calls("put", LONG), per_chunk=500)
            outcome = await SURFACES[surface](harness, stream=stream, **fields_for(surface, **fields))
            body = outcome.text if kind == "answer" else outcome.calls[0][1]
            assert json.loads(body) == json.loads(LONG)
            if watch.seen:
                break
    assert watch.seen
    assert threading.get_ident() not in watch.seen


@pytest.mark.slow
async def test_long_arguments_for_messages_are_parsed_outside_of_the_event_loop(harness: Desk) -> None:
    with watching(tool_calls) as watch:
        for _ in range(MAX_ATTEMPTS):
            harness.think(calls("put", LONG), per_chunk=500)
            outcome = await SURFACES["messages"](harness, stream=False, **fields_for("messages", tools=[PUT]))
            assert json.loads(outcome.calls[0][1]) == json.loads(LONG)
            if watch.seen:
                break
    assert watch.seen
    assert threading.get_ident() not in watch.seen


@pytest.mark.slow
@on_each
async def test_a_disconnect_while_an_answer_is_checked_frees_the_backend(harness: Desk, surface: str) -> None:
    loop = asyncio.get_running_loop()
    tokens = load_encoding().encode_marked(answers(LONG))
    # The last token of the answer has arrived, and the backend does not finish.
    script = VllmScript(tokens=[*tokens, *tokens], per_chunk=len(tokens), faults=(stall_at(1),))
    harness.fake.script = lambda request: script
    fields = fields_for(surface, response_format=FORM)
    is_checked = asyncio.Event()
    harness.fake.requests.clear()
    task = asyncio.create_task(SURFACES[surface](harness, stream=True, **fields))
    await harness.fake.asked(within=20)
    with watching(validation, lambda: loop.call_soon_threadsafe(is_checked.set)):
        async with asyncio.timeout(20):
            await is_checked.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await harness.fake.gone(within=20)
    harness.think(answers(LONG), per_chunk=500)
    assert (await SURFACES[surface](harness, stream=False, **fields)).text == LONG


# Nesting

LEVELS: Final = 200_000
WINDOW: Final = 10_000_000
REQUEST_TIMEOUT_S: Final = 60.0
LONGEST_GAP_S: Final = 0.75


def nested_json(levels: int) -> str:
    """JSON with this many levels and no repetition, which would be stopped."""
    random = Random(7)
    prefixes: list[str] = []
    suffixes: list[str] = []
    while len(suffixes) < levels:
        list_levels = random.randrange(1, 9)
        prefixes.append("[" * list_levels + f'{{"{random.choice("abcdefghijklmnop")}":')
        suffixes += [*("]" * list_levels), "}"]
    return "".join(prefixes) + "1" + "".join(reversed(suffixes))


DEEP: Final = nested_json(LEVELS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[tuple[Fake, Gateway, Canary]]:
    wire = WIRES["vllm"]
    async with wire.fake(context=WINDOW) as fake, wire.fake() as canary_fake:
        fake.patient.constrains = False
        canary_script = wire.script("<|channel|>final<|message|>" + " ".join(map(str, range(10_000))), delay_s=STEP_S)
        canary_fake.script = lambda request: canary_script  # type: ignore[assignment]
        config = config_of()
        config["model_list"] = [
            deployment("gpt-oss", wire, fake, patience_s=60),
            deployment("gpt-oss-slow", wire, canary_fake),
        ]
        # Each regeneration would take as long again.
        config["model_list"][0]["unisono"]["recoveries"] = {"regenerated-answer": False, "regenerated-call": False}
        async with gateway(config) as running, singing(running, "gpt-oss-slow") as canary:
            yield fake, running, canary


async def post(running: Gateway, surface: str, **fields: Any) -> Answer:
    chat = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
    paths: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", chat),
        "responses": ("/v1/responses", {"model": "gpt-oss", "input": "Hi", "store": False}),
        "messages": ("/v1/messages", {**chat, "max_tokens": 5_000_000}),
    }
    path, body = paths[surface]
    return await running.post(path, json.dumps({**body, **fields}).encode())


def tool_for(surface: str) -> dict[str, Any]:
    match surface:
        case "chat":
            return {"type": "function", "function": {"name": "put", "parameters": {"type": "object"}}}
        case "responses":
            return {"type": "function", "name": "put", "parameters": {"type": "object"}}
        case _:
            return {"name": "put", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in ("object", "call")] + ["answer"]
)
@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "streamed"])
@on_each
async def test_a_deeply_nested_answer_is_not_an_error(
    site: tuple[Fake, Gateway, Canary], surface: str, stream: bool, kind: str
) -> None:
    fake, running, canary = site
    text = calls("put", DEEP) if kind == "call" else answers(DEEP)
    script = VllmScript(tokens=load_encoding().encode_marked(text), per_chunk=1000)
    fake.script = lambda request: script  # type: ignore[assignment]
    fields: dict[str, Any] = {"stream": stream}
    if kind == "call":
        fields["tools"] = [tool_for(surface)]
    elif kind == "object":
        fields |= {
            "chat": {"response_format": {"type": "json_object"}},
            "responses": {"text": {"format": {"type": "json_object"}}},
            "messages": {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        }[surface]
    await canary.fresh()
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        response = await post(running, surface, **fields)
    assert response.status == 200
    assert b'"error"' not in response.raw[-1000:]
    if kind == "answer":
        # All levels arrive, in one body or in the pieces of a stream.
        assert response.raw.count(b"[") >= DEEP.count("[")
    assert await canary.worst_s() < LONGEST_GAP_S
