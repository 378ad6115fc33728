"""What is measured of routing: choices among deployments that hold what the case says, and streams that really break
off and really go on."""

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
async def test_every_case_of_a_choice_is_what_it_says_and_is_timed(how: str) -> None:
    told = await choosing.run(Ask(how, times=1))
    assert (told.faults, told.examples) == (0, [])
    assert 0 < told.choose_us < 100_000


def test_every_case_of_a_choice_is_measured() -> None:
    assert list(CHOSEN) == [*CASES, NUMBERING]


async def test_a_prompt_that_is_not_held_as_it_is_said_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "one holds it", replace(CASES["one holds it"], parts=2))
    told = await choosing.run(Ask("one holds it", times=1))
    assert told.faults == choosing.PROMPTS
    assert told.examples[0] == "one holds it: held to 1 ends, not 2"


@asynccontextmanager
async def model(stuff: Material) -> AsyncIterator[int]:
    async with await break_model.serve(stuff, 0) as server:
        yield int(server.sockets[0].getsockname()[1])


QUESTION = 7
FRAME = [200007, 200006, 173781]


def prompt_of(stuff: Material, *, said: int = 0) -> list[int]:
    words, _ = stuff.prompt(wires.NORMAL_PROMPT, QUESTION)
    return [1, *words, *FRAME, *stuff.answer(ANSWER_TOKENS).tokens[:said]]


def asked(stuff: Material) -> str:
    return vllm_wire.asked(prompt_of(stuff))


async def said(port: int, prompt: Sequence[int], limit: int) -> bytes:
    """What came of a stream, however it ended."""
    body = {"model": vllm_wire.MODEL, "prompt": prompt, "max_tokens": limit, "stream": True}
    parts = list[bytes]()
    try:
        await http_client.once(port, http_client.message("/v1/completions", orjson.dumps(body)), parts.append)
    except (Lost, OSError):
        parts.append(b"LOST")
    return b"".join(parts)


async def noted(port: int, how: str) -> Noted:
    parts = list[bytes]()
    message = http_client.message(BREAKS.decode(), orjson.dumps({"how": how}))
    await http_client.once(port, message, parts.append)
    return Noted(**orjson.loads(b"".join(parts)))


def tokens_in(stream: bytes) -> tuple[int, ...]:
    events = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n")]
    chunks = [orjson.loads(event) for event in events if event.startswith(b"{")]
    return tuple(token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"])


# how: whether the connection is lost
WAYS = {"reset": True, "end": False}


@pytest.mark.parametrize(("how", "lost"), WAYS.items(), ids=WAYS)
async def test_an_answer_breaks_off_where_it_should_and_goes_on_elsewhere(
    stuff: Material, how: str, lost: bool
) -> None:
    whole = stuff.answer(ANSWER_TOKENS).tokens
    async with model(stuff) as first, model(stuff) as second:
        for port in (first, second):
            await noted(port, how)
        begun = await said(first, prompt_of(stuff), ANSWER_TOKENS)
        assert tokens_in(begun) == whole[:BREAK_AFTER]
        assert (b"LOST" in begun, b"[DONE]" in begun) == (lost, False)
        rest = await said(second, prompt_of(stuff, said=BREAK_AFTER), ANSWER_TOKENS - BREAK_AFTER)
        assert tokens_in(rest) == whole[BREAK_AFTER:]
        assert b"[DONE]" in rest
        broken, resumed = await noted(first, ""), await noted(second, "")
    assert ([*broken.broken], [*broken.resumed]) == ([asked(stuff)], [])
    assert ([*resumed.broken], [*resumed.resumed]) == ([], [asked(stuff)])
    last_at, broke_at = broken.broken[asked(stuff)]
    asked_at, sent_at = resumed.resumed[asked(stuff)]
    assert last_at < broke_at < asked_at < sent_at


async def test_whoever_only_looks_is_answered_without_a_break(stuff: Material) -> None:
    async with model(stuff) as port:
        await noted(port, "reset")
        assert len(tokens_in(await said(port, prompt_of(stuff), 16))) == 16
        assert await noted(port, "") == Noted()


async def test_undisturbed_it_says_all_of_its_answer(stuff: Material) -> None:
    async with model(stuff) as port:
        assert tokens_in(await said(port, prompt_of(stuff), ANSWER_TOKENS)) == stuff.answer(ANSWER_TOKENS).tokens


BROKEN, RESUMED = Noted(broken={"q": (1.004, 1.006)}), Noted(resumed={"q": (1.010, 1.030)})
# what arrived, what was noted: gap and added in milliseconds, or what is wrong
WEIGHED: dict[str, tuple[list[float], list[Noted], tuple[float, float] | str]] = {
    "a break": ([1.001, 1.005, 1.035, 1.039], [BROKEN, RESUMED], (30.0, 8.0)),
    "a late last token": ([1.001, 1.008, 1.035], [RESUMED, BROKEN], (27.0, 5.0)),
    "no break": ([1.001, 1.005], [Noted(), RESUMED], "broken off by nobody"),
    "nobody else": ([1.001, 1.005], [BROKEN, Noted()], "continued by nobody else"),
    "the same one": (
        [1.001, 1.035],
        [Noted(BROKEN.broken, RESUMED.resumed)],
        "continued by nobody else",
    ),
    "nothing behind it": ([1.001, 1.005], [BROKEN, RESUMED], "nothing came before the break, or behind it"),
}


@pytest.mark.parametrize(("times", "notes", "expected"), WEIGHED.values(), ids=WEIGHED)
def test_a_gap_is_weighed_without_what_the_backends_took(
    times: list[float], notes: list[Noted], expected: tuple[float, float] | str
) -> None:
    told = Told()
    breaks.weigh(told, {"q": times}, notes)
    if isinstance(expected, str):
        assert (told.breaks, told.examples) == (0, [expected])
    else:
        assert (told.breaks, told.faults) == (1, 0)
        assert (told.gap_p50_ms, told.added_p99_ms) == pytest.approx(expected)


async def test_a_client_that_sees_no_break_says_so(stuff: Material) -> None:
    # Chat is a wire on which nothing breaks.
    async with model(stuff) as first, model(stuff) as second:
        ask = breaks.Ask("reset", first, (first, second), "", streams=1, requests=1, words=0, seed=1)
        told = await asyncio.wait_for(breaks.run(stuff, ask), 10)
    assert (told.breaks, told.faults) == (0, 1)
