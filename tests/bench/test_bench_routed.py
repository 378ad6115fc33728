"""Routing benchmark: selection among deployments with cached prefixes, and streams that break and continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import orjson
import pytest

from bench import breaking_backend, failover_load, http_client, selection_timing, vllm_wire, wires
from bench.breaking_backend import ANSWER_TOKENS, BREAK_AFTER_TOKENS, BREAKS_PATH
from bench.failover_load import BackendTimes, FailoverResult
from bench.http_client import ConnectionLostError
from bench.prose import Corpus
from bench.routing_scenarios import SELECTION_AIMS_US
from bench.selection_timing import CASES, NUMBERING, SelectionJob


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("variant", [*CASES, NUMBERING])
async def test_every_selection_case_has_its_prefixes_and_is_timed(variant: str) -> None:
    result = await selection_timing.run(SelectionJob(variant, times=1))
    assert (result.faults, result.examples) == (0, [])
    assert 0 < result.choose_us < 100_000


def test_every_selection_case_is_measured() -> None:
    assert list(SELECTION_AIMS_US) == [*CASES, NUMBERING]


async def test_a_prompt_with_another_number_of_holders_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "one holds it", replace(CASES["one holds it"], prefix_count=2))
    result = await selection_timing.run(SelectionJob("one holds it", times=1))
    assert result.faults == selection_timing.PROMPT_COUNT
    assert result.examples[0] == "one holds it: 1 cached lengths instead of 2"


@asynccontextmanager
async def backend(corpus: Corpus) -> AsyncIterator[int]:
    async with await breaking_backend.serve(corpus, 0) as server:
        yield int(server.sockets[0].getsockname()[1])


QUESTION = 7
FRAME = [200007, 200006, 173781]


def prompt_of(corpus: Corpus, *, generated: int = 0) -> list[int]:
    words, _ = corpus.prompt(wires.QUESTION_WORDS, QUESTION)
    return [1, *words, *FRAME, *corpus.answer(ANSWER_TOKENS).tokens[:generated]]


def prompt_key(corpus: Corpus) -> str:
    return vllm_wire.question_key(prompt_of(corpus))


async def received(port: int, prompt: Sequence[int], limit: int) -> bytes:
    """Return the received bytes of a stream, with LOST at the end if the connection broke."""
    body = {"model": vllm_wire.MODEL, "prompt": prompt, "max_tokens": limit, "stream": True}
    received_parts = list[bytes]()
    try:
        await http_client.request_once(
            port, http_client.message("/v1/completions", orjson.dumps(body)), received_parts.append
        )
    except (ConnectionLostError, OSError):
        received_parts.append(b"LOST")
    return b"".join(received_parts)


async def times_of(port: int, variant: str) -> BackendTimes:
    received_parts = list[bytes]()
    message = http_client.message(BREAKS_PATH.decode(), orjson.dumps({"variant": variant}))
    await http_client.request_once(port, message, received_parts.append)
    return BackendTimes(**orjson.loads(b"".join(received_parts)))


def tokens_in(stream: bytes) -> tuple[int, ...]:
    events = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n")]
    chunks = [orjson.loads(event) for event in events if event.startswith(b"{")]
    return tuple(token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"])


# Kind of break, and whether the connection is lost.
BREAK_KINDS = {"reset": True, "end": False}


@pytest.mark.parametrize(("variant", "lost"), BREAK_KINDS.items(), ids=BREAK_KINDS)
async def test_a_broken_answer_continues_on_another_backend(corpus: Corpus, variant: str, lost: bool) -> None:
    whole = corpus.answer(ANSWER_TOKENS).tokens
    async with backend(corpus) as first, backend(corpus) as second:
        for port in (first, second):
            await times_of(port, variant)
        first_part = await received(first, prompt_of(corpus), ANSWER_TOKENS)
        assert tokens_in(first_part) == whole[:BREAK_AFTER_TOKENS]
        assert (b"LOST" in first_part, b"[DONE]" in first_part) == (lost, False)
        rest = await received(
            second, prompt_of(corpus, generated=BREAK_AFTER_TOKENS), ANSWER_TOKENS - BREAK_AFTER_TOKENS
        )
        assert tokens_in(rest) == whole[BREAK_AFTER_TOKENS:]
        assert b"[DONE]" in rest
        broken, resumed = await times_of(first, ""), await times_of(second, "")
    assert ([*broken.broken], [*broken.resumed]) == ([prompt_key(corpus)], [])
    assert ([*resumed.broken], [*resumed.resumed]) == ([], [prompt_key(corpus)])
    last_at, broke_at = broken.broken[prompt_key(corpus)]
    requested_at, sent_at = resumed.resumed[prompt_key(corpus)]
    assert last_at < broke_at < requested_at < sent_at


async def test_a_short_request_is_answered_without_a_break(corpus: Corpus) -> None:
    async with backend(corpus) as port:
        await times_of(port, "reset")
        assert len(tokens_in(await received(port, prompt_of(corpus), 16))) == 16
        assert await times_of(port, "") == BackendTimes()


async def test_the_complete_answer_is_sent_without_a_configured_break(corpus: Corpus) -> None:
    async with backend(corpus) as port:
        assert tokens_in(await received(port, prompt_of(corpus), ANSWER_TOKENS)) == corpus.answer(ANSWER_TOKENS).tokens


BROKEN, RESUMED = BackendTimes(broken={"q": (1.004, 1.006)}), BackendTimes(resumed={"q": (1.010, 1.030)})
# Arrival times and backend notes; expected gap and added time in milliseconds, or the fault.
WEIGHED: dict[str, tuple[list[float], list[BackendTimes], tuple[float, float] | str]] = {
    "break": ([1.001, 1.005, 1.035, 1.039], [BROKEN, RESUMED], (30.0, 8.0)),
    "late last token": ([1.001, 1.008, 1.035], [RESUMED, BROKEN], (27.0, 5.0)),
    "no break": ([1.001, 1.005], [BackendTimes(), RESUMED], "no backend broke off"),
    "no other backend": ([1.001, 1.005], [BROKEN, BackendTimes()], "no other backend continued"),
    "same backend": (
        [1.001, 1.035],
        [BackendTimes(BROKEN.broken, RESUMED.resumed)],
        "no other backend continued",
    ),
    "no token after the break": ([1.001, 1.005], [BROKEN, RESUMED], "no text arrived before or after the break"),
}


@pytest.mark.parametrize(("times", "notes", "expected"), WEIGHED.values(), ids=WEIGHED)
def test_the_added_gap_excludes_the_time_of_the_backends(
    times: list[float], notes: list[BackendTimes], expected: tuple[float, float] | str
) -> None:
    result = FailoverResult()
    failover_load.compute_gaps(result, {"q": times}, notes)
    if isinstance(expected, str):
        assert (result.breaks, result.examples) == (0, [expected])
    else:
        assert (result.breaks, result.faults) == (1, 0)
        assert (result.gap_p50_ms, result.added_p99_ms) == pytest.approx(expected)


async def test_a_missing_break_is_a_fault(corpus: Corpus) -> None:
    # The chat wire has no breaks.
    async with backend(corpus) as first, backend(corpus) as second:
        job = failover_load.FailoverJob("reset", first, (first, second), "", streams=1, requests=1, words=0, seed=1)
        result = await asyncio.wait_for(failover_load.run(corpus, job), 10)
    assert (result.breaks, result.faults) == (0, 1)
