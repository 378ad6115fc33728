"""Routing benchmark: selection among deployments with cached prefixes, and streams that break and continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import orjson
import pytest

from bench import break_model, breaks, choosing, http_client, vllm_wire, wires
from bench.break_model import ANSWER_TOKENS, BREAK_AFTER, BREAKS
from bench.breaks import Noted, Told
from bench.choosing import CASES, NUMBERING, Ask
from bench.http_client import Lost
from bench.material import Material
from bench.routed import CHOSEN


@pytest.mark.parametrize("how", [*CASES, NUMBERING])
async def test_every_selection_case_has_its_prefixes_and_is_timed(how: str) -> None:
    result = await choosing.run(Ask(how, times=1))
    assert (result.faults, result.examples) == (0, [])
    assert 0 < result.choose_us < 100_000


def test_every_selection_case_is_measured() -> None:
    assert list(CHOSEN) == [*CASES, NUMBERING]


async def test_a_prompt_with_another_number_of_holders_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "one holds it", replace(CASES["one holds it"], parts=2))
    result = await choosing.run(Ask("one holds it", times=1))
    assert result.faults == choosing.PROMPTS
    assert result.examples[0] == "one holds it: held to 1 ends, not 2"


@asynccontextmanager
async def model(stuff: Material) -> AsyncIterator[int]:
    async with await break_model.serve(stuff, 0) as server:
        yield int(server.sockets[0].getsockname()[1])


QUESTION = 7
FRAME = [200007, 200006, 173781]


def prompt_of(stuff: Material, *, generated: int = 0) -> list[int]:
    words, _ = stuff.prompt(wires.NORMAL_PROMPT, QUESTION)
    return [1, *words, *FRAME, *stuff.answer(ANSWER_TOKENS).tokens[:generated]]


def prompt_key(stuff: Material) -> str:
    return vllm_wire.asked(prompt_of(stuff))


async def received(port: int, prompt: Sequence[int], limit: int) -> bytes:
    """Return the received bytes of a stream, with LOST at the end if the connection broke."""
    body = {"model": vllm_wire.MODEL, "prompt": prompt, "max_tokens": limit, "stream": True}
    parts = list[bytes]()
    try:
        await http_client.once(port, http_client.message("/v1/completions", orjson.dumps(body)), parts.append)
    except (Lost, OSError):
        parts.append(b"LOST")
    return b"".join(parts)


async def notes_of(port: int, how: str) -> Noted:
    parts = list[bytes]()
    message = http_client.message(BREAKS.decode(), orjson.dumps({"how": how}))
    await http_client.once(port, message, parts.append)
    return Noted(**orjson.loads(b"".join(parts)))


def tokens_in(stream: bytes) -> tuple[int, ...]:
    events = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n")]
    chunks = [orjson.loads(event) for event in events if event.startswith(b"{")]
    return tuple(token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"])


# Kind of break, and whether the connection is lost.
BREAK_KINDS = {"reset": True, "end": False}


@pytest.mark.parametrize(("how", "lost"), BREAK_KINDS.items(), ids=BREAK_KINDS)
async def test_a_broken_answer_continues_on_another_backend(stuff: Material, how: str, lost: bool) -> None:
    whole = stuff.answer(ANSWER_TOKENS).tokens
    async with model(stuff) as first, model(stuff) as second:
        for port in (first, second):
            await notes_of(port, how)
        first_part = await received(first, prompt_of(stuff), ANSWER_TOKENS)
        assert tokens_in(first_part) == whole[:BREAK_AFTER]
        assert (b"LOST" in first_part, b"[DONE]" in first_part) == (lost, False)
        rest = await received(second, prompt_of(stuff, generated=BREAK_AFTER), ANSWER_TOKENS - BREAK_AFTER)
        assert tokens_in(rest) == whole[BREAK_AFTER:]
        assert b"[DONE]" in rest
        broken, resumed = await notes_of(first, ""), await notes_of(second, "")
    assert ([*broken.broken], [*broken.resumed]) == ([prompt_key(stuff)], [])
    assert ([*resumed.broken], [*resumed.resumed]) == ([], [prompt_key(stuff)])
    last_at, broke_at = broken.broken[prompt_key(stuff)]
    requested_at, sent_at = resumed.resumed[prompt_key(stuff)]
    assert last_at < broke_at < requested_at < sent_at


async def test_a_short_request_is_answered_without_a_break(stuff: Material) -> None:
    async with model(stuff) as port:
        await notes_of(port, "reset")
        assert len(tokens_in(await received(port, prompt_of(stuff), 16))) == 16
        assert await notes_of(port, "") == Noted()


async def test_the_complete_answer_is_sent_without_a_configured_break(stuff: Material) -> None:
    async with model(stuff) as port:
        assert tokens_in(await received(port, prompt_of(stuff), ANSWER_TOKENS)) == stuff.answer(ANSWER_TOKENS).tokens


BROKEN, RESUMED = Noted(broken={"q": (1.004, 1.006)}), Noted(resumed={"q": (1.010, 1.030)})
# Arrival times and backend notes; expected gap and added time in milliseconds, or the fault.
WEIGHED: dict[str, tuple[list[float], list[Noted], tuple[float, float] | str]] = {
    "break": ([1.001, 1.005, 1.035, 1.039], [BROKEN, RESUMED], (30.0, 8.0)),
    "late last token": ([1.001, 1.008, 1.035], [RESUMED, BROKEN], (27.0, 5.0)),
    "no break": ([1.001, 1.005], [Noted(), RESUMED], "broken off by nobody"),
    "no other backend": ([1.001, 1.005], [BROKEN, Noted()], "continued by nobody else"),
    "same backend": (
        [1.001, 1.035],
        [Noted(BROKEN.broken, RESUMED.resumed)],
        "continued by nobody else",
    ),
    "no token after the break": ([1.001, 1.005], [BROKEN, RESUMED], "nothing came before the break, or behind it"),
}


@pytest.mark.parametrize(("times", "notes", "expected"), WEIGHED.values(), ids=WEIGHED)
def test_the_added_gap_excludes_the_time_of_the_backends(
    times: list[float], notes: list[Noted], expected: tuple[float, float] | str
) -> None:
    result = Told()
    breaks.weigh(result, {"q": times}, notes)
    if isinstance(expected, str):
        assert (result.breaks, result.examples) == (0, [expected])
    else:
        assert (result.breaks, result.faults) == (1, 0)
        assert (result.gap_p50_ms, result.added_p99_ms) == pytest.approx(expected)


async def test_a_missing_break_is_a_fault(stuff: Material) -> None:
    # The chat wire has no breaks.
    async with model(stuff) as first, model(stuff) as second:
        ask = breaks.Ask("reset", first, (first, second), "", streams=1, requests=1, words=0, seed=1)
        result = await asyncio.wait_for(breaks.run(stuff, ask), 10)
    assert (result.breaks, result.faults) == (0, 1)
