"""The step plan and journals: wherever a run was cut, another one goes on to the same answer; and every answer ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.depth import cuts, examples
from tests.engine.planning import ASKED, CITY_FORM, ENCODING, FINAL, NAMED, PARIS, WEATHER, WITHOUT_TOOLS, S, T, turn
from tests.engine.scripted import IDS, TEXT, Line, Standing
from tests.engine.test_plan import CASES, Case
from tests.engine.test_resuming import HIDDEN, VISIBLE, bare, flat, outputs, until_stop
from tests.harmony.fold import check_lifecycle
from unisono.core.events import Closed, Delta, Event, Finished, Opened, ToolCall
from unisono.core.generation import (
    CONSTRAINT_KINDS,
    Capabilities,
    Chunk,
    CompletionJob,
    FinishReason,
    OutputForm,
    Timeouts,
    Usage,
)
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.failover import ENDS_EARLY
from unisono.engine.interventions.policy import MAX_EDITS
from unisono.engine.journal import JournalEntry, parts_of
from unisono.engine.request import AllowedTools, ForcedCalls, GenerationReport, GenerationRequest
from unisono.engine.service import Engine
from unisono.errors import BackendUnfit, CannotGoOn
from unisono.harmony.render import Renderer
from unisono.schemas import violation

GUIDED = replace(IDS, constrain=frozenset(CONSTRAINT_KINDS))
GUIDED_HIDDEN = replace(HIDDEN, constrain=frozenset(CONSTRAINT_KINDS))
BACKENDS = {"ids": IDS, "ids, stop hidden": HIDDEN, "ids, guided": GUIDED, "guided, stop hidden": GUIDED_HIDDEN}
GUIDED_TEXT = replace(TEXT, constrain=frozenset(CONSTRAINT_KINDS))
TEXTS = {"text": TEXT, "text, stop visible": VISIBLE, "text, guided": GUIDED_TEXT}
STOPS = {200_002, 200_012, 199_999}


class OtherPrompt(AssertionError):
    """Neither the prompt of before nor what was said behind it."""


@dataclass
class Stepping(Standing):
    """A backend that gives its outputs one after the other, each where the prompt is none that another output was begun
    behind; behind the beginning of one it goes on with it."""

    outputs: Sequence[Sequence[int]]
    told: Capabilities
    per_chunk: int
    begun: list[str | list[int]]
    """The prompts that outputs were begun behind, in order; shared by all backends of one turn."""
    at: int = 0
    """Which of them is asked for next by this one."""
    finish: FinishReason = FinishReason.STOP
    name: str = "stepping"
    timeouts: Timeouts = field(default_factory=Timeouts)
    jobs: list[CompletionJob] = field(default_factory=list)

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs.append(job)
        prompt = job.prompt.text or "" if self.told.prompt is OutputForm.TEXT else list(job.prompt.tokens)
        rest = self._rest(prompt)
        for at in range(0, len(rest), self.per_chunk):
            part = rest[at : at + self.per_chunk]
            yield Chunk(text=part) if isinstance(part, str) else Chunk(tokens=part)
        yield Chunk()
        yield Chunk(finish=self.finish)

    def _rest(self, prompt: str | list[int]) -> str | list[int]:
        at, self.at = self.at, self.at + 1
        output = list(self.outputs[min(at, len(self.outputs) - 1)])
        if at == len(self.begun):
            self.begun.append(prompt)
        begun = self.begun[at]
        said = prompt[len(begun) :]
        if prompt[: len(begun)] != begun:
            raise OtherPrompt(f"{prompt!r} is not {begun!r}")
        if not self.told.stop_visible and output and output[-1] in STOPS:
            output.pop()
        if isinstance(said, list):
            text: str | list[int] = output
        elif self.told.output is OutputForm.MARKERLESS:
            text, said = bare(ENCODING.decode(output)), bare(said)
        else:
            text = ENCODING.decode(output)
        if text[: len(said)] != said:
            raise OtherPrompt(f"{prompt!r} is not {begun!r} with a beginning of {text!r}")
        return text[len(said) :]

    async def aclose(self) -> None:
        pass


@dataclass
class Talk:
    """One turn that is asked again and again, each time of an engine that knows nothing of the time before."""

    outputs: Sequence[Sequence[int]]
    turn: GenerationRequest
    told: Capabilities = IDS
    per_chunk: int = 3
    finish: FinishReason = FinishReason.STOP
    begun: list[str | list[int]] = field(default_factory=list)

    async def ask(
        self, journal: Sequence[int] = (), *, cut: int | None = None, at: int = 0
    ) -> tuple[list[list[Event]], GenerationReport, Stepping]:
        backend = Stepping(self.outputs, self.told, self.per_chunk, self.begun, at, self.finish)
        engine = Engine(
            EngineDeps(
                encoding=ENCODING,
                renderer=Renderer(ENCODING),
                pool=Line([backend]),
                memory=ConversationCache(),
                new_call_id=lambda: "call_random",
                violation=violation,
            )
        )
        run = engine.start(replace(self.turn, seed="a seed", journal=tuple(journal)))
        batches: list[list[Event]] = []
        async for batch in run:
            batches.append(batch)
            if len(batches) == cut:
                break
        await run.aclose()
        return batches, run.report, backend

    async def check_cut(self, whole: list[list[Event]], report: GenerationReport, cut: int) -> None:
        """Go on behind the first `cut` batches."""
        exact = self.told.output is OutputForm.IDS
        first, kept, backend = await self.ask(cut=cut)
        assert first == whole[:cut]
        # The generation that was cut goes on, unless the journal says that it was left for the next one. Two that begin
        # behind one prompt only their output tells apart.
        met = []
        for at in {max(len(backend.jobs) - 1, 0), len(backend.jobs)}:
            try:
                second, after, _ = await self.ask(kept.journal, at=at)
            except OtherPrompt as wrong:
                met.append(str(wrong))
                continue
            if ENDS_EARLY in after.notes:
                raise CannotGoOn(ENDS_EARLY)
            assert flat(second[:1], exact=exact) == flat(first, exact=exact)
            told = (after.recoveries, after.unmet) == (report.recoveries, report.unmet)
            # Guessed tokens are cut where the network was.
            told = told and (not exact or after.journal == report.journal)
            if seen([*first, *second[1:]], exact=exact) == seen(whole, exact=exact) and told:
                return
            met.append(f"{flat([*first, *second[1:]])}\n{after}")
        pytest.fail(f"cut behind {cut} of {len(whole)} batches:\n{flat(whole)}\n{report}\n" + "\n".join(met))


def seen(batches: list[list[Event]], *, exact: bool) -> list[Event]:
    """All events. Not `exact`: without counts, since what was cut counts in the pieces that the network brought."""
    events = flat(batches, exact=exact)
    return [replace(e, usage=Usage()) if isinstance(e, Finished) and not exact else e for e in events]


def anonymous(event: Event) -> Event:
    if isinstance(event, Opened | Delta | Closed) and isinstance(event.item, ToolCall):
        return replace(event, item=replace(event.item, call_id=""))
    return event


def tokens_of(output: Any) -> list[int]:
    return until_stop(ENCODING.encode_as_server(output if isinstance(output, str) else output.output))


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("told", [*BACKENDS.values(), *TEXTS.values()], ids=[*BACKENDS, *TEXTS])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_cutting_the_run_anywhere_changes_nothing(case: Case, told: Capabilities) -> None:
    if all((told.prompt, told.constrain) != (each.prompt, each.constrain) for each in case.told):
        return
    talk = Talk([tokens_of(output) for output in case.outputs], case.turn, told)
    whole, report, _ = await talk.ask()
    check_lifecycle([event for batch in whole for event in batch])
    for cut in cuts(1, len(whole)):
        await talk.check_cut(whole, report, cut)


OTHERWISE: dict[str, Sequence[str]] = {
    "another message": [T + S + FINAL + "Sunny.<|return|>", T + S + WEATHER + PARIS + "<|call|>", PARIS + "<|call|>"],
    "another call": [T + S + WEATHER, WEATHER + PARIS + "<|call|>", PARIS + "<|call|>"],
    "a marker, and what was wanted": [T + S + WEATHER, "<|constrain|>" + PARIS + "<|call|>"],
    "an end, again and again": [T + S + WEATHER, "<|end|>"],
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("told", [*BACKENDS.values(), *TEXTS.values()], ids=[*BACKENDS, *TEXTS])
@pytest.mark.parametrize("outputs", OTHERWISE.values(), ids=OTHERWISE)
@pytest.mark.parametrize("per_chunk", [1, 3])
async def test_a_forced_body_in_which_something_else_begins_is_gone_on_behind_anywhere(
    outputs: Sequence[str], told: Capabilities, per_chunk: int
) -> None:
    """What was told of a body that is generated once more is told once."""
    talk = Talk([tokens_of(output) for output in outputs], turn(NAMED), told, per_chunk)
    whole, report, _ = await talk.ask()
    for cut in cuts(1, len(whole)):
        await talk.check_cut(whole, report, cut)


TURNS: dict[str, GenerationRequest] = {
    "a named tool": turn(NAMED),
    "any tool": turn(ForcedCalls()),
    "any tool, then a form": turn(ForcedCalls(), form=CITY_FORM),
    "some tools": turn(AllowedTools(frozenset({"add"}))),
    "a form": turn(form=CITY_FORM),
    "a form without tools": turn(conversation=WITHOUT_TOOLS, form=CITY_FORM),
    "a budget": turn(reasoning_budget=4),
    "no thoughts": turn(reasoning_budget=0, conversation=WITHOUT_TOOLS),
    "everything": turn(ForcedCalls(), form=CITY_FORM, reasoning_budget=4, stop=("zzz",), parallel_calls=False),
    "calls as they come": turn(AllowedTools(frozenset({"add"})), hold_calls=False, form=CITY_FORM),
    "nothing": turn(conversation=ASKED),
}
WROTE = st.one_of(outputs(), st.sampled_from([tokens_of(output) for case in CASES.values() for output in case.outputs]))


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(WROTE, min_size=1, max_size=4),
    st.sampled_from(list(TURNS.values())),
    st.sampled_from(list(BACKENDS.values())),
    st.sampled_from([1, 3, 1000]),
    st.sampled_from(list(FinishReason)),
    st.data(),
)
async def test_whatever_the_model_writes_the_answer_ends_and_can_be_gone_on_behind(
    said: list[list[int]],
    asked: GenerationRequest,
    told: Capabilities,
    per_chunk: int,
    finish: FinishReason,
    data: st.DataObject,
) -> None:
    if not told.stop_visible or any(output[-1] in STOPS for output in said):
        finish = FinishReason.STOP
    # What ended by itself did not end for want of room.
    talk = Talk(said, asked, told, per_chunk, finish)
    whole, report, backend = await talk.ask()
    events = [event for batch in whole for event in batch]
    check_lifecycle(events)
    assert isinstance(events[-1], Finished)
    assert len(backend.jobs) <= MAX_EDITS + 3
    if len(whole) > 1:
        await talk.check_cut(whole, report, data.draw(st.integers(1, len(whole) - 1)))


BARRED = T + S + WEATHER + "{}<|call|>"
STUBBORN: dict[str, Sequence[str]] = {
    "the same for ever": [BARRED],
    "thoughts in between": [T + S + FINAL + "It rains.<|return|>", BARRED, T, BARRED],
    "thoughts when most moves were made": [*[BARRED] * MAX_EDITS, T, BARRED],
}


@pytest.mark.parametrize("told", [IDS, TEXT], ids=["ids", "text"])
@pytest.mark.parametrize("outputs", STUBBORN.values(), ids=STUBBORN)
async def test_an_answer_that_is_opened_is_no_further_chance(outputs: Sequence[str], told: Capabilities) -> None:
    talk = Talk([tokens_of(output) for output in outputs], TURNS["calls as they come"], told)
    whole, _, backend = await talk.ask()
    assert isinstance(whole[-1][-1], Finished)
    assert len(backend.jobs) <= MAX_EDITS + 3


MARKERLESS = replace(TEXT, output=OutputForm.MARKERLESS)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(WROTE, min_size=1, max_size=4),
    st.sampled_from(list(TURNS.values())),
    st.sampled_from([*TEXTS.values(), MARKERLESS]),
    st.sampled_from([1, 5, 1000]),
    st.sampled_from(list(FinishReason)),
    st.data(),
)
async def test_whatever_comes_as_text_the_answer_ends_and_can_be_gone_on_behind(
    said: list[list[int]],
    asked: GenerationRequest,
    told: Capabilities,
    per_chunk: int,
    finish: FinishReason,
    data: st.DataObject,
) -> None:
    if not told.stop_visible or any(output[-1] in STOPS for output in said):
        finish = FinishReason.STOP
    talk = Talk(said, asked, told, per_chunk, finish)
    try:
        whole, report, backend = await talk.ask()
        events = [event for batch in whole for event in batch]
        check_lifecycle(events)
        assert isinstance(events[-1], Finished)
        assert len(backend.jobs) <= MAX_EDITS + 3
        if len(whole) > 1 and told.output is not OutputForm.MARKERLESS:
            await talk.check_cut(whole, report, data.draw(st.integers(1, len(whole) - 1)))
    except BackendUnfit:
        # What was said spells control tokens, or ends inside a character: as text nobody can go on behind it.
        assume(False)


async def check_network(said: Sequence[Sequence[int]], asked: GenerationRequest, told: Capabilities) -> None:
    """What is shown, and what every prompt is, does not depend on how many tokens come at once."""
    shown_each = []
    for per_chunk in (1, 2, 7, 1000):
        talk = Talk(said, asked, told, per_chunk)
        whole, report, backend = await talk.ask()
        events = flat(whole)
        finished = events[-1]
        assert isinstance(finished, Finished)
        shown = [event for event in events if not hasattr(event, "position") and event is not finished]
        shown_each.append((shown, finished.reason, [list(job.prompt.tokens) for job in backend.jobs], report.unmet))
    assert all(each == shown_each[0] for each in shown_each)


THOUGHTS_WITHOUT_CHANNEL = "<|channel|>We need to answer.<|end|>"
AT_ONCE: dict[str, tuple[str, GenerationRequest]] = {
    "thoughts that are some when the next header is known": (
        THOUGHTS_WITHOUT_CHANNEL + "<|start|>assistant" + T + "<|start|>assistant" + FINAL + "ok<|return|>",
        TURNS["a budget"],
    ),
    "the same, behind a message of somebody else": (
        THOUGHTS_WITHOUT_CHANNEL + "<|start|>user<|message|>Next?<|end|><|start|>assistant" + T + "<|start|>assistant"
        "" + FINAL + "ok<|return|>",
        TURNS["a budget"],
    ),
    "the same, behind a preamble": (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + THOUGHTS_WITHOUT_CHANNEL + "<|start|>"
        "assistant" + T + "<|start|>assistant" + FINAL + "ok<|return|>",
        TURNS["a budget"],
    ),
}


@pytest.mark.parametrize(("said", "asked"), AT_ONCE.values(), ids=AT_ONCE)
async def test_however_many_tokens_come_at_once_the_same_is_shown(said: str, asked: GenerationRequest) -> None:
    await check_network([tokens_of(said)], asked, IDS)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(WROTE, min_size=1, max_size=4), st.sampled_from(list(TURNS.values())), st.sampled_from([IDS, GUIDED]))
async def test_cutting_the_network_anywhere_changes_nothing_but_what_was_read_too_far(
    said: list[list[int]], asked: GenerationRequest, told: Capabilities
) -> None:
    await check_network(said, asked, told)


async def test_a_journal_says_what_was_cut_and_what_was_put_there() -> None:
    case = CASES["a tool is named, and the model answers"]
    talk = Talk([tokens_of(output) for output in case.outputs], case.turn, per_chunk=1000)
    _, report, backend = await talk.ask()
    notes = [part.value for part in parts_of(report.journal) if isinstance(part, JournalEntry)]
    [note] = notes
    first, second = (list(job.prompt.tokens) for job in backend.jobs)
    kept = note["kept"]
    assert isinstance(kept, int)
    assert second == first + tokens_of(case.outputs[0])[:kept] + note["moved"]  # type: ignore[operator]
