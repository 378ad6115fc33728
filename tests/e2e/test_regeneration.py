"""Regenerated tool calls and answers: sampling of each retry, and the text that the client gets in the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.obeying import KINDS, SURFACES, Desk, Outcome, answers, calls, desk
from tests.e2e.test_forced_tools import CITY, PARIS, tool

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS = [tool("get_weather", CITY)]
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY}}
FIRST, SECOND, THIRD = '{"city":"Pa', '{"city":"Lo', '{"city":"Ro'
# The retries of a broken text, and the text that the client gets.
RETRIES: Mapping[str, tuple[Sequence[str], str]] = {
    "the first retry is valid": ([PARIS], PARIS),
    "the second retry is valid": ([SECOND, PARIS], PARIS),
    "no retry is valid": ([SECOND, THIRD], FIRST),
    "every retry repeats the text": ([FIRST, FIRST], FIRST),
}


QUICK = ("vllm", "vllm, unguided", "mlx_server")
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=EACH)
async def here(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


def drawn(request: Mapping[str, Any]) -> tuple[float, int | None]:
    """Temperature and seed of a request that a backend got."""
    fields = request.get("sampling_params") or request.get("options") or request
    seed = fields.get("seed", fields.get("sampling_seed"))
    return fields["temperature"], None if seed == -1 else seed


def seen(outcome: Outcome) -> tuple[Any, ...]:
    """The part of an answer that does not depend on how it was sent."""
    return outcome.text, outcome.refusal, outcome.calls, outcome.unmet, outcome.note["recoveries"], outcome.finish


async def each_way(here: Desk, surface: str, first: str, retries: Sequence[str], **fields: Any) -> Outcome:
    """The answer, which is the same whole, streamed and on a second request, as is the sampling of all its retries."""
    outcomes, requests = [], []
    for stream in (False, True, False):
        begun = [calls("get_weather", each) for each in retries] if "tools" in fields else []
        model = here.think(first, *([] if here.kind.guided else begun), bodies=list(retries))
        outcomes.append(await SURFACES[surface](here, stream=stream, temperature=0, **fields))
        requests.append([drawn(request) for request in model.requests])
    assert seen(outcomes[0]) == seen(outcomes[1]) == seen(outcomes[2])
    assert requests[0] == requests[1] == requests[2]
    return outcomes[0]


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize(("retries", "expected"), RETRIES.values(), ids=RETRIES)
async def test_a_broken_call_is_regenerated_the_same_way_each_time(
    here: Desk, surface: str, retries: Sequence[str], expected: str
) -> None:
    outcome = await each_way(here, surface, calls("get_weather", FIRST), retries, tools=TOOLS)

    [(name, arguments)] = outcome.calls
    assert name == "get_weather"
    # Messages has no form for arguments that are no object.
    assert arguments == expected or (surface == "messages" and FIRST[:-1] in arguments.replace("\\", ""))
    assert outcome.note["recoveries"].count("regenerated-call") == 1
    sampling = [drawn(request) for request in here.model.requests]
    assert sampling[0][0] == 0
    if here.kind.guided:
        # The constraint changes the outcome by itself.
        assert sampling[1] == sampling[0]
    redrawn = sampling[2:] if here.kind.guided else sampling[1:]
    assert all(temperature > 0 and seed is not None for temperature, seed in redrawn)
    assert len({seed for _, seed in redrawn}) == len(redrawn)


@pytest.mark.parametrize("here", ["vllm, unguided", "mlx_server"], indirect=True)
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize(("retries", "expected"), RETRIES.values(), ids=RETRIES)
async def test_an_answer_of_another_form_is_regenerated_the_same_way_each_time(
    here: Desk, surface: str, retries: Sequence[str], expected: str
) -> None:
    outcome = await each_way(here, surface, answers(FIRST), retries, response_format=FORM)

    assert expected in (outcome.text, outcome.refusal)
    assert (outcome.unmet == "") is (expected == PARIS)


@pytest.mark.parametrize("here", ["vllm, unguided", "mlx_server"], indirect=True)
@pytest.mark.parametrize("surface", SURFACES)
async def test_the_first_call_is_returned_with_its_own_name(here: Desk, surface: str) -> None:
    here.think(calls("get_weather", FIRST), calls("add", SECOND), calls("add", THIRD))
    outcome = await SURFACES[surface](here, stream=False, temperature=0, tools=[*TOOLS, tool("add", CITY)])

    assert [name for name, _ in outcome.calls] == ["get_weather"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("surface", SURFACES)
async def test_a_run_of_blanks_is_removed_and_the_answer_continues(here: Desk, surface: str, stream: bool) -> None:
    begun = '{"city":' + " \n" * 200
    model = here.think(answers("Hm." if here.kind.guided else begun), '"Paris"}<|return|>', bodies=[begun])
    outcome = await SURFACES[surface](here, stream=stream, response_format=FORM)

    assert (outcome.text, outcome.unmet) == (PARIS, "")
    assert "repetition" in outcome.note["recoveries"]
    assert model.asked[-1].behind == '<|channel|>final<|message|>{"city":'
