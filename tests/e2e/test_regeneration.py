"""Regenerated tool calls and answers: sampling of each retry, and the text for the client."""

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
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


def sampling_of(request: Mapping[str, Any]) -> tuple[float, int | None]:
    """Return temperature and seed of a request that a backend received."""
    fields = request.get("sampling_params") or request.get("options") or request
    seed = fields.get("seed", fields.get("sampling_seed"))
    return fields["temperature"], None if seed == -1 else seed


def comparable(outcome: Outcome) -> tuple[Any, ...]:
    """Return the parts of an outcome that do not depend on streaming."""
    return outcome.text, outcome.refusal, outcome.calls, outcome.unmet, outcome.note["recoveries"], outcome.finish


async def regenerate_in_all_modes(
    harness: Desk, surface: str, first: str, retries: Sequence[str], **fields: Any
) -> Outcome:
    """Send the request whole, streamed and again; check that outcome and sampling are the same."""
    outcomes, requests = [], []
    for stream in (False, True, False):
        broken_calls = [calls("get_weather", retry) for retry in retries] if "tools" in fields else []
        model = harness.think(first, *([] if harness.kind.guided else broken_calls), bodies=list(retries))
        outcomes.append(await SURFACES[surface](harness, stream=stream, temperature=0, **fields))
        requests.append([sampling_of(request) for request in model.requests])
    assert comparable(outcomes[0]) == comparable(outcomes[1]) == comparable(outcomes[2])
    assert requests[0] == requests[1] == requests[2]
    return outcomes[0]


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize(("retries", "expected"), RETRIES.values(), ids=RETRIES)
async def test_a_broken_call_is_regenerated_the_same_way_each_time(
    harness: Desk, surface: str, retries: Sequence[str], expected: str
) -> None:
    outcome = await regenerate_in_all_modes(harness, surface, calls("get_weather", FIRST), retries, tools=TOOLS)

    [(name, arguments)] = outcome.calls
    assert name == "get_weather"
    # Messages cannot return arguments that are not an object.
    assert arguments == expected or (surface == "messages" and FIRST[:-1] in arguments.replace("\\", ""))
    assert outcome.note["recoveries"].count("regenerated-call") == 1
    sampling = [sampling_of(request) for request in harness.model.requests]
    assert sampling[0][0] == 0
    if harness.kind.guided:
        # The constraint is enough to change the outcome.
        assert sampling[1] == sampling[0]
    redrawn = sampling[2:] if harness.kind.guided else sampling[1:]
    assert all(temperature > 0 and seed is not None for temperature, seed in redrawn)
    assert len({seed for _, seed in redrawn}) == len(redrawn)


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("harness", ["vllm, unguided", "mlx_server"], indirect=True)
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize(("retries", "expected"), RETRIES.values(), ids=RETRIES)
async def test_an_invalid_json_answer_is_regenerated_the_same_way_each_time(
    harness: Desk, surface: str, retries: Sequence[str], expected: str
) -> None:
    outcome = await regenerate_in_all_modes(harness, surface, answers(FIRST), retries, response_format=FORM)

    assert expected in (outcome.text, outcome.refusal)
    assert (outcome.unmet == "") is (expected == PARIS)


@pytest.mark.parametrize("harness", ["vllm, unguided", "mlx_server"], indirect=True)
@pytest.mark.parametrize("surface", SURFACES)
async def test_the_first_call_is_returned_with_its_own_name(harness: Desk, surface: str) -> None:
    harness.think(calls("get_weather", FIRST), calls("add", SECOND), calls("add", THIRD))
    outcome = await SURFACES[surface](harness, stream=False, temperature=0, tools=[*TOOLS, tool("add", CITY)])

    assert [name for name, _ in outcome.calls] == ["get_weather"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("surface", SURFACES)
async def test_a_run_of_blanks_is_removed_and_the_answer_continues(harness: Desk, surface: str, stream: bool) -> None:
    broken_body = '{"city":' + " \n" * 200
    model = harness.think(
        answers("Hm." if harness.kind.guided else broken_body), '"Paris"}<|return|>', bodies=[broken_body]
    )
    outcome = await SURFACES[surface](harness, stream=stream, response_format=FORM)

    assert (outcome.text, outcome.unmet) == (PARIS, "")
    assert "repetition" in outcome.note["recoveries"]
    assert model.asked[-1].behind == '<|channel|>final<|message|>{"city":'
