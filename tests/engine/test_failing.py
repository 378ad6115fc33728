"""Backends that die anywhere in an answer, and others that go on: what is said is what one would have said."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import cuts, examples
from tests.engine.scripted import ASKED, IDS, TEXT, Line
from tests.engine.test_resuming import ENCODING, HIDDEN, RENDERER, STOPS, VISIBLE, flat, outputs, tokens_of
from tests.harmony.fold import check_lifecycle, items_of
from tests.harmony.recoveries import CASES, Case, F
from unisono.core.events import Delta, Event, Finished
from unisono.core.generation import Capabilities, Chunk, CompletionJob, FinishReason, Load, OutputForm, Timeouts
from unisono.core.probe import Probe
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.failover import ENDS_EARLY
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.engine.service import Engine
from unisono.errors import BackendUnavailable, UnisonoError
from unisono.harmony.utf8_tail import unfinished

OPENED = "one two three<|return|>"
GONE = BackendUnavailable("gone")


@dataclass
class Mortal:
    """A backend that goes on with what is said, wherever the prompt is in it, and dies after some tokens (or letters)
    where it is to. `bases` are the prompts that each step began behind."""

    outputs: Sequence[Sequence[int]]
    told: Capabilities = IDS
    dies_after: int | None = None
    failure: UnisonoError = GONE
    finish: FinishReason = FinishReason.STOP
    per_chunk: int = 3
    bases: list[list[int]] = field(default_factory=list)
    name: str = "mortal"
    timeouts: Timeouts = field(default_factory=Timeouts)
    jobs: list[CompletionJob] = field(default_factory=list)

    @property
    def backend(self) -> Mortal:
        return self

    async def capabilities(self) -> Capabilities:
        return self.told

    async def probe(self) -> Probe:
        return Probe(self.told)

    async def load(self) -> Load | None:
        return None

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs.append(job)
        rest = self._rest(job)
        if self.told.output is OutputForm.IDS and rest and rest[-1] in STOPS and not self.told.stop_visible:
            rest = rest[:-1]
        whole: str | list[int] = rest
        if self.told.output is OutputForm.TEXT:
            whole = ENCODING.decode(rest[:-1] if rest and rest[-1] in STOPS and not self.told.stop_visible else rest)
        whole = whole if self.dies_after is None else whole[: self.dies_after]
        for at in range(0, len(whole), self.per_chunk):
            part = whole[at : at + self.per_chunk]
            yield Chunk(text=part) if isinstance(part, str) else Chunk(tokens=part)
        if self.dies_after is not None:
            raise self.failure
        yield Chunk(finish=self.finish)

    def _rest(self, job: CompletionJob) -> list[int]:
        prompt = list(job.prompt.tokens)
        if self.told.prompt is OutputForm.TEXT:
            assert ENCODING.encode_as_server(job.prompt.text or "") == ENCODING.encode_as_server(
                ENCODING.decode(prompt)
            )
        for step, base in reversed(list(enumerate(self.bases))):
            output = list(self.outputs[step])
            said = prompt[len(base) :]
            if prompt[: len(base)] != base:
                continue
            if output[: len(said)] == said:
                return output[len(said) :]
            begun = unfinished(ENCODING, said)
            whole, text = ENCODING.decode(said[: len(said) - begun]), ENCODING.decode(output)
            if text.startswith(whole):
                left = ENCODING.encode_as_server(text[len(whole) :])
                assert left[:begun] == said[len(said) - begun :]
                return left[begun:]
        assert len(self.bases) < len(self.outputs), ENCODING.decode(prompt)
        self.bases.append(prompt)
        return list(self.outputs[len(self.bases) - 1])

    async def aclose(self) -> None:
        pass


@dataclass
class Played:
    events: list[Event]
    report: GenerationReport
    pool: Line

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last


async def played(turn: GenerationRequest, *backends: Mortal, bases: list[list[int]] | None = None) -> Played:
    """`bases` are those of an earlier run that this one goes on behind."""
    pool = Line(backends)
    known = [] if bases is None else bases
    for backend in backends:
        backend.bases = known
    engine = Engine(
        EngineDeps(
            encoding=ENCODING,
            renderer=RENDERER,
            pool=pool,
            memory=ConversationCache(),
            new_call_id=lambda: "call_random",
        )
    )
    run = engine.start(turn)
    try:
        batches = [batch async for batch in run]
    finally:
        assert pool.taken == 0
        assert pool.most_taken <= 1
    assert all(batches[1:] if turn.journal else batches)
    return Played(flat(batches), run.report, pool)


TURN = GenerationRequest("m", ASKED, seed="a seed", tenant="team")
WAYS = {"ids": IDS, "ids, stop hidden": HIDDEN, "text": TEXT, "text, stop visible": VISIBLE}


def mortals(told: Sequence[Capabilities], cuts: Sequence[int], case: Case, per_chunk: int = 3) -> list[Mortal]:
    """Backends that die one after the other; the last one lives."""
    steps = [tokens_of(case.output), tokens_of(OPENED)]
    finish = FinishReason(case.finish)
    return [
        Mortal(steps, way, cut, finish=finish, per_chunk=per_chunk, name=str(number))
        for number, (way, cut) in enumerate(zip(told, [*cuts, None], strict=True))
    ]


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("told", [IDS, HIDDEN], ids=["ids", "ids, stop hidden"])
@pytest.mark.parametrize("whole", [False, True], ids=["stream", "whole"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_a_death_anywhere_changes_nothing_where_ids_are_taken(
    case: Case, whole: bool, told: Capabilities
) -> None:
    """Token for token: positions, counts, ids and the tokens that are kept."""
    turn = replace(TURN, whole=whole)
    alive = await played(turn, *mortals([told], [], case))
    check_lifecycle(alive.events)
    for cut in cuts(0, len(tokens_of(case.output)) + 1):
        died = await played(turn, *mortals([told, told], [cut], case))
        assert died.events == alive.events
        assert (died.report.recoveries, died.report.journal) == (alive.report.recoveries, alive.report.journal)
        assert died.report.failovers <= 1


@st.composite
def deaths(draw: st.DrawFn) -> tuple[list[Capabilities], list[int]]:
    """Backends of any forms, and after how many tokens or letters all but the last one die."""
    told = draw(st.lists(st.sampled_from(list(WAYS.values())), min_size=2, max_size=4))
    return told, [draw(st.integers(0, 60)) for _ in told[1:]]


SAME = {n: case for n, case in CASES.items() if case.on_text and not case.output.endswith("<|endoftext|>")}
"""What is read the same from ids and from text, whoever is the last to be heard: an end of the text that one backend
shows, and another hides, tells of a call that it was not made."""


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(list(SAME.values())), deaths(), st.sampled_from([1, 3, 1000]), st.booleans(), st.booleans())
async def test_whatever_kinds_die_one_after_the_other_the_same_is_said(
    case: Case, died: tuple[list[Capabilities], list[int]], per_chunk: int, whole: bool, hold: bool
) -> None:
    turn = replace(TURN, whole=whole, hold_calls=hold)
    alive = await played(turn, *mortals(died[0][-1:], [], case, per_chunk))
    backends = mortals(*died, case, per_chunk)
    run = await played(turn, *backends)
    check_lifecycle(run.events)
    if ENDS_EARLY in run.report.notes:
        assert run.finished.reason is FinishReason.LENGTH
        assert any(told.prompt is OutputForm.TEXT for told in died[0])
        assert "<|" in "".join(event.text for event in alive.events if isinstance(event, Delta))
        return
    assert items_of(run.events) == items_of(alive.events)
    assert run.finished.reason is alive.finished.reason
    [last] = mortals(died[0][-1:], [], case)
    again = await played(replace(turn, journal=tuple(run.report.journal)), last, bases=backends[0].bases)
    assert items_of(again.events) == items_of(run.events)


@settings(max_examples=examples(150), deadline=None)
@given(outputs(), st.sampled_from([IDS, HIDDEN]), st.lists(st.integers(0, 40), min_size=1, max_size=3), st.booleans())
async def test_whatever_the_model_writes_deaths_change_nothing_where_ids_are_taken(
    output: list[int], told: Capabilities, cuts: list[int], hold: bool
) -> None:
    turn = replace(TURN, stop=("ok", "zzz"), hold_calls=hold)
    steps = [output, tokens_of(OPENED)]
    # One by one: how many tokens come with the one that ends a stop string is the network's affair.
    alive = await played(turn, Mortal(steps, told, per_chunk=1))
    backends = [Mortal(steps, told, cut, per_chunk=1, name=str(at)) for at, cut in enumerate([*cuts, None])]
    died = await played(turn, *backends)
    assert died.events == alive.events
    assert died.report.journal == alive.report.journal


EMOJI = Case("<|channel|>final<|message|>Look: 🐦‍⬛ and 👩🏽‍🚀 there, naïve 日本<|return|>", ())


@pytest.mark.parametrize("letters", [1, 30, 33])
@pytest.mark.parametrize("third", [TEXT, IDS], ids=["text", "ids"])
async def test_a_character_is_whole_whoever_dies_inside_of_it(letters: int, third: Capabilities) -> None:
    """Of what text was read for, the ids are cut again, but not those of half a character."""
    for cut in range(16):
        run = await played(TURN, *mortals([TEXT, IDS, third], [letters, cut], EMOJI, per_chunk=1))
        assert items_of(run.events) == (F("Look: 🐦‍⬛ and 👩🏽‍🚀 there, naïve 日本"),)
