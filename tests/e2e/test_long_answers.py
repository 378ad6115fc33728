"""Long answers of a model: their checks run beside the event loop, and no depth of their JSON is a failure."""

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
from unisono.api.messages import tool_input
from unisono.harmony.encoding import load_encoding
from unisono.schemas import validation

SCHEMA: Final = closed(items={"type": "array", "items": {"type": "integer"}})
LONG: Final = json.dumps({"items": [Random(1).randrange(10**6) + number for number in range(20_000)]})
PUT: Final = {"type": "function", "function": {"name": "put", "parameters": SCHEMA, "strict": True}}
FORM: Final = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA, "strict": True}}
MAX_SIGHTINGS_MISSED: Final = 20

pytestmark = pytest.mark.asyncio(loop_scope="module")

both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
on_each = pytest.mark.parametrize("surface", SURFACES)


# Checks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here() -> AsyncIterator[Desk]:
    async with desk(KINDS["vllm, unguided"]) as running:
        yield running


def fields_for(surface: str, **fields: Any) -> dict[str, Any]:
    # What is stored has a smaller limit.
    more = {"store": False} if surface == "responses" else {}
    return {**fields, **more, **({"max_tokens": 120_000} if surface == "messages" else {})}


@both_forms
@on_each
@pytest.mark.parametrize("kind", ["answer", "call"])
async def test_a_long_body_is_checked_outside_of_the_loops_thread(
    here: Desk, kind: str, surface: str, stream: bool
) -> None:
    fields = {"response_format": FORM} if kind == "answer" else {"tools": [PUT]}
    with watching(validation) as watch:
        for _ in range(MAX_SIGHTINGS_MISSED):
            here.think(answers(LONG) if kind == "answer" else calls("put", LONG), per_chunk=500)
            got = await SURFACES[surface](here, stream=stream, **fields_for(surface, **fields))
            said = got.text if kind == "answer" else got.calls[0][1]
            assert json.loads(said) == json.loads(LONG)
            if watch.seen:
                break
    assert watch.seen
    assert threading.get_ident() not in watch.seen


@pytest.mark.slow
async def test_long_arguments_are_parsed_for_messages_outside_of_the_loops_thread(here: Desk) -> None:
    with watching(tool_input) as watch:
        for _ in range(MAX_SIGHTINGS_MISSED):
            here.think(calls("put", LONG), per_chunk=500)
            got = await SURFACES["messages"](here, stream=False, **fields_for("messages", tools=[PUT]))
            assert json.loads(got.calls[0][1]) == json.loads(LONG)
            if watch.seen:
                break
    assert watch.seen
    assert threading.get_ident() not in watch.seen


@on_each
async def test_leaving_while_an_answer_is_checked_frees_the_backend(here: Desk, surface: str) -> None:
    loop = asyncio.get_running_loop()
    tokens = load_encoding().encode_marked(answers(LONG))
    # The last token has come, and the backend does not say that it is done.
    script = VllmScript(tokens=[*tokens, *tokens], per_chunk=len(tokens), faults=(stall_at(1),))
    here.fake.script = lambda asked: script
    fields = fields_for(surface, response_format=FORM)
    is_checked = asyncio.Event()
    here.fake.requests.clear()
    asking = asyncio.create_task(SURFACES[surface](here, stream=True, **fields))
    await here.fake.asked(within=20)
    with watching(validation, lambda: loop.call_soon_threadsafe(is_checked.set)):
        async with asyncio.timeout(20):
            await is_checked.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await here.fake.gone(within=20)
    here.think(answers(LONG), per_chunk=500)
    assert (await SURFACES[surface](here, stream=False, **fields)).text == LONG


# Nesting

LEVELS: Final = 200_000
WINDOW: Final = 10_000_000
SOON_S: Final = 60.0
LONGEST_GAP_S: Final = 0.75


def deep(levels: int) -> str:
    """JSON with so many levels, in which nothing is repeated: what is would be broken off."""
    random = Random(7)
    opened: list[str] = []
    ends: list[str] = []
    while len(ends) < levels:
        lists = random.randrange(1, 9)
        opened.append("[" * lists + f'{{"{random.choice("abcdefghijklmnop")}":')
        ends += [*("]" * lists), "}"]
    return "".join(opened) + "1" + "".join(reversed(ends))


DEEP: Final = deep(LEVELS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[tuple[Fake, Gateway, Canary]]:
    wire = WIRES["vllm"]
    async with wire.fake(context=WINDOW) as fake, wire.fake() as slow:
        fake.patient.constrains = False
        song = wire.script("<|channel|>final<|message|>" + " ".join(map(str, range(10_000))), delay_s=STEP_S)
        slow.script = lambda asked: song  # type: ignore[assignment]
        config = config_of()
        config["model_list"] = [
            deployment("gpt-oss", wire, fake, patience_s=60),
            deployment("gpt-oss-slow", wire, slow),
        ]
        # Each retry would take as long again.
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
@both_forms
@on_each
async def test_a_very_deep_answer_is_an_answer(
    site: tuple[Fake, Gateway, Canary], surface: str, stream: bool, kind: str
) -> None:
    fake, running, canary = site
    text = calls("put", DEEP) if kind == "call" else answers(DEEP)
    script = VllmScript(tokens=load_encoding().encode_marked(text), per_chunk=1000)
    fake.script = lambda asked: script  # type: ignore[assignment]
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
    async with asyncio.timeout(SOON_S):
        answer = await post(running, surface, **fields)
    print(
        kind,
        surface,
        stream,
        answer.status,
        len(answer.raw),
        answer.raw[:100],
        answer.raw[-300:],
        await canary.worst_s(),
    )
    assert answer.status == 200
    assert b'"error"' not in answer.raw[-1000:]
    assert await canary.worst_s() < LONGEST_GAP_S
