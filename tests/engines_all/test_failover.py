"""Failover between engines of two kinds, in the middle of an answer.

The first engine dies or falls silent. The client receives the same answer as from either engine alone. All engines
generate the same tokens with the demo model, so the rest of the text shows whether the second engine continued from the
exact tokens of the first.
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
from tests.engines_all.engines import Running, child_pids, wait_until_idle
from tests.engines_all.striking import (
    EngineProcesses,
    FinishedTooEarly,
    Fleet,
    ReceivedStream,
    StreamRequest,
    chat_parts,
    processes_of,
    responses_parts,
)
from unisono.core.generation import Prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

# Failures cause no cooldown, so that a failed deployment is used again.
NO_COOLDOWN = {"allowed_fails": 1000, "cooldown_time": 0.01}
# Stream timeout of a frozen engine.
SILENCE_S = 3.0


MAX_ATTEMPTS = 6


@dataclass(frozen=True)
class Interruption:
    """Point of an answer at which its engine is interrupted."""

    user: str
    # Name of the same prompt among the recorded conversations.
    prompt: str
    is_reached: Callable[[ReceivedStream], bool]
    tools: bool = False


POINTS = {
    "in the text": Interruption("Count to 30.", "count", lambda stream: len(stream.text_of("text")) >= 12),
    "in the reasoning": Interruption(
        "What is the weather in Paris?", "weather", lambda stream: len(stream.text_of("reasoning")) >= 8, tools=True
    ),
    "in the arguments": Interruption(
        "What is the weather in Paris?", "weather", lambda stream: bool(stream.text_of("arguments")), tools=True
    ),
}
PAIRS = [("llamacpp", "mlx_server"), ("mlx_server", "vllm"), ("mlx", "llamacpp"), ("vllm", "llamacpp")]
POINTS_AND_SURFACES = [
    ("in the text", "chat"),
    ("in the text", "responses"),
    ("in the reasoning", "responses"),
    ("in the arguments", "chat"),
]
# Engines that are killed in one case only, after all other cases. They are frozen as often as the others.
SLOW_TO_START = ("vllm",)
CASES = sorted(
    (
        (pair, fault, point, surface)
        for pair in PAIRS
        for fault in ("frozen", "killed")
        for point, surface in POINTS_AND_SURFACES
        if pair[0] not in SLOW_TO_START or fault == "frozen" or (point, surface) == POINTS_AND_SURFACES[0]
    ),
    key=lambda case: (case[0][0] in SLOW_TO_START and case[1] == "killed", PAIRS.index(case[0])),
)


def request_for(point: Interruption, surface: str) -> StreamRequest:
    common = {"model": "gpt-oss", "temperature": 0, "stream": True}
    if surface == "responses":
        tools = [WEATHER] if point.tools else []
        body: dict[str, Any] = {**common, "input": point.user, "tools": tools}
        return StreamRequest("/v1/responses", body, responses_parts)
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    tools = [{"type": "function", "function": function}]
    body = {**common, "messages": [{"role": "user", "content": point.user}], "stream_options": {"include_usage": True}}
    return StreamRequest("/v1/chat/completions", body | ({"tools": tools} if point.tools else {}), chat_parts)


def config(*engines: Running, silence_s: float = 60.0) -> dict[str, Any]:
    """Return a model group. Each engine serves only requests that those before it cannot serve."""
    entries: list[Any] = []
    for order, engine in enumerate(engines):
        entry: dict[str, Any] = dict(engine.deployment())
        entry["litellm_params"] |= {"order": order, "stream_timeout": silence_s}
        entry["model_info"] |= {"id": engine.engine.kind}
        entry["unisono"] = {"stream_tool_arguments": True}
        entries.append(entry)
    return {"model_list": entries, "unisono": PINNED, "router_settings": NO_COOLDOWN}


def content_of(stream: ReceivedStream) -> tuple[str, str, str]:
    return stream.text_of("reasoning"), stream.text_of("text"), stream.text_of("arguments")


def usage_of(stream: ReceivedStream) -> tuple[int, int]:
    """Return the number of prompt tokens and of output tokens."""
    usage = stream.fields["usage"]
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["output_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def assert_equal_but_for_a_space(stream: ReceivedStream, moment: float, expected: ReceivedStream) -> None:
    """Check the stream apart from one space.

    mlx_lm.server drops the space at the start of its text.
    """
    restored = []
    for kind in ("reasoning", "text", "arguments"):
        before, whole = stream.text_before(moment, kind), stream.text_of(kind)
        lost = whole != expected.text_of(kind)
        restored.append(f"{before} {whole[len(before) :]}" if lost else whole)
    assert tuple(restored) == content_of(expected)
    (prompt, answer), (whole_prompt, whole_answer) = usage_of(stream), usage_of(expected)
    assert prompt == whole_prompt
    assert 0 <= whole_answer - answer <= 1


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.end()


async def first_token_s(engine: Running, point: Interruption) -> float:
    """Return the seconds to the first token of an engine, without a gateway.

    The engine has already cached the prompt.
    """
    tokens = conversations()[point.prompt]
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


def report_gap(request: pytest.FixtureRequest, pair: tuple[str, str], fault: str, figures: str) -> None:
    about = request.config.stash.setdefault(MEASURED, {}).setdefault(f"{pair[0]}, then {pair[1]}, {fault}", {})
    about[request.node.callspec.id.split("-", 2)[2]] = figures


def route_of(stream: ReceivedStream) -> dict[str, object]:
    about = stream.fields["unisono"]
    return {name: about[name] for name in ("backend", "failovers")}


async def wait_until_probed(caplog: pytest.LogCaptureFixture, engines: tuple[str, ...]) -> None:
    """Wait until all engines are probed. Before that, the probed ones receive all requests."""
    async with asyncio.timeout(60):
        while set(engines) - {
            getattr(record, "backend", "") for record in caplog.records if record.msg == "backend ready"
        }:
            await asyncio.sleep(0.02)


async def interrupt(
    stream_request: StreamRequest,
    site: Gateway,
    engine: EngineProcesses,
    point: Interruption,
    fault: Callable[[], None] | None,
) -> tuple[ReceivedStream, float]:
    """Return an interrupted stream.

    Calls are short: some end before a busy machine can interrupt them.
    """
    for _ in range(MAX_ATTEMPTS):
        try:
            return await stream_request.interrupted(site, engine, point.is_reached, fault)
        except FinishedTooEarly as error:
            missed = error
            engine.resume()
    raise missed


def case_id(of: object) -> str:
    return " then ".join(of) if isinstance(of, tuple) else str(of)


@pytest.mark.parametrize(("pair", "fault", "point", "surface"), CASES, ids=case_id)
async def test_another_engine_continues_an_interrupted_answer(
    fleet: Fleet,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    pair: tuple[str, str],
    fault: str,
    point: str,
    surface: str,
) -> None:
    caplog.set_level(logging.INFO, "unisono.routing")
    first, second = (fleet.get(name) for name in pair)
    position, stream_request = POINTS[point], request_for(POINTS[point], surface)
    own_s = await first_token_s(second, position)
    async with gateway(config(second)) as alone:
        expected = await stream_request.completed(alone)
    caplog.clear()
    before = child_pids("mlx.engine")
    async with gateway(config(first, second, silence_s=SILENCE_S if fault == "frozen" else 60.0)) as both:
        await wait_until_probed(caplog, pair)
        undisturbed = await stream_request.completed(both)
        with processes_of(first, before) as processes:
            stream, moment = await interrupt(
                stream_request, both, processes, position, processes.kill if fault == "killed" else None
            )
        if fault == "frozen" and first.pid is not None:
            # The gateway has left the request of the frozen engine.
            await wait_until_idle(first)

    gap_s = stream.gap_after(moment)
    report_gap(request, pair, fault, f"{gap_s * 1000:.0f} ms (first token {own_s * 1000:.0f} ms)")
    assert route_of(undisturbed) == {"backend": pair[0], "failovers": 0}
    assert content_of(undisturbed) == content_of(expected)
    assert route_of(stream) == {"backend": pair[1], "failovers": 1}
    if content_of(stream) == content_of(expected):
        prompt, answer = usage_of(stream)
        assert prompt == usage_of(expected)[0]
        # Tokens of text output are counted by its characters; at the seam, one token may be counted as two.
        assert answer - usage_of(expected)[1] in ({0} if second.engine.shows_stop else {0, 1})
    else:
        assert not second.engine.shows_stop
        assert_equal_but_for_a_space(stream, moment, expected)


async def test_a_killed_engine_is_used_again_after_its_restart(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "unisono.routing")
    pair = ("llamacpp", "mlx_server")
    first, second = (fleet.get(name) for name in pair)
    point = POINTS["in the text"]
    stream_request = request_for(point, "chat")
    async with gateway(config(first, second)) as both:
        await wait_until_probed(caplog, pair)
        with processes_of(first, []) as processes:
            stream, _ = await interrupt(stream_request, both, processes, point, processes.kill)
        assert route_of(await stream_request.completed(both))["backend"] == "mlx_server"
        await asyncio.to_thread(fleet.restart, "llamacpp", port_of(first))
        async with asyncio.timeout(30):
            while route_of(again := await stream_request.completed(both))["backend"] != "llamacpp":
                await asyncio.sleep(0.1)

    assert route_of(stream)["failovers"] == 1
    assert (route_of(again)["failovers"], content_of(again)) == (0, content_of(stream))


def port_of(engine: Running) -> int:
    assert engine.url is not None
    return int(engine.url.rpartition(":")[2])
