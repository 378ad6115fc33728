"""Talks on every surface while connections, answers and processes break under them: each comes to exactly what it comes
to undisturbed, or, where nobody is left, to the beginning of it and a typed error."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import pytest_asyncio

from tests.chaos.clients import SURFACES
from tests.chaos.proxy import Fault
from tests.chaos.rack import Rack, rack
from tests.chaos.storm import SLOTS, Drawn, Weather, blow, drawn, storm
from tests.chaos.talks import talk
from tests.mcp.conftest import Upstream, start_upstream

in_one_loop = pytest.mark.asyncio(loop_scope="module")

LONGEST_GAP_S = 2.0
"""Of the stream that nothing happens to, by its 99th percentile: a loop that was held, on a busy machine too. `make
chaos` tells how long it was."""


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    importlib.import_module("unisono.mcp.calls")
    with start_upstream(tmp_path_factory.mktemp("chaos-upstream")) as (_, found):
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rack]:
    async with rack(tmp_path_factory.mktemp("chaos"), SLOTS) as running:
        yield running


def calm(weather: Weather) -> None:
    assert not weather.failures, "\n".join(weather.failures)
    assert weather.p99_s < LONGEST_GAP_S


@in_one_loop
async def test_whatever_breaks_every_client_gets_what_it_would_have_got(here: Rack, upstream: Upstream) -> None:
    weather = await storm(here, upstream, 12)
    calm(weather)
    # Some are meant for a place that an answer never comes to.
    assert weather.fired > weather.talks / 2
    assert weather.failovers > weather.talks / 3


CASES: dict[str, tuple[str, Sequence[str], str, Sequence[Fault]]] = {
    "never begun on the one, broken off on the other": (
        "plain",
        ["vllm 1", "sglang"],
        "chat stream",
        [Fault("http500"), Fault("close", 20)],
    ),
    "busy at first, and where it comes back to": (
        "wonders",
        ["llamacpp", "vllm 1"],
        "responses stream",
        [Fault("http429", 0, 1.0), Fault("half", 30)],
    ),
    "behind a tool, where one is busy and one has failed": (
        "hosted",
        ["ollama", "sglang"],
        "responses whole",
        [Fault("http429", 0, 1.0), Fault("close", 27)],
    ),
    "from ids to text and back inside of arguments": (
        "call",
        ["vllm 1", "mlx_server"],
        "background",
        [Fault("reset", 45), Fault("garbage", 6)],
    ),
    "killed, then stalled": ("plain", ["vllm 1", "vllm 2"], "websocket", [Fault("kill", 12), Fault("stall", 8)]),
    "five deaths": ("plain", ["sglang", "llamacpp"], "chat stream", [Fault("close", 6)] * 5),
}


@pytest.mark.slow
@in_one_loop
async def test_what_once_went_wrong_does_not_again(here: Rack, upstream: Upstream) -> None:
    todo = [
        Drawn(talk(topic, 900, number, "x"), f"gpt-oss-{number}", slots, surface, list(faults))
        for number, (topic, slots, surface, faults) in enumerate(CASES.values())
    ]
    weather = await blow(here, upstream, todo)
    calm(weather)
    assert weather.fired == sum(len(faults) for *_, faults in CASES.values())


AGAIN = [Fault("reset")] * 40
"""More than anybody asks, probes included."""
DOOMED: dict[str, tuple[str, Sequence[str], str, Sequence[Fault]]] = {
    "all dead, in the answer": ("plain", ["vllm 1", "sglang"], "chat stream", [Fault("reset", 30), *AGAIN]),
    "all dead, in the thoughts": ("wonders", ["ollama", "llamacpp"], "responses stream", [Fault("close", 9), *AGAIN]),
    "all dead, in a message": ("plain", ["vllm 1", "llamacpp"], "messages stream", [Fault("close", 30), *AGAIN]),
    "all dead, over a WebSocket": ("plain", ["vllm 1", "mlx_server"], "websocket", [Fault("garbage", 25), *AGAIN]),
    "all dead, in the background": ("plain", ["vllm 1", "mlx_server"], "background", [Fault("half", 28), *AGAIN]),
    "markers that text cannot carry": ("literals", ["sglang", "ollama"], "chat stream", [Fault("close", 60), *AGAIN]),
    "half a character that text cannot carry": (
        "bytes",
        ["vllm 1", "mlx_server"],
        "responses stream",
        [Fault("close", 70), *AGAIN],
    ),
}


@pytest.mark.slow
@in_one_loop
async def test_where_nobody_can_take_it_there_is_the_beginning_and_an_error(here: Rack, upstream: Upstream) -> None:
    todo = [
        Drawn(talk(topic, 901, number, "x"), f"gpt-oss-{number}", slots, surface, list(faults), doomed=True)
        for number, (topic, slots, surface, faults) in enumerate(DOOMED.values())
    ]
    calm(await blow(here, upstream, todo))


def test_a_seed_stands_for_the_same_storm_everywhere() -> None:
    assert list(map(str, drawn(7))) == list(map(str, drawn(7)))
    assert {one.surface for one in drawn(7, 200)} == set(SURFACES)
    assert {slot for seed in range(9) for one in drawn(seed) for slot in one.kinds} == set(SLOTS)
