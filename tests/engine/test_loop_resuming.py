"""Resuming the tool loop from a journal: the answer is the same, and no call runs twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import examples
from tests.engine.hosting import (
    ANSWER,
    DOCS,
    ENCODING,
    FILES,
    SEARCH,
    Servers,
    Talk,
    call,
    calls_of,
    check_server_lifecycle,
)
from tests.engine.scripted import CONVERSATION, IDS, TEXT, THOUGHT
from tests.engine.test_resuming import HIDDEN, flat
from tests.harmony.fold import items_of
from tests.harmony.recoveries import CASES, F, R
from unisono.core.conversation import AssistantCall, Conversation, Json
from unisono.core.events import Closed, Event, Finished, HostedCall, Ran, Repaired
from unisono.core.generation import Capabilities, OutputForm
from unisono.core.tool_host import ToolOutcome
from unisono.engine.journal import NOTE, STEP_ENDED, JournalEntry, must_be_kept, parts_of
from unisono.engine.request import ApprovalDecision, ServerTools
from unisono.errors import StoreUnreadable, ToolServerUnavailable

UNKNOWN = "It is not known whether the call was carried out; it was not repeated."
FETCH = call("docs__fetch", '{"q":"zwei ⟂"}', thought="And that.")
FIRST_F = call("f").removesuffix("<|call|>") + "<|end|><|start|>assistant"
BOTH = SEARCH.removesuffix("<|call|>") + "<|end|><|start|>assistant" + FETCH
OPEN_CALL = AssistantCall("call_old", "files__delete", '{"q":"x"}')
OPEN_CALL_CONVERSATION = replace(
    CONVERSATION, items=(*CONVERSATION.items, OPEN_CALL, replace(OPEN_CALL, call_id="call_older"))
)
DECIDED = ServerTools(
    (FILES, DOCS),
    decisions=(ApprovalDecision("call_old", "mcpr_1", True), ApprovalDecision("call_older", "mcpr_2", False)),
)
OFFERED_WITH_FAILURE = {"docs": (*Servers().offered["docs"],), "files": ToolServerUnavailable("gone")}  # type: ignore[misc]


def structured(name: str, arguments: object) -> ToolOutcome:
    return ToolOutcome("42 \ud800", structured={"answer": [42, None, "ü"]})


def talk_of(outputs: Sequence[str], hosting: ServerTools | None = None, **more: Any) -> Talk:
    talk = Talk(outputs)
    conversation: Conversation = more.pop("conversation", CONVERSATION)
    hosting = hosting or ServerTools((DOCS, FILES))
    noted = more.pop("noted", None)
    talk = replace(
        talk,
        turn=replace(
            talk.turn,
            conversation=conversation,
            server_tools=hosting,
            resumption=replace(talk.turn.resumption, journal_note=noted),
        ),
    )
    return replace(talk, **more)


TALKS: dict[str, Talk] = {
    "one call": talk_of([SEARCH, ANSWER]),
    "calls in separate steps": talk_of([SEARCH, FETCH, SEARCH, ANSWER]),
    "two calls in one step": talk_of([BOTH, ANSWER]),
    "server call, then client call in the next step": talk_of([SEARCH, call("f")]),
    "server call and client call in one step": talk_of(
        [call("f").removesuffix("<|call|>") + "<|end|><|start|>assistant" + SEARCH]
    ),
    "an approval": talk_of([SEARCH, call("files__delete", '{"q":"x"}')]),
    "server call and request for approval in one step": talk_of([BOTH.replace("docs__fetch", "files__delete")]),
    "decisions": talk_of([SEARCH, ANSWER], DECIDED, conversation=OPEN_CALL_CONVERSATION),
    "request with a journal note": talk_of([SEARCH, ANSWER], noted={"items": ["Hi 😀"]}),
    "request with decisions and a journal note": talk_of(
        [SEARCH, ANSWER], DECIDED, conversation=OPEN_CALL_CONVERSATION, noted={"items": []}
    ),
    "unavailable server": talk_of([SEARCH, ANSWER], host=Servers(OFFERED_WITH_FAILURE)),  # type: ignore[arg-type]
    "already announced server": talk_of([SEARCH, ANSWER], ServerTools((DOCS,), announced=frozenset({"docs"}))),
    "faults up to the limit": talk_of(
        [call("made_up"), call("docs__search", "?"), call("made_up"), "It is.<|return|>"]
    ),
    "the last call": talk_of([SEARCH, FETCH, "It is.<|return|>"], ServerTools((DOCS,), max_calls=1)),
    "a pause": talk_of([SEARCH, FETCH, "It is.<|return|>"], ServerTools((DOCS,), pause_after=2)),
    "pause at the deadline": talk_of([BOTH, "It is.<|return|>"], ServerTools((DOCS,), pause_after=2, total_s=0)),
    "no time left": talk_of([SEARCH, "It is.<|return|>"], ServerTools((DOCS,), total_s=0)),
    "repeated calls": talk_of([SEARCH, SEARCH, SEARCH, SEARCH, "It is.<|return|>"]),
    "an outcome with more than text": talk_of([SEARCH, ANSWER], host=Servers(answer=structured)),
    "only reasoning after a result": talk_of([SEARCH, THOUGHT.replace("<|end|>", "<|return|>"), "It is.<|return|>"]),
    "answer, then a call": talk_of(
        ["<|channel|>final<|message|>So<|end|><|start|>assistant" + SEARCH, ANSWER],
    ),
}


async def check_cuts(talk: Talk, cuts: Sequence[int] | None = None) -> None:
    """Resume the run after each batch but the last (or after `cuts`), and compare the events."""
    all_batches, report = await talk.batches()
    events = flat(all_batches, exact=talk.caps.output is OutputForm.IDS)
    check_server_lifecycle(events)
    calls = Counter(map(str, talk.host.made))
    steps = list(talk.bases)
    for cut in cuts if cuts is not None else range(1, len(all_batches)):
        talk.host.made.clear()
        first, before = await talk.batches(cut=cut)
        assert first == all_batches[:cut]
        backend = talk.backend(learning=False)
        if must_be_kept(first[-1]) and not _is_idempotent(first[-1]) and not _has_refused_call(all_batches[cut]):
            # Whether the call ran is unknown, so that the resumed run has another answer.
            await check_unknown(talk, before.journal)
            continue
        second, after = await talk.batches(before.journal, backends=[backend])
        assert flat(second[:1]) == flat(first)
        assert flat([*first, *second[1:]], exact=talk.caps.output is OutputForm.IDS) == events
        assert after.recoveries == report.recoveries
        assert not Counter(map(str, talk.host.made)) - calls
        if talk.caps.output is OutputForm.IDS:
            assert after.journal == report.journal
    talk.bases[:] = steps


def _is_idempotent(batch: Sequence[Event]) -> bool:
    calls = [event.item for event in batch if isinstance(event, Closed) and isinstance(event.item, HostedCall)]
    return all(item.tool in DOCS.idempotent for item in calls)


def _has_refused_call(batch: Sequence[Event]) -> bool:
    """Return whether the batch has an error result of a call that did not run."""
    return any(
        isinstance(event, Ran) and event.outcome.is_error and isinstance(following, Repaired)
        for event, following in pairwise(batch)
    )


async def check_unknown(talk: Talk, journal: Sequence[int]) -> None:
    made = list(talk.host.made)
    backend = talk.backend(bases=[*talk.bases], outputs=[*talk.backend().outputs, *talk.backend().outputs])
    second, after = await talk.batches(journal, backends=[backend])
    [ran, *_] = [event for event in second[1] if isinstance(event, Ran)]
    assert (ran.text_for_model, ran.outcome.outcome_unknown) == (UNKNOWN, True)
    assert talk.host.made[: len(made)] == made
    assert "call-not-repeated" in after.recoveries
    check_server_lifecycle([event for batch in second for event in batch])


FORMS = {"ids": IDS, "ids, stop hidden": HIDDEN, "text": TEXT}


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("capabilities", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("talk", TALKS.values(), ids=TALKS)
async def test_a_run_resumed_after_any_batch_gives_the_same_answer(talk: Talk, capabilities: Capabilities) -> None:
    await check_cuts(
        replace(talk, caps=capabilities, bases=[], host=replace(talk.host, made=[], asked=[]), per_chunk=6)
    )


async def interrupted(talk: Talk) -> list[int]:
    """Return the journal of a run that was cancelled during a call."""
    run = replace(talk, host=replace(talk.host, takes_s=60, made=talk.host.made)).engine().start(talk.turn)

    async def read() -> None:
        async for _ in run:
            pass

    made = len(talk.host.made)
    reading = asyncio.create_task(read())
    async with asyncio.timeout(5):
        while len(talk.host.made) == made:
            await asyncio.sleep(0.001)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return run.report.journal


async def test_a_call_with_unknown_outcome_is_not_repeated() -> None:
    talk = Talk([SEARCH, ANSWER])
    journal = await interrupted(talk)
    batches, report = await talk.batches(journal)
    events = [event for batch in batches for event in batch]
    assert talk.host.made == [("docs", "search", {"q": "one"})]
    assert calls_of(events) == [("docs", "search", UNKNOWN)]
    assert report.recoveries == ["call-not-repeated"]
    assert items_of(events) == (R("I look."), R("Now."), F("It is so."))
    assert UNKNOWN in ENCODING.decode(list(talk.bases[1].prompt.tokens))
    # Another resumption gives the same result.
    third, _ = await talk.batches(report.journal)
    assert calls_of([event for batch in third for event in batch]) == [("docs", "search", UNKNOWN)]


async def test_an_idempotent_call_is_repeated() -> None:
    talk = Talk([FETCH, ANSWER])
    journal = await interrupted(talk)
    batches, report = await talk.batches(journal)
    assert len(talk.host.made) == 2
    assert calls_of([event for batch in batches for event in batch]) == [("docs", "fetch", "fetch of zwei ⟂")]
    assert report.recoveries == []


async def test_an_incomplete_journal_allows_only_calls_of_idempotent_tools() -> None:
    talk = Talk([BOTH, ANSWER])
    resumption = replace(talk.turn.resumption, is_journal_complete=False)
    talk = replace(talk, turn=replace(talk.turn, resumption=resumption))
    batches, report = await talk.batches()
    events = [event for batch in batches for event in batch]
    assert talk.host.made == [("docs", "fetch", {"q": "zwei ⟂"})]
    assert calls_of(events) == [("docs", "search", UNKNOWN), ("docs", "fetch", "fetch of zwei ⟂")]
    assert report.recoveries == ["call-not-repeated"]


async def test_a_call_missing_from_the_journal_runs_again() -> None:
    talk = Talk([SEARCH, ANSWER], per_chunk=1000)
    all_batches, _ = await talk.batches()
    call_batch = next(at for at, batch in enumerate(all_batches) if must_be_kept(batch))
    _, report = await talk.batches(cut=call_batch)
    assert len(talk.host.made) == 1
    batches, _ = await talk.batches(report.journal)
    assert len(talk.host.made) == 2
    assert calls_of([e for batch in batches for e in batch]) == [("docs", "search", "search of one")]


async def test_a_resumed_run_uses_the_tool_lists_of_the_journal() -> None:
    talk = Talk([SEARCH, ANSWER])
    await talk.batches()
    _, report = await talk.batches(cut=2)
    talk.host.asked.clear()
    changed = replace(talk, host=Servers({"docs": ()}, made=talk.host.made, asked=talk.host.asked))
    batches, _ = await changed.batches(report.journal, backends=[talk.backend(learning=False)])
    assert changed.host.asked == []
    assert calls_of([e for batch in batches for e in batch]) == [("docs", "search", "search of one")]


async def test_a_resumed_run_does_not_call_servers_missing_from_the_request() -> None:
    talk = Talk([SEARCH, ANSWER], per_chunk=1000)
    _, report = await talk.batches(cut=2)
    without_server = replace(talk, turn=replace(talk.turn, server_tools=ServerTools((FILES,))))
    batches, _ = await without_server.batches(report.journal)
    assert talk.host.made == []
    [(server, name, result)] = calls_of([event for batch in batches for event in batch])
    assert (server, name) == ("docs", "search")
    assert result.startswith("There is no tool")


FOREIGN: dict[str, list[int]] = {
    "entry of an unknown call": JournalEntry({"call": "x", "of": "y", "verdict": "make"}).numbers(),
    "result without a call": JournalEntry({"ran": "x", "text": "y"}).numbers(),
    "truncated entry": [NOTE, 300, 1],
    "entry without a size": [NOTE],
    "entry that is not JSON": [NOTE, 3, 0x7B7B7B],
    "entry that is not an object": [NOTE, 3, int.from_bytes(b"[1]", "big")],
    "entry with a number out of range": [NOTE, 3, 0x7B7B7B7B],
}


@pytest.mark.parametrize("numbers", FOREIGN.values(), ids=FOREIGN)
async def test_a_journal_of_another_request_is_rejected(numbers: list[int]) -> None:
    talk = Talk([SEARCH, ANSWER])
    _, report = await talk.batches(cut=2)
    with pytest.raises(StoreUnreadable):
        await talk.batches([*report.journal, *numbers])
    with pytest.raises(StoreUnreadable):
        await replace(talk, turn=replace(talk.turn, server_tools=None)).batches(report.journal)


JSON: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters()), lambda inner: st.lists(inner), max_leaves=9
)


@given(st.dictionaries(st.text(), JSON), st.lists(st.sampled_from([1, 200_005, STEP_ENDED, 0xFFFF_FFF1])))
def test_journal_entries_survive_a_round_trip_between_tokens(value: dict[str, Json], around: list[int]) -> None:
    note = JournalEntry(value)
    parts = list(parts_of([*around, *note.numbers(), *around]))
    assert [part for part in parts if isinstance(part, JournalEntry)] == [note]
    assert max(note.numbers()[1:]) < 0xFFFF_FFF0


STEPS = [
    SEARCH,
    FETCH,
    BOTH,
    ANSWER,
    THOUGHT,
    call("made_up"),
    call("docs__search", "?"),
    call("files__delete", "{}"),
    call("f"),
    "<|return|>",
    *(case.output for case in CASES.values()),
]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=6), st.sampled_from([IDS, HIDDEN]), st.data())
async def test_any_output_ends_and_can_be_resumed(
    steps: list[str], capabilities: Capabilities, data: st.DataObject
) -> None:
    outputs = [step if step.endswith(("<|call|>", "<|return|>")) else step + "<|return|>" for step in steps]
    # The model repeats its last output without end.
    talk = talk_of(
        [*outputs, *[outputs[-1]] * 30], ServerTools((DOCS, FILES), max_calls=4), caps=capabilities, per_chunk=5
    )
    all_batches, _ = await talk.batches()
    assert isinstance(all_batches[-1][-1], Finished)
    assert len(talk.bases) <= 20
    assert len(talk.host.made) <= 4
    ids = [e.item.call_id for b in all_batches for e in b if isinstance(e, Closed) and isinstance(e.item, HostedCall)]
    assert len(set(ids)) == len(ids)
    if len(all_batches) > 1:
        cuts = data.draw(st.lists(st.integers(1, len(all_batches) - 1), min_size=1, max_size=3, unique=True))
        await check_cuts(replace(talk, bases=[], host=Servers()), cuts)
