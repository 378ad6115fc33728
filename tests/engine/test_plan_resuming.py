"""Resuming answers with interventions: the answer is the same, and every answer ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.depth import cuts, examples
from tests.engine.planning import (
    CITY,
    CITY_FORM,
    CONVERSATION,
    ENCODING,
    FINAL,
    NAMED,
    PARIS,
    TOOLS,
    WEATHER,
    WITHOUT_TOOLS,
    S,
    T,
    turn,
)
from tests.engine.scripted import IDS, TEXT, DeploymentDouble, Line
from tests.engine.test_plan import CASES, Case, applicable
from tests.engine.test_resuming import HIDDEN, VISIBLE, bare, flat, outputs, until_stop
from tests.harmony.fold import check_lifecycle, items_of
from unisono.core.conversation import Phase
from unisono.core.events import Closed, Delta, Event, Finished, Opened, Text, ToolCall
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
from unisono.engine.failover_policy import ENDS_EARLY
from unisono.engine.generation import Engine
from unisono.engine.interventions.policy import MAX_EDITS
from unisono.engine.journal import JournalEntry, generated_in, parts_of
from unisono.engine.request import AllowedTools, ForcedCalls, GenerationReport, GenerationRequest
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
    """Prompt that neither repeats nor extends the recorded one."""


@dataclass
class Stepping(DeploymentDouble):
    """Backend that plays its outputs in order, or continues an output that the prompt begins."""

    outputs: Sequence[Sequence[int]]
    caps: Capabilities
    per_chunk: int
    # Prompts of the outputs in order; shared by all backends of one request.
    begun: list[str | list[int]]
    # Index of the next output.
    at: int = 0
    finish: FinishReason = FinishReason.STOP
    name: str = "stepping"
    timeouts: Timeouts = field(default_factory=Timeouts)
    jobs: list[CompletionJob] = field(default_factory=list)

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs.append(job)
        prompt = job.prompt.text or "" if self.caps.prompt is OutputForm.TEXT else list(job.prompt.tokens)
        rest = self._rest(prompt)
        for position in range(0, len(rest), self.per_chunk):
            piece = rest[position : position + self.per_chunk]
            yield Chunk(text=piece) if isinstance(piece, str) else Chunk(tokens=piece)
        yield Chunk()
        yield Chunk(finish=self.finish)

    def _rest(self, prompt: str | list[int]) -> str | list[int]:
        index, self.at = self.at, self.at + 1
        output = list(self.outputs[min(index, len(self.outputs) - 1)])
        if index == len(self.begun):
            self.begun.append(prompt)
        begun = self.begun[index]
        output_so_far = prompt[len(begun) :]
        if prompt[: len(begun)] != begun:
            raise OtherPrompt(f"{prompt!r} is not {begun!r}")
        if not self.caps.stop_visible and output and output[-1] in STOPS:
            output.pop()
        if isinstance(output_so_far, list):
            text: str | list[int] = output
        elif self.caps.output is OutputForm.MARKERLESS:
            text, output_so_far = bare(ENCODING.decode(output)), bare(output_so_far)
        else:
            text = ENCODING.decode(output)
        if text[: len(output_so_far)] != output_so_far:
            raise OtherPrompt(f"{prompt!r} is not {begun!r} with a beginning of {text!r}")
        return text[len(output_so_far) :]

    async def aclose(self) -> None:
        pass


@dataclass
class Talk:
    """Request that is sent several times, each time to a new engine."""

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
        run = engine.start(
            replace(self.turn, resumption=replace(self.turn.resumption, seed="a seed", journal=tuple(journal)))
        )
        batches: list[list[Event]] = []
        async for batch in run:
            batches.append(batch)
            if len(batches) == cut:
                break
        await run.aclose()
        return batches, run.report, backend

    async def check_cut(self, whole: list[list[Event]], report: GenerationReport, cut: int) -> None:
        """Resume after the first `cut` batches, and compare the events."""
        exact = self.told.output is OutputForm.IDS
        first, cut_report, backend = await self.ask(cut=cut)
        assert first == whole[:cut]
        # The interrupted generation continues, unless the journal has its end. Two generations with the same prompt
        # differ only in their output, so that both are tried.
        attempts = []
        for index in {max(len(backend.jobs) - 1, 0), len(backend.jobs)}:
            try:
                second, after, _ = await self.ask(cut_report.journal, at=index)
            except OtherPrompt as wrong:
                attempts.append(str(wrong))
                continue
            if ENDS_EARLY in after.notes:
                raise CannotGoOn(ENDS_EARLY)
            assert flat(second[:1], exact=exact) == flat(first, exact=exact)
            same_report = (after.recoveries, after.unmet) == (report.recoveries, report.unmet)
            # The journal of text output depends on the chunks of the network.
            same_report = same_report and (not exact or after.journal == report.journal)
            if comparable([*first, *second[1:]], exact=exact) == comparable(whole, exact=exact) and same_report:
                return
            attempts.append(f"{flat([*first, *second[1:]])}\n{after}")
        pytest.fail(f"cut after {cut} of {len(whole)} batches:\n{flat(whole)}\n{report}\n" + "\n".join(attempts))


def comparable(batches: list[list[Event]], *, exact: bool) -> list[Event]:
    """Return all events; without usage if not `exact`, since its counts depend on chunks."""
    events = flat(batches, exact=exact)
    return [replace(e, usage=Usage()) if isinstance(e, Finished) and not exact else e for e in events]


def anonymous(event: Event) -> Event:
    if isinstance(event, Opened | Delta | Closed) and isinstance(event.item, ToolCall):
        return replace(event, item=replace(event.item, call_id=""))
    return event


def does_apply(case: Case, capabilities: Capabilities) -> bool:
    return (capabilities.prompt, capabilities.constrain) in [(each.prompt, each.constrain) for each in case.told]


def tokens_of(output: Any) -> list[int]:
    return until_stop(ENCODING.encode_as_server(output if isinstance(output, str) else output.output))


@pytest.mark.parametrize("per_chunk", [1, 3, 16, 1000])
async def test_a_journal_with_a_spent_budget_is_replayed(per_chunk: int) -> None:
    case = CASES["free choice with tools"]
    talk = Talk([tokens_of(output) for output in case.outputs], case.turn, per_chunk=per_chunk)
    whole, report, _ = await talk.ask()
    for cut in range(1, len(whole)):
        await talk.check_cut(whole, report, cut)


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize(("case", "capabilities"), applicable(CASES, BACKENDS | TEXTS, does_apply))
async def test_a_run_resumed_after_any_batch_gives_the_same_answer(case: Case, capabilities: Capabilities) -> None:
    talk = Talk([tokens_of(output) for output in case.outputs], case.turn, capabilities)
    whole, report, _ = await talk.ask()
    check_lifecycle([event for batch in whole for event in batch])
    for cut in cuts(1, len(whole)):
        await talk.check_cut(whole, report, cut)


OTHER_MESSAGES: dict[str, Sequence[str]] = {
    "another message": [T + S + FINAL + "Sunny.<|return|>", T + S + WEATHER + PARIS + "<|call|>", PARIS + "<|call|>"],
    "another call": [T + S + WEATHER, WEATHER + PARIS + "<|call|>", PARIS + "<|call|>"],
    "marker, then the arguments": [T + S + WEATHER, "<|constrain|>" + PARIS + "<|call|>"],
    "repeated end tokens": [T + S + WEATHER, "<|end|>"],
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("capabilities", [*BACKENDS.values(), *TEXTS.values()], ids=[*BACKENDS, *TEXTS])
@pytest.mark.parametrize("outputs", OTHER_MESSAGES.values(), ids=OTHER_MESSAGES)
@pytest.mark.parametrize("per_chunk", [1, 3])
async def test_a_forced_body_with_another_message_resumes_after_any_batch(
    outputs: Sequence[str], capabilities: Capabilities, per_chunk: int
) -> None:
    # A recovery of a regenerated body is reported once.
    talk = Talk([tokens_of(output) for output in outputs], turn(NAMED), capabilities, per_chunk)
    whole, report, _ = await talk.ask()
    for cut in cuts(1, len(whole)):
        await talk.check_cut(whole, report, cut)


TURNS: dict[str, GenerationRequest] = {
    "a named tool": turn(NAMED),
    "any tool": turn(ForcedCalls()),
    "any tool and a form": turn(ForcedCalls(), form=CITY_FORM),
    "allowed tools": turn(AllowedTools(frozenset({"add"}))),
    "a call of allowed tools": turn(ForcedCalls(frozenset({"add"}), exclusive=True)),
    "a form": turn(form=CITY_FORM),
    "a held form": turn(form=CITY_FORM, is_streamed=False),
    "a form after preambles": turn(form=replace(CITY_FORM, keeps_preambles=True)),
    "a form without tools": turn(conversation=WITHOUT_TOOLS, form=CITY_FORM),
    "a form after preambles, without tools": turn(
        conversation=WITHOUT_TOOLS, form=replace(CITY_FORM, keeps_preambles=True)
    ),
    "a budget": turn(reasoning_budget=4),
    "reasoning budget of zero": turn(reasoning_budget=0, conversation=WITHOUT_TOOLS),
    "all requirements": turn(ForcedCalls(), form=CITY_FORM, reasoning_budget=4, stop=("zzz",), parallel_calls=False),
    "a call of allowed tools and a form": turn(ForcedCalls(frozenset({"add"}), exclusive=True), form=CITY_FORM),
    "calls as they come": turn(AllowedTools(frozenset({"add"})), hold_calls=False, form=CITY_FORM),
    "no requirements": turn(conversation=CONVERSATION),
}
OUTPUTS = st.one_of(
    outputs(), st.sampled_from([tokens_of(output) for case in CASES.values() for output in case.outputs])
)


def check_requirements(events: Sequence[Event], report: GenerationReport, request: GenerationRequest) -> None:
    """Check that an answer meets the requirements of its request, or reports that it does not."""
    choice, finished = request.answer.choice, events[-1]
    complete = [event for event in events if isinstance(event, Closed) and event.complete]
    called = {event.item.name for event in complete if isinstance(event.item, ToolCall)}
    if isinstance(choice, AllowedTools) or (choice is not None and choice.exclusive):
        assert called <= (choice.tools or set())
    if isinstance(choice, ForcedCalls):
        assert report.unmet or called & (choice.tools or {tool.name for tool in TOOLS})
    # A stop string may cut an answer that must have a form.
    if request.answer.form is not None and isinstance(finished, Finished) and finished.stop_sequence is None:
        texts = [
            (event.text, event.item.unfit)
            for event in complete
            if isinstance(event.item, Text) and event.item.phase is Phase.FINAL
        ]
        assert len(texts) <= 1
        assert all(unfit or report.unmet or violation(CITY, text) is None for text, unfit in texts)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(OUTPUTS, min_size=1, max_size=4),
    st.sampled_from(list(TURNS.values())),
    st.sampled_from(list(BACKENDS.values())),
    st.sampled_from([1, 3, 1000]),
    st.sampled_from(list(FinishReason)),
    st.data(),
)
async def test_any_token_output_ends_and_can_be_resumed(
    model_outputs: list[list[int]],
    generation_request: GenerationRequest,
    capabilities: Capabilities,
    per_chunk: int,
    finish: FinishReason,
    data: st.DataObject,
) -> None:
    if not capabilities.stop_visible or any(output[-1] in STOPS for output in model_outputs):
        finish = FinishReason.STOP
    # An output with a stop token did not end at the length limit.
    talk = Talk(model_outputs, generation_request, capabilities, per_chunk, finish)
    whole, report, backend = await talk.ask()
    events = [event for batch in whole for event in batch]
    check_lifecycle(events)
    assert isinstance(events[-1], Finished)
    check_requirements(events, report, generation_request)
    assert len(backend.jobs) <= MAX_EDITS + 3
    if len(whole) > 1:
        await talk.check_cut(whole, report, data.draw(st.integers(1, len(whole) - 1)))


BARRED_CALL = T + S + WEATHER + "{}<|call|>"
STUBBORN: dict[str, Sequence[str]] = {
    "same call without end": [BARRED_CALL],
    "reasoning in between": [T + S + FINAL + "It rains.<|return|>", BARRED_CALL, T, BARRED_CALL],
    "reasoning near the edit limit": [*[BARRED_CALL] * MAX_EDITS, T, BARRED_CALL],
}


@pytest.mark.parametrize("capabilities", [IDS, TEXT], ids=["ids", "text"])
@pytest.mark.parametrize("outputs", STUBBORN.values(), ids=STUBBORN)
async def test_an_opened_answer_does_not_extend_the_edit_limit(
    outputs: Sequence[str], capabilities: Capabilities
) -> None:
    talk = Talk([tokens_of(output) for output in outputs], TURNS["calls as they come"], capabilities)
    whole, _, backend = await talk.ask()
    assert isinstance(whole[-1][-1], Finished)
    assert len(backend.jobs) <= MAX_EDITS + 3


MARKERLESS = replace(TEXT, output=OutputForm.MARKERLESS)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(OUTPUTS, min_size=1, max_size=4),
    st.sampled_from(list(TURNS.values())),
    st.sampled_from([*TEXTS.values(), MARKERLESS]),
    st.sampled_from([1, 5, 1000]),
    st.sampled_from(list(FinishReason)),
    st.data(),
)
async def test_any_text_output_ends_and_can_be_resumed(
    model_outputs: list[list[int]],
    generation_request: GenerationRequest,
    capabilities: Capabilities,
    per_chunk: int,
    finish: FinishReason,
    data: st.DataObject,
) -> None:
    if not capabilities.stop_visible or any(output[-1] in STOPS for output in model_outputs):
        finish = FinishReason.STOP
    talk = Talk(model_outputs, generation_request, capabilities, per_chunk, finish)
    try:
        whole, report, backend = await talk.ask()
        events = [event for batch in whole for event in batch]
        check_lifecycle(events)
        assert isinstance(events[-1], Finished)
        check_requirements(events, report, generation_request)
        assert len(backend.jobs) <= MAX_EDITS + 3
        if len(whole) > 1 and capabilities.output is not OutputForm.MARKERLESS:
            await talk.check_cut(whole, report, data.draw(st.integers(1, len(whole) - 1)))
    except BackendUnfit:
        # Text backends cannot continue output that spells control tokens or ends inside a character.
        assume(False)


async def check_chunk_sizes(
    model_outputs: Sequence[Sequence[int]], request: GenerationRequest, capabilities: Capabilities
) -> None:
    """Check that events and prompts do not depend on the chunk size."""
    results = []
    for per_chunk in (1, 2, 7, 1000):
        talk = Talk(model_outputs, request, capabilities, per_chunk)
        whole, report, backend = await talk.ask()
        events = flat(whole)
        finished = events[-1]
        assert isinstance(finished, Finished)
        emitted = [event for event in events if not hasattr(event, "position") and event is not finished]
        results.append((emitted, finished.reason, [list(job.prompt.tokens) for job in backend.jobs], report.unmet))
    assert all(result == results[0] for result in results)


THOUGHTS_WITHOUT_CHANNEL = "<|channel|>We need to answer.<|end|>"
AT_ONCE: dict[str, tuple[str, GenerationRequest]] = {
    "reasoning decided by the next header": (
        THOUGHTS_WITHOUT_CHANNEL + "<|start|>assistant" + T + "<|start|>assistant" + FINAL + "ok<|return|>",
        TURNS["a budget"],
    ),
    "reasoning after a message of another role": (
        THOUGHTS_WITHOUT_CHANNEL + "<|start|>user<|message|>Next?<|end|><|start|>assistant" + T + "<|start|>assistant"
        "" + FINAL + "ok<|return|>",
        TURNS["a budget"],
    ),
    "reasoning after a preamble": (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + THOUGHTS_WITHOUT_CHANNEL + "<|start|>"
        "assistant" + T + "<|start|>assistant" + FINAL + "ok<|return|>",
        TURNS["a budget"],
    ),
}


@pytest.mark.parametrize(("output", "generation_request"), AT_ONCE.values(), ids=AT_ONCE)
async def test_the_chunk_size_does_not_change_the_answer(output: str, generation_request: GenerationRequest) -> None:
    await check_chunk_sizes([tokens_of(output)], generation_request, IDS)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(OUTPUTS, min_size=1, max_size=4), st.sampled_from(list(TURNS.values())), st.sampled_from([IDS, GUIDED]))
async def test_the_chunk_size_does_not_change_the_answer_to_any_output(
    model_outputs: list[list[int]], generation_request: GenerationRequest, capabilities: Capabilities
) -> None:
    await check_chunk_sizes(model_outputs, generation_request, capabilities)


async def test_the_journal_has_removed_and_inserted_tokens() -> None:
    case = CASES["named tool, reasoning and answer"]
    talk = Talk([tokens_of(output) for output in case.outputs], case.turn, per_chunk=1000)
    _, report, backend = await talk.ask()
    notes = [part.value for part in parts_of(report.journal) if isinstance(part, JournalEntry)]
    [note] = notes
    first, second = (list(job.prompt.tokens) for job in backend.jobs)
    kept_tokens = note["kept"]
    assert isinstance(kept_tokens, int)
    assert second == first + tokens_of(case.outputs[0])[:kept_tokens] + note["moved"]  # type: ignore[operator]


async def test_a_journal_without_numbers_of_uncounted_tokens_is_replayed() -> None:
    case = CASES["named tool, reasoning and answer"]
    talk = Talk([tokens_of(output) for output in case.outputs], case.turn)
    whole, report, backend = await talk.ask()
    # Earlier versions counted all tokens of a journal, and their notes have no such numbers.
    earlier: list[int] = []
    for part in parts_of(report.journal):
        if isinstance(part, JournalEntry):
            earlier += JournalEntry({key: part.value[key] for key in ("kept", "moved")}).numbers()
        elif isinstance(part, Sequence):
            earlier += part
    assert generated_in(earlier) == generated_in(report.journal) + 1
    for journal in (list(report.journal), earlier):
        batches, after, _ = await talk.ask(journal, at=len(backend.jobs))
        [*_, last] = flat(batches)
        assert isinstance(last, Finished)
        assert items_of(flat(batches)) == items_of(flat(whole))
        assert (list(after.journal), last.usage.completion_tokens) == (journal, generated_in(journal))
