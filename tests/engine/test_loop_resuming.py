"""The tool loop and a journal: wherever a run was cut, another goes on behind it, and no call is made twice."""

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
from tests.engine.hosting import ANSWER, DOCS, ENCODING, FILES, SEARCH, Servers, Talk, call, calls_of, check_lives
from tests.engine.scripted import ASKED, IDS, TEXT, THOUGHT
from tests.engine.test_resuming import HIDDEN, flat
from tests.harmony.fold import items_of
from tests.harmony.recoveries import CASES, F, R
from unisono.core.conversation import AssistantCall, Conversation, Json
from unisono.core.events import Closed, Event, Finished, HostedCall, Ran, Repaired
from unisono.core.generation import Capabilities, OutputForm
from unisono.core.tools import ToolOutcome
from unisono.engine.journal import NOTE, STEP_ENDED, JournalEntry, must_be_kept, parts_of
from unisono.engine.request import ApprovalDecision, ServerTools
from unisono.errors import StoreUnreadable, ToolServerUnavailable

UNKNOWN = "It is not known whether the call was carried out; it was not repeated."
FETCH = call("docs__fetch", '{"q":"zwei ⟂"}', thought="And that.")
FIRST_F = call("f").removesuffix("<|call|>") + "<|end|><|start|>assistant"
BOTH = SEARCH.removesuffix("<|call|>") + "<|end|><|start|>assistant" + FETCH
WAITING = AssistantCall("call_old", "files__delete", '{"q":"x"}')
ASKED_FOR = replace(ASKED, items=(*ASKED.items, WAITING, replace(WAITING, call_id="call_older")))
DECIDED = ServerTools(
    (FILES, DOCS),
    decisions=(ApprovalDecision("call_old", "mcpr_1", True), ApprovalDecision("call_older", "mcpr_2", False)),
)
BROKEN = {"docs": (*Servers().offered["docs"],), "files": ToolServerUnavailable("gone")}  # type: ignore[misc]


def structured(name: str, arguments: object) -> ToolOutcome:
    return ToolOutcome("42 \ud800", structured={"answer": [42, None, "ü"]})


def talk_of(outputs: Sequence[str], hosting: ServerTools | None = None, **more: Any) -> Talk:
    talk = Talk(outputs)
    conversation: Conversation = more.pop("conversation", ASKED)
    hosting = hosting or ServerTools((DOCS, FILES))
    noted = more.pop("noted", None)
    talk = replace(talk, turn=replace(talk.turn, conversation=conversation, server_tools=hosting, journal_note=noted))
    return replace(talk, **more)


TALKS: dict[str, Talk] = {
    "one call": talk_of([SEARCH, ANSWER]),
    "calls one after the other": talk_of([SEARCH, FETCH, SEARCH, ANSWER]),
    "two calls in one step": talk_of([BOTH, ANSWER]),
    "a call, then one of the client": talk_of([SEARCH, call("f")]),
    "a call beside one of the client": talk_of(
        [call("f").removesuffix("<|call|>") + "<|end|><|start|>assistant" + SEARCH]
    ),
    "an approval": talk_of([SEARCH, call("files__delete", '{"q":"x"}')]),
    "a call beside an approval": talk_of([BOTH.replace("docs__fetch", "files__delete")]),
    "decisions": talk_of([SEARCH, ANSWER], DECIDED, conversation=ASKED_FOR),
    "a turn that was noted": talk_of([SEARCH, ANSWER], noted={"items": ["Hi 😀"]}),
    "decisions of a turn that was noted": talk_of(
        [SEARCH, ANSWER], DECIDED, conversation=ASKED_FOR, noted={"items": []}
    ),
    "a server that is gone": talk_of([SEARCH, ANSWER], host=Servers(BROKEN)),  # type: ignore[arg-type]
    "a server that is known": talk_of([SEARCH, ANSWER], ServerTools((DOCS,), announced=frozenset({"docs"}))),
    "faults to the end": talk_of([call("made_up"), call("docs__search", "?"), call("made_up"), "It is.<|return|>"]),
    "the last call": talk_of([SEARCH, FETCH, "It is.<|return|>"], ServerTools((DOCS,), max_calls=1)),
    "a pause": talk_of([SEARCH, FETCH, "It is.<|return|>"], ServerTools((DOCS,), pause_after=2)),
    "a pause without time": talk_of([BOTH, "It is.<|return|>"], ServerTools((DOCS,), pause_after=2, total_s=0)),
    "no time": talk_of([SEARCH, "It is.<|return|>"], ServerTools((DOCS,), total_s=0)),
    "repeated calls": talk_of([SEARCH, SEARCH, SEARCH, SEARCH, "It is.<|return|>"]),
    "an outcome with more than text": talk_of([SEARCH, ANSWER], host=Servers(answer=structured)),
    "thoughts behind a result": talk_of([SEARCH, THOUGHT.replace("<|end|>", "<|return|>"), "It is.<|return|>"]),
    "an answer, and then a call": talk_of(
        ["<|channel|>final<|message|>So<|end|><|start|>assistant" + SEARCH, ANSWER],
    ),
}


async def check_cuts(talk: Talk, cuts: Sequence[int] | None = None) -> None:
    """Cut after every batch but the last, whether the batch's journal was kept at once or not."""
    whole, report = await talk.batches()
    events = flat(whole, exact=talk.told.output is OutputForm.IDS)
    check_lives(events)
    calls = Counter(map(str, talk.host.made))
    steps = list(talk.bases)
    for cut in cuts if cuts is not None else range(1, len(whole)):
        talk.host.made.clear()
        first, before = await talk.batches(cut=cut)
        assert first == whole[:cut]
        known = talk.backend(learning=False)
        if must_be_kept(first[-1]) and not _may_be_made_again(first[-1]) and not _is_told(whole[cut]):
            # It may have been made for all anybody knows; what the model says then is another answer.
            await check_unknown(talk, before.journal)
            continue
        second, after = await talk.batches(before.journal, backends=[known])
        assert flat(second[:1]) == flat(first)
        assert flat([*first, *second[1:]], exact=talk.told.output is OutputForm.IDS) == events
        assert after.recoveries == report.recoveries
        assert not Counter(map(str, talk.host.made)) - calls
        if talk.told.output is OutputForm.IDS:
            assert after.journal == report.journal
    talk.bases[:] = steps


def _may_be_made_again(batch: Sequence[Event]) -> bool:
    calls = [event.item for event in batch if isinstance(event, Closed) and isinstance(event.item, HostedCall)]
    return all(item.tool in DOCS.idempotent for item in calls)


def _is_told(batch: Sequence[Event]) -> bool:
    """Whether nothing was made at all."""
    return any(
        isinstance(event, Ran) and event.outcome.is_error and isinstance(told, Repaired)
        for event, told in pairwise(batch)
    )


async def check_unknown(talk: Talk, journal: Sequence[int]) -> None:
    made = list(talk.host.made)
    begun = talk.backend(bases=[*talk.bases], outputs=[*talk.backend().outputs, *talk.backend().outputs])
    second, after = await talk.batches(journal, backends=[begun])
    [ran, *_] = [event for event in second[1] if isinstance(event, Ran)]
    assert (ran.text_for_model, ran.outcome.outcome_unknown) == (UNKNOWN, True)
    assert talk.host.made[: len(made)] == made
    assert "call-not-repeated" in after.recoveries
    check_lives([event for batch in second for event in batch])


FORMS = {"ids": IDS, "ids, stop hidden": HIDDEN, "text": TEXT}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("told", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("talk", TALKS.values(), ids=TALKS)
async def test_cutting_the_run_anywhere_changes_nothing(talk: Talk, told: Capabilities) -> None:
    await check_cuts(replace(talk, told=told, bases=[], host=replace(talk.host, made=[], asked=[]), per_chunk=6))


async def interrupted(talk: Talk) -> list[int]:
    """The journal of a run that died while a call was made."""
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


async def test_a_call_that_may_have_been_made_is_not_made_again_and_the_model_is_told() -> None:
    talk = Talk([SEARCH, ANSWER])
    journal = await interrupted(talk)
    batches, report = await talk.batches(journal)
    events = [event for batch in batches for event in batch]
    assert talk.host.made == [("docs", "search", {"q": "one"})]
    assert calls_of(events) == [("docs", "search", UNKNOWN)]
    assert report.recoveries == ["call-not-repeated"]
    assert items_of(events) == (R("I look."), R("Now."), F("It is so."))
    assert UNKNOWN in ENCODING.decode(list(talk.bases[1].prompt.tokens))
    # And so it stays.
    third, _ = await talk.batches(report.journal)
    assert calls_of([event for batch in third for event in batch]) == [("docs", "search", UNKNOWN)]


async def test_a_call_that_may_be_made_twice_is_made_again() -> None:
    talk = Talk([FETCH, ANSWER])
    journal = await interrupted(talk)
    batches, report = await talk.batches(journal)
    assert len(talk.host.made) == 2
    assert calls_of([event for batch in batches for event in batch]) == [("docs", "fetch", "fetch of zwei ⟂")]
    assert report.recoveries == []


async def test_an_incomplete_journal_allows_only_calls_of_idempotent_tools() -> None:
    talk = Talk([BOTH, ANSWER])
    hosting = replace(talk.turn.server_tools or ServerTools(), is_journal_complete=False)
    talk = replace(talk, turn=replace(talk.turn, server_tools=hosting))
    batches, report = await talk.batches()
    events = [event for batch in batches for event in batch]
    assert talk.host.made == [("docs", "fetch", {"q": "zwei ⟂"})]
    assert calls_of(events) == [("docs", "search", UNKNOWN), ("docs", "fetch", "fetch of zwei ⟂")]
    assert report.recoveries == ["call-not-repeated"]


async def test_a_call_that_was_not_shown_is_made_as_if_nothing_had_been() -> None:
    talk = Talk([SEARCH, ANSWER], per_chunk=1000)
    whole, _ = await talk.batches()
    shown = next(at for at, batch in enumerate(whole) if must_be_kept(batch))
    _, report = await talk.batches(cut=shown)
    assert len(talk.host.made) == 1
    batches, _ = await talk.batches(report.journal)
    assert len(talk.host.made) == 2
    assert calls_of([e for batch in batches for e in batch]) == [("docs", "search", "search of one")]


async def test_a_resumed_run_declares_what_was_declared_whatever_the_servers_say_now() -> None:
    talk = Talk([SEARCH, ANSWER])
    await talk.batches()
    _, report = await talk.batches(cut=2)
    talk.host.asked.clear()
    changed = replace(talk, host=Servers({"docs": ()}, made=talk.host.made, asked=talk.host.asked))
    batches, _ = await changed.batches(report.journal, backends=[talk.backend(learning=False)])
    assert changed.host.asked == []
    assert calls_of([e for batch in batches for e in batch]) == [("docs", "search", "search of one")]


async def test_a_resumed_run_calls_no_server_that_it_does_not_host_any_more() -> None:
    talk = Talk([SEARCH, ANSWER], per_chunk=1000)
    _, report = await talk.batches(cut=2)
    less = replace(talk, turn=replace(talk.turn, server_tools=ServerTools((FILES,))))
    batches, _ = await less.batches(report.journal)
    assert talk.host.made == []
    [(server, name, told)] = calls_of([event for batch in batches for event in batch])
    assert (server, name) == ("docs", "search")
    assert told.startswith("There is no tool")


FOREIGN: dict[str, list[int]] = {
    "a note of a call that was never made": JournalEntry({"call": "x", "of": "y", "verdict": "make"}).numbers(),
    "a result of nothing": JournalEntry({"ran": "x", "text": "y"}).numbers(),
    "half a note": [NOTE, 300, 1],
    "a note without a size": [NOTE],
    "no JSON": [NOTE, 3, 0x7B7B7B],
    "no object": [NOTE, 3, int.from_bytes(b"[1]", "big")],
    "a number that is too large": [NOTE, 3, 0x7B7B7B7B],
}


@pytest.mark.parametrize("numbers", FOREIGN.values(), ids=FOREIGN)
async def test_a_journal_that_is_none_of_this_turn_is_refused(numbers: list[int]) -> None:
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
def test_a_note_comes_back_between_whatever_stands_around_it(value: dict[str, Json], around: list[int]) -> None:
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
async def test_whatever_the_model_says_the_turn_ends_and_can_be_gone_on_with(
    steps: list[str], told: Capabilities, data: st.DataObject
) -> None:
    outputs = [step if step.endswith(("<|call|>", "<|return|>")) else step + "<|return|>" for step in steps]
    # From some point on the model says the same for ever.
    talk = talk_of([*outputs, *[outputs[-1]] * 30], ServerTools((DOCS, FILES), max_calls=4), told=told, per_chunk=5)
    whole, _ = await talk.batches()
    assert isinstance(whole[-1][-1], Finished)
    assert len(talk.bases) <= 20
    assert len(talk.host.made) <= 4
    ids = [e.item.call_id for b in whole for e in b if isinstance(e, Closed) and isinstance(e.item, HostedCall)]
    assert len(set(ids)) == len(ids)
    if len(whole) > 1:
        cuts = data.draw(st.lists(st.integers(1, len(whole) - 1), min_size=1, max_size=3, unique=True))
        await check_cuts(replace(talk, bases=[], host=Servers()), cuts)
