"""Failover at any token: the answer equals that of one undisturbed backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import cuts, examples
from tests.engine.scripted import CONVERSATION, IDS, TEXT, Line
from tests.engine.test_resuming import ENCODING, HIDDEN, RENDERER, STOPS, VISIBLE, flat, outputs, tokens_of
from tests.harmony.fold import check_lifecycle, items_of
from tests.harmony.recoveries import CASES, Case, F
from unisono.core.events import Delta, Event, Finished
from unisono.core.generation import Capabilities, Chunk, CompletionJob, FinishReason, Load, OutputForm, Timeouts
from unisono.core.probe import Probe
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.failover_policy import ENDS_EARLY
from unisono.engine.generation import Engine
from unisono.engine.journal import generated_in
from unisono.engine.request import GenerationReport, GenerationRequest, RequestOrigin, Resumption
from unisono.errors import BackendUnavailable, UnisonoError
from unisono.harmony.raw_codec import unfinished

OPENED = "one two three<|return|>"
GONE = BackendUnavailable("gone")


@dataclass
class Mortal:
    """Backend that continues the output wherever the prompt ends.

    It fails after `dies_after` tokens or characters, if set. `bases` are the prompts of the beginnings of the steps.
    """

    outputs: Sequence[Sequence[int]]
    caps: Capabilities = IDS
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
        return self.caps

    async def probe(self) -> Probe:
        return Probe(self.caps)

    async def load(self) -> Load | None:
        return None

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs.append(job)
        rest = self._remaining_output(job)
        if self.caps.output is OutputForm.IDS and rest and rest[-1] in STOPS and not self.caps.stop_visible:
            rest = rest[:-1]
        output: str | list[int] = rest
        if self.caps.output is OutputForm.TEXT:
            output = ENCODING.decode(rest[:-1] if rest and rest[-1] in STOPS and not self.caps.stop_visible else rest)
        output = output if self.dies_after is None else output[: self.dies_after]
        for position in range(0, len(output), self.per_chunk):
            piece = output[position : position + self.per_chunk]
            yield Chunk(text=piece) if isinstance(piece, str) else Chunk(tokens=piece)
        if self.dies_after is not None:
            raise self.failure
        yield Chunk(finish=self.finish)

    def _remaining_output(self, job: CompletionJob) -> list[int]:
        prompt = list(job.prompt.tokens)
        if self.caps.prompt is OutputForm.TEXT:
            assert ENCODING.encode_as_server(job.prompt.text or "") == ENCODING.encode_as_server(
                ENCODING.decode(prompt)
            )
        for step, base in reversed(list(enumerate(self.bases))):
            output = list(self.outputs[step])
            output_so_far = prompt[len(base) :]
            if prompt[: len(base)] != base:
                continue
            if output[: len(output_so_far)] == output_so_far:
                return output[len(output_so_far) :]
            incomplete = unfinished(ENCODING, output_so_far)
            prefix, text = ENCODING.decode(output_so_far[: len(output_so_far) - incomplete]), ENCODING.decode(output)
            if text.startswith(prefix):
                left = ENCODING.encode_as_server(text[len(prefix) :])
                assert left[:incomplete] == output_so_far[len(output_so_far) - incomplete :]
                return left[incomplete:]
        assert len(self.bases) < len(self.outputs), ENCODING.decode(prompt)
        self.bases.append(prompt)
        return list(self.outputs[len(self.bases) - 1])

    async def aclose(self) -> None:
        pass


@dataclass
class FailoverOutcome:
    events: list[Event]
    report: GenerationReport
    pool: Line

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last


async def run_failover(
    request: GenerationRequest, *backends: Mortal, bases: list[list[int]] | None = None
) -> FailoverOutcome:
    """Run one generation; `bases` are those of an earlier run that it continues."""
    pool = Line(backends)
    shared_bases = [] if bases is None else bases
    for backend in backends:
        backend.bases = shared_bases
    engine = Engine(
        EngineDeps(
            encoding=ENCODING,
            renderer=RENDERER,
            pool=pool,
            memory=ConversationCache(),
            new_call_id=lambda: "call_random",
        )
    )
    stream = engine.start(request)
    try:
        batches = [batch async for batch in stream]
    finally:
        assert pool.slots_in_use == 0
        assert pool.max_slots_in_use <= 1
    assert all(batches[1:] if request.resumption.journal else batches)
    return FailoverOutcome(flat(batches), stream.report, pool)


TURN = GenerationRequest("m", CONVERSATION, resumption=Resumption(seed="a seed"), origin=RequestOrigin(tenant="team"))
FORMS = {"ids": IDS, "ids, stop hidden": HIDDEN, "text": TEXT, "text, stop visible": VISIBLE}


def mortals(capabilities: Sequence[Capabilities], cuts: Sequence[int], case: Case, per_chunk: int = 3) -> list[Mortal]:
    """Return backends that fail one after the other; the last one does not fail."""
    steps = [tokens_of(case.output), tokens_of(OPENED)]
    finish = FinishReason(case.finish)
    return [
        Mortal(steps, form, cut, finish=finish, per_chunk=per_chunk, name=str(number))
        for number, (form, cut) in enumerate(zip(capabilities, [*cuts, None], strict=True))
    ]


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("capabilities", [IDS, HIDDEN], ids=["ids", "ids, stop hidden"])
@pytest.mark.parametrize("whole", [False, True], ids=["stream", "whole"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_the_answer_is_unchanged_after_a_failure_at_any_token(
    case: Case, whole: bool, capabilities: Capabilities
) -> None:
    # Positions, counts, ids and stored tokens are compared too.
    request = replace(TURN, answer=replace(TURN.answer, whole=whole))
    undisturbed = await run_failover(request, *mortals([capabilities], [], case))
    check_lifecycle(undisturbed.events)
    for cut in cuts(0, len(tokens_of(case.output)) + 1):
        outcome = await run_failover(request, *mortals([capabilities, capabilities], [cut], case))
        assert outcome.events == undisturbed.events
        assert (outcome.report.recoveries, outcome.report.journal) == (
            undisturbed.report.recoveries,
            undisturbed.report.journal,
        )
        assert outcome.report.failovers <= 1


@st.composite
def failure_plans(draw: st.DrawFn) -> tuple[list[Capabilities], list[int]]:
    """Draw backends of any forms, and the failure positions of all but the last one."""
    forms = draw(st.lists(st.sampled_from(list(FORMS.values())), min_size=2, max_size=4))
    return forms, [draw(st.integers(0, 60)) for _ in forms[1:]]


# Cases that read the same from ids and from text. `<|endoftext|>` is excluded: backends that show it and backends that
# hide it differ in whether a call is complete.
SAME = {n: case for n, case in CASES.items() if case.on_text and not case.output.endswith("<|endoftext|>")}


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(list(SAME.values())), failure_plans(), st.sampled_from([1, 3, 1000]), st.booleans(), st.booleans()
)
async def test_the_answer_is_unchanged_after_failures_of_mixed_backend_kinds(
    case: Case, failures: tuple[list[Capabilities], list[int]], per_chunk: int, whole: bool, hold: bool
) -> None:
    request = replace(TURN, answer=replace(TURN.answer, whole=whole, hold_calls=hold))
    undisturbed = await run_failover(request, *mortals(failures[0][-1:], [], case, per_chunk))
    backends = mortals(*failures, case, per_chunk)
    outcome = await run_failover(request, *backends)
    check_lifecycle(outcome.events)
    if ENDS_EARLY in outcome.report.notes:
        assert outcome.finished.reason is FinishReason.LENGTH
        assert any(form.prompt is OutputForm.TEXT for form in failures[0])
        assert "<|" in "".join(event.text for event in undisturbed.events if isinstance(event, Delta))
        return
    assert items_of(outcome.events) == items_of(undisturbed.events)
    assert outcome.finished.reason is undisturbed.finished.reason
    [last] = mortals(failures[0][-1:], [], case)
    replayed = await run_failover(
        replace(request, resumption=replace(request.resumption, journal=tuple(outcome.report.journal))),
        last,
        bases=backends[0].bases,
    )
    assert items_of(replayed.events) == items_of(outcome.events)


@settings(max_examples=examples(150), deadline=None)
@given(outputs(), st.sampled_from([IDS, HIDDEN]), st.lists(st.integers(0, 40), min_size=1, max_size=3), st.booleans())
async def test_any_output_is_unchanged_after_failures_of_token_id_backends(
    output: list[int], capabilities: Capabilities, cuts: list[int], hold: bool
) -> None:
    request = replace(TURN, answer=replace(TURN.answer, stop=("ok", "zzz"), hold_calls=hold))
    steps = [output, tokens_of(OPENED)]
    # Single tokens, since the number of tokens that arrive with the end of a stop string depends on the network.
    undisturbed = await run_failover(request, Mortal(steps, capabilities, per_chunk=1))
    backends = [
        Mortal(steps, capabilities, cut, per_chunk=1, name=str(number)) for number, cut in enumerate([*cuts, None])
    ]
    outcome = await run_failover(request, *backends)
    assert outcome.events == undisturbed.events
    assert outcome.report.journal == undisturbed.report.journal


EMOJI = Case("<|channel|>final<|message|>Look: 🐦‍⬛ and 👩🏽‍🚀 there, naïve 日本<|return|>", ())


@pytest.mark.parametrize("letters", [1, 30, 33])
@pytest.mark.parametrize("third", [TEXT, IDS], ids=["text", "ids"])
async def test_a_character_stays_whole_if_backends_fail_inside_it(letters: int, third: Capabilities) -> None:
    # Text is tokenised again for the next backend, except for an incomplete character.
    for cut in range(16):
        outcome = await run_failover(TURN, *mortals([TEXT, IDS, third], [letters, cut], EMOJI, per_chunk=1))
        assert items_of(outcome.events) == (F("Look: 🐦‍⬛ and 👩🏽‍🚀 there, naïve 日本"),)
        # The tokens of a character that is generated again count once.
        assert outcome.finished.usage.completion_tokens == len(tokens_of(EMOJI.output))


async def test_the_journal_counts_the_tokens_of_the_usage_after_failures_inside_a_character() -> None:
    for cut in range(16):
        outcome = await run_failover(TURN, *mortals([IDS, replace(IDS, prompt=OutputForm.TEXT)], [cut], EMOJI))
        assert outcome.finished.usage.completion_tokens == generated_in(outcome.report.journal), cut
