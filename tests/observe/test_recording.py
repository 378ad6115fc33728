"""Recordings: selection by mode, size limits, storage, and dropped recordings."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from unisono.core.events import Closed, Reasoning, Repaired
from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted, StepDone
from unisono.core.route_protocol import Attempt
from unisono.observe.recorder import MAX_QUEUED, MODES, Recorder
from unisono.observe.recording import checked, dumped, packed, prompts_of, to_document, unpacked
from unisono.store.redis import RedisStore
from unisono.store.sqlite import SqliteStore

STARTED = GenerationStarted(
    "req_1", "ann", "key_1", "chat", "gpt-oss", background=False, at=1_790_000_000.5, recorded_request={"tools": []}
)
COMPLETED = GenerationDone(
    STARTED,
    1.5,
    GenerationOutcome.COMPLETED,
    finish="stop",
    tries=(Attempt("vllm-1"),),
    journal=[200005, 17196, 200002],
)
LARGE = 1 << 20


def step(number: int, prompt: Sequence[int]) -> StepDone:
    return StepDone(number, "vllm-1", 0.1, 0.2, 0.3, len(prompt), None, 3, "stop", prompt=prompt)


ANSWERS: dict[str, tuple[GenerationDone, bool]] = {
    "completed": (COMPLETED, False),
    "recovered": (replace(COMPLETED, recoveries=("missing-end",)), True),
    "repaired before the end": (replace(COMPLETED, repairs=(Repaired("missing-end", 3),)), True),
    "restored stop token": (replace(COMPLETED, recoveries=("restored-stop",)), False),
    "restored stop token and recovery": (replace(COMPLETED, recoveries=("restored-stop", "missing-end")), True),
    "failover": (replace(COMPLETED, failovers=1), True),
    "unmet requirement": (replace(COMPLETED, unmet="There is no such call."), True),
    "failed on a backend": (replace(COMPLETED, outcome=GenerationOutcome.FAILED, error="backend_error"), True),
    "rejected before a backend request": (
        replace(COMPLETED, outcome=GenerationOutcome.FAILED, error="busy", tries=()),
        False,
    ),
    "client disconnected": (replace(COMPLETED, outcome=GenerationOutcome.LEFT), False),
}


@pytest.mark.parametrize(("done", "is_recorded"), ANSWERS.values(), ids=ANSWERS)
def test_the_mode_decides_which_answers_are_recorded(done: GenerationDone, is_recorded: bool) -> None:
    assert {mode: wants(done) for mode, wants in MODES.items()} == {
        "off": False,
        "recoveries": is_recorded,
        "all": True,
    }


def test_a_recording_round_trips_as_bytes_and_json() -> None:
    output = (Closed(Reasoning(0), "Hm \ud800", (1, 2)), Repaired("missing-end", 7, 2))
    done = replace(COMPLETED, steps=[step(0, range(50))], output=output)
    document = to_document(done, "1.2.3", LARGE)
    for data in (packed(document), packed({**document, "model": "\ud800"})):
        assert unpacked(data)["output"] == [200005, 17196, 200002]
    assert json.loads(dumped(document)) == document
    assert document["said"] == [
        {
            "closed": "analysis",
            "name": "",
            "characters": 4,
            "digest": document["said"][0]["digest"],
            "tokens": 2,
            "complete": True,
        },
        {"repaired": "missing-end", "position": 7, "dropped": 2},
    ]


@pytest.mark.parametrize(
    "value", [None, [], {}, {"object": "unisono.trace"}, {"object": "unisono.trace", "version": 2}]
)
def test_a_document_of_another_format_or_version_is_rejected(value: Any) -> None:
    with pytest.raises(ValueError, match="recording"):
        checked(value)
    for data in (dumped(value), packed(value)):
        with pytest.raises(ValueError, match="recording"):
            unpacked(data)


def test_prompts_are_stored_without_repetition_and_restored() -> None:
    prompts = [list(range(100)), list(range(150)), [*range(60), 7, 8], [], list(range(3))]
    document = to_document(replace(COMPLETED, steps=[step(*each) for each in enumerate(prompts)]), "", LARGE)
    assert prompts_of(document) == prompts
    assert [each["prompt"]["same"] for each in document["steps"]] == [0, 100, 60, 0, 0]
    assert document["left_out"] == []


@pytest.mark.parametrize("max_bytes", [2_000, 3_000, 10_000, 100_000])
def test_a_large_prompt_loses_its_middle_and_is_listed_as_left_out(max_bytes: int) -> None:
    prompts = [list(range(200_000, 200_020)), list(range(150_000, 199_000))]
    document = to_document(replace(COMPLETED, steps=[step(*each) for each in enumerate(prompts)]), "", max_bytes)
    assert len(dumped(document)) <= max_bytes + 200
    assert document["left_out"] == ["prompt 1"]
    first, second = prompts_of(document)
    assert first == prompts[0]
    assert len(second) == len(prompts[1])
    remaining = [token for token in second if token is not None]
    assert second[0] == prompts[1][0]
    assert second[-1] == prompts[1][-1]
    assert 0 < len(remaining) < len(prompts[1])


@pytest.mark.parametrize(("output", "max_bytes"), [([5] * 2_000, 15_000), ([5] * 100, 9_000)])
def test_a_document_that_fits_is_not_shortened(output: list[int], max_bytes: int) -> None:
    # These tokens are shorter than estimated.
    done = replace(COMPLETED, journal=output, steps=[step(0, [10] * 1_000)])
    document = to_document(done, "", max_bytes)
    assert document["left_out"] == []
    assert prompts_of(document) == [[10] * 1_000]


def test_parts_above_the_size_limit_are_left_out_and_listed() -> None:
    request = {"tools": ["x" * 5_000]}
    done = replace(
        COMPLETED,
        start=replace(STARTED, recorded_request=request),
        journal=list(range(10_000)),
        steps=[step(0, [1, 2])],
    )
    assert to_document(done, "", 60_000)["left_out"] == []
    assert to_document(done, "", 52_000)["left_out"] == ["asked"]
    small = to_document(done, "", 3_000)
    assert (small["asked"], small["output"], small["left_out"]) == (None, [], ["asked", "output"])
    assert prompts_of(small) == [[1, 2]]
    tiny = to_document(done, "", 1)
    assert tiny["left_out"] == ["asked", "output", "said", "prompt 0"]
    assert prompts_of(tiny) == [[None, None]]


# -- storage


def recorder(store: Any, count: Counter[str], **options: Any) -> Recorder:
    settings = {"for_s": 3600.0, "max_bytes": LARGE, "most": 200, "gateway": "test", **options}
    return Recorder(store, "all", count=lambda outcome, number: count.update({outcome: number}), **settings)


async def test_recordings_are_stored_under_their_request_ids() -> None:
    count: Counter[str] = Counter()
    store = SqliteStore(None)
    await store.start()
    recording = recorder(store, count)
    for start in (
        STARTED,
        replace(STARTED, request_id="req_1.2"),
        replace(STARTED, tenant="ben"),
        replace(STARTED, resumed=True),
        replace(STARTED, request_id=""),
    ):
        recording.ended(replace(COMPLETED, start=start))
    await recording.aclose()
    assert [record.id for record in await store.traces("ann")] == ["req_1", "req_1.2"]
    assert [record.id for record in await store.traces("ben")] == ["req_1"]
    stored = await store.trace("ann", "req_1.2")
    assert stored is not None
    assert unpacked(stored.document)["id"] == "req_1.2"
    assert json.loads(stored.about)["finish"] == "stop"
    assert count == {"kept": 4}
    await store.aclose()


async def test_recordings_are_dropped_and_counted_when_the_queue_is_full() -> None:
    count: Counter[str] = Counter()
    store = SqliteStore(None)
    await store.start()
    recording = recorder(store, count)
    for number in range(MAX_QUEUED + 5):
        recording.ended(replace(COMPLETED, start=replace(STARTED, request_id=f"req_{number}")))
    await recording.aclose()
    assert count == {"kept": MAX_QUEUED, "dropped": 5}
    await store.aclose()


async def test_a_single_recording_is_stored_without_waiting_for_others() -> None:
    count: Counter[str] = Counter()
    store = SqliteStore(None)
    await store.start()
    recording = recorder(store, count)
    for number in range(2):
        recording.ended(replace(COMPLETED, start=replace(STARTED, request_id=f"req_{number}")))
        async with asyncio.timeout(20):
            while count != {"kept": number + 1}:
                await asyncio.sleep(0.01)
    await recording.aclose()
    await store.aclose()


async def test_recordings_are_dropped_with_one_log_line_when_the_store_is_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    count: Counter[str] = Counter()
    store = RedisStore("redis://127.0.0.1:1/0", deadline_s=0.05)
    recording = recorder(store, count)
    for _ in range(20):
        recording.ended(COMPLETED)
    await asyncio.sleep(0)
    await recording.aclose()
    assert count == {"failed": 20}
    assert [record.message for record in caplog.records] == [
        "recordings cannot be stored at the moment; they are dropped"
    ]
    await store.aclose()
