"""An engine that dies or falls silent in the middle of its answer, with one of another kind beside it: the client gets
the answer that either would have given alone.

All engines write the same tokens for the demo model, so the text behind the seam says whether the second one went on
from the very tokens of the first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.e2e.gateway import Gateway, gateway
from tests.e2e.talks import WEATHER
from tests.engines.demo_prompts import ENCODING, greedy
from tests.engines_all.conftest import MEASURED, PINNED
from tests.engines_all.conversations import conversations
from tests.engines_all.engines import Running, children_that_run, idle_soon
from tests.engines_all.striking import (
    Asked,
    Fleet,
    Story,
    Struck,
    TooLate,
    shown_by_chat,
    shown_by_responses,
    to_strike,
)
from unisono.core.generation import Prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

PATIENT = {"allowed_fails": 1000, "cooldown_time": 0.01}
"""Nobody rests here: who fails is asked again."""
SILENCE_S = 3.0
"""What a frozen engine is given."""


TRIES = 6


@dataclass(frozen=True)
class Place:
    """Where an answer is struck."""

    user: str
    prompt: str
    """The same among the recorded conversations."""
    here: Callable[[Story], bool]
    tools: bool = False


PLACES = {
    "in its text": Place("Count to 30.", "count", lambda story: len(story.said("text")) >= 12),
    "in its thoughts": Place(
        "What is the weather in Paris?", "weather", lambda story: len(story.said("thoughts")) >= 8, tools=True
    ),
    "in a call's arguments": Place(
        "What is the weather in Paris?", "weather", lambda story: bool(story.said("arguments")), tools=True
    ),
}
PAIRS = [("llamacpp", "mlx_server"), ("mlx_server", "vllm"), ("mlx", "llamacpp"), ("vllm", "llamacpp")]
SPOTS = [
    ("in its text", "chat"),
    ("in its text", "responses"),
    ("in its thoughts", "responses"),
    ("in a call's arguments", "chat"),
]
SLOW_TO_START = ("vllm",)
"""Killed once and last; frozen as often as the others."""
CASES = sorted(
    (
        (pair, blow, place, surface)
        for pair in PAIRS
        for blow in ("frozen", "killed")
        for place, surface in SPOTS
        if pair[0] not in SLOW_TO_START or blow == "frozen" or (place, surface) == SPOTS[0]
    ),
    key=lambda case: (case[0][0] in SLOW_TO_START and case[1] == "killed", PAIRS.index(case[0])),
)


def asked(place: Place, surface: str) -> Asked:
    common = {"model": "gpt-oss", "temperature": 0, "stream": True}
    if surface == "responses":
        tools = [WEATHER] if place.tools else []
        body: dict[str, Any] = {**common, "input": place.user, "tools": tools}
        return Asked("/v1/responses", body, shown_by_responses)
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    tools = [{"type": "function", "function": function}]
    body = {**common, "messages": [{"role": "user", "content": place.user}], "stream_options": {"include_usage": True}}
    return Asked("/v1/chat/completions", body | ({"tools": tools} if place.tools else {}), shown_by_chat)


def config(*engines: Running, silence_s: float = 60.0) -> dict[str, Any]:
    """One group; each engine gets only what those before it cannot take."""
    entries: list[Any] = []
    for order, engine in enumerate(engines):
        entry: dict[str, Any] = dict(engine.deployment())
        entry["litellm_params"] |= {"order": order, "stream_timeout": silence_s}
        entry["model_info"] |= {"id": engine.engine.kind}
        entry["unisono"] = {"stream_tool_arguments": True}
        entries.append(entry)
    return {"model_list": entries, "unisono": PINNED, "router_settings": PATIENT}


def essence(story: Story) -> tuple[str, str, str]:
    return story.said("thoughts"), story.said("text"), story.said("arguments")


def counts(story: Story) -> tuple[int, int]:
    """Tokens of the prompt and of the answer."""
    usage = story.last["usage"]
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["output_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def lost_a_space(story: Story, moment: float, expected: Story) -> None:
    """mlx_lm.server eats the space its text begins with, so that it may be missing at the seam, and nothing else."""
    healed = []
    for what in ("thoughts", "text", "arguments"):
        before, all_of_it = story.before(moment, what), story.said(what)
        lost = all_of_it != expected.said(what)
        healed.append(f"{before} {all_of_it[len(before) :]}" if lost else all_of_it)
    assert tuple(healed) == essence(expected)
    (prompt, answer), (whole_prompt, whole_answer) = counts(story), counts(expected)
    assert prompt == whole_prompt
    assert 0 <= whole_answer - answer <= 1


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.end()


async def first_token_s(engine: Running, place: Place) -> float:
    """Seconds until an engine that knows the prompt writes its first token, without a gateway."""
    tokens = conversations()[place.prompt]
    job = replace(greedy(tokens, 4), prompt=Prompt(tokens, ENCODING.decode(tokens)))
    backend = engine.backend()
    try:
        async for _ in backend.complete(job):
            pass
        began = time.monotonic()
        stream = backend.complete(job)
        await anext(stream)
        took = time.monotonic() - began
        async for _ in stream:
            pass
        return took
    finally:
        await backend.aclose()


def remember(request: pytest.FixtureRequest, pair: tuple[str, str], blow: str, figures: str) -> None:
    about = request.config.stash.setdefault(MEASURED, {}).setdefault(f"{pair[0]}, then {pair[1]}, {blow}", {})
    about[request.node.callspec.id.split("-", 2)[2]] = figures


def told(story: Story) -> dict[str, object]:
    about = story.last["unisono"]
    return {name: about[name] for name in ("backend", "failovers")}


async def all_examined(caplog: pytest.LogCaptureFixture, engines: tuple[str, ...]) -> None:
    """Until the gateway knows what each can do: before that whoever is known gets everything."""
    async with asyncio.timeout(60):
        while set(engines) - {getattr(one, "backend", "") for one in caplog.records if one.msg == "backend ready"}:
            await asyncio.sleep(0.02)


async def in_time(
    question: Asked, site: Gateway, engine: Struck, place: Place, blow: Callable[[], None] | None
) -> tuple[Story, float]:
    """The answer that was struck. A call is short: some are whole before a busy machine gets to strike them."""
    for _ in range(TRIES):
        try:
            return await question.struck(site, engine, place.here, blow)
        except TooLate as error:
            missed = error
            engine.go_on()
    raise missed


def named(of: object) -> str:
    return " then ".join(of) if isinstance(of, tuple) else str(of)


@pytest.mark.parametrize(("pair", "blow", "place", "surface"), CASES, ids=named)
async def test_an_answer_goes_on_where_its_engine_was_struck(
    fleet: Fleet,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    pair: tuple[str, str],
    blow: str,
    place: str,
    surface: str,
) -> None:
    caplog.set_level(logging.INFO, "unisono.routing")
    first, second = (fleet.well(name) for name in pair)
    here, question = PLACES[place], asked(PLACES[place], surface)
    own_s = await first_token_s(second, here)
    async with gateway(config(second)) as alone:
        expected = await question.answered(alone)
    caplog.clear()
    before = children_that_run("mlx.engine")
    async with gateway(config(first, second, silence_s=SILENCE_S if blow == "frozen" else 60.0)) as both:
        await all_examined(caplog, pair)
        undisturbed = await question.answered(both)
        with to_strike(first, before) as struck:
            story, moment = await in_time(question, both, struck, here, struck.kill if blow == "killed" else None)
        if blow == "frozen" and first.pid is not None:
            # What it was writing is nobody's any more.
            await idle_soon(first)

    gap_s = story.first_after(moment)
    remember(request, pair, blow, f"{gap_s * 1000:.0f} ms (first token {own_s * 1000:.0f} ms)")
    assert told(undisturbed) == {"backend": pair[0], "failovers": 0}
    assert essence(undisturbed) == essence(expected)
    assert told(story) == {"backend": pair[1], "failovers": 1}
    if essence(story) == essence(expected):
        prompt, said = counts(story)
        assert prompt == counts(expected)[0]
        # What comes as text is counted by its letters, and at the seam one token may be counted as two.
        assert said - counts(expected)[1] in ({0} if second.engine.shows_stop else {0, 1})
    else:
        assert not second.engine.shows_stop
        lost_a_space(story, moment, expected)


async def test_an_engine_that_was_killed_is_used_again_when_it_is_back(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "unisono.routing")
    pair = ("llamacpp", "mlx_server")
    first, second = (fleet.well(name) for name in pair)
    place = PLACES["in its text"]
    question = asked(place, "chat")
    async with gateway(config(first, second)) as both:
        await all_examined(caplog, pair)
        with to_strike(first, []) as struck:
            story, _ = await in_time(question, both, struck, place, struck.kill)
        assert told(await question.answered(both))["backend"] == "mlx_server"
        await asyncio.to_thread(fleet.again, "llamacpp", port_of(first))
        async with asyncio.timeout(30):
            while told(again := await question.answered(both))["backend"] != "llamacpp":
                await asyncio.sleep(0.1)

    assert told(story)["failovers"] == 1
    assert (told(again)["failovers"], essence(again)) == (0, essence(story))


def port_of(engine: Running) -> int:
    assert engine.url is not None
    return int(engine.url.rpartition(":")[2])
