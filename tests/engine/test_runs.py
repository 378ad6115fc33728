"""Whole runs on scripted backends: steps, limits, failover, and what is counted and remembered of them."""

from __future__ import annotations

import pytest

from tests.engine.scripted import ANSWER, ASKED, IDS, TEXT, THOUGHT, Runner, Scripted, Step
from tests.harmony.fold import check_lifecycle, items_of
from tests.harmony.recoveries import C, F, R
from unisono.core.conversation import AssistantMessage, Conversation, UserMessage
from unisono.core.events import Finished
from unisono.core.generation import Capabilities, FinishReason, OutputForm, Usage
from unisono.engine.request import GenerationRequest
from unisono.errors import BackendRejected, BackendUnavailable, CannotGoOn, ContextTooLong, UnisonoError
from unisono.harmony.encoding import Encoding


@pytest.mark.parametrize("told", [IDS, TEXT], ids=["ids", "text"])
@pytest.mark.parametrize("per_chunk", [1, 1000])
async def test_an_answer_that_never_came_is_opened_once(told: Capabilities, per_chunk: int, encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(THOUGHT), Step("one two")], told, per_chunk)
    outcome = await Runner(encoding, backend).ask()
    assert items_of(outcome.events) == (R("Hm."), F("one two"))
    assert outcome.finished.reason is FinishReason.STOP
    assert outcome.report.recoveries == ["analysis-only", *(["restored-stop"] if told is TEXT else [])]
    opened = encoding.encode_marked(THOUGHT + "<|start|>assistant<|channel|>final<|message|>")
    assert list(backend.jobs[1].prompt.tokens) == [*backend.jobs[0].prompt.tokens, *opened]
    spent = len(encoding.encode_as_server(THOUGHT + "one two"))
    # The stop token that the backend hides was generated, too.
    assert outcome.finished.usage.completion_tokens == spent + (told is TEXT)


async def test_it_is_opened_once_and_not_again(encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(THOUGHT), Step("<|return|>")])
    outcome = await Runner(encoding, backend).ask()
    assert items_of(outcome.events) == (R("Hm."), F(""))
    assert len(backend.jobs) == 2


@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
@pytest.mark.parametrize("told", [IDS, TEXT], ids=["ids", "text"])
async def test_a_stop_string_is_met_in_the_answer_that_was_opened(
    told: Capabilities, per_chunk: int, encoding: Encoding
) -> None:
    backend = Scripted(encoding, [Step(THOUGHT), Step("one END two")], told, per_chunk)
    outcome = await Runner(encoding, backend).ask(stop=("END", "Hm"))
    assert items_of(outcome.events) == (R("Hm."), F("one "))
    assert outcome.finished.stop_sequence == "END"
    assert outcome.finished.reason is FinishReason.STOP


async def test_all_steps_together_keep_to_max_tokens(encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(THOUGHT), Step("one", FinishReason.LENGTH)])
    outcome = await Runner(encoding, backend).ask(max_tokens=len(encoding.encode_marked(THOUGHT)) + 1)
    assert [job.max_tokens for job in backend.jobs] == [len(encoding.encode_marked(THOUGHT)) + 1, 1]
    assert outcome.finished.reason is FinishReason.LENGTH


async def test_an_answer_for_which_no_token_is_left_is_not_opened(encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(THOUGHT)])
    outcome = await Runner(encoding, backend).ask(max_tokens=len(encoding.encode_marked(THOUGHT)))
    assert items_of(outcome.events) == (R("Hm."),)
    assert outcome.finished.reason is FinishReason.LENGTH
    assert outcome.report.recoveries == []


async def test_an_answer_for_which_the_context_has_no_room_is_not_opened(encoding: Encoding) -> None:
    first = Scripted(encoding, [Step(THOUGHT), Step("one")])
    await Runner(encoding, first).ask()
    for context, steps in ((len(first.jobs[1].prompt.tokens), 1), (len(first.jobs[1].prompt.tokens) + 1, 2)):
        told = Capabilities(OutputForm.IDS, OutputForm.IDS, stop_visible=True, context=context)
        backend = Scripted(encoding, [Step(THOUGHT), Step("one", FinishReason.LENGTH)], told)
        outcome = await Runner(encoding, backend).ask()
        assert outcome.finished.reason is FinishReason.LENGTH
        assert len(backend.jobs) == steps
        assert backend.jobs[-1].max_tokens == context - len(backend.jobs[-1].prompt.tokens)


async def test_a_conversation_that_fills_the_context_is_refused_and_one_token_less_is_not(encoding: Encoding) -> None:
    first = Scripted(encoding, [Step(THOUGHT + ANSWER)])
    await Runner(encoding, first).ask()
    size = len(first.jobs[0].prompt.tokens)
    full = Scripted(
        encoding, [Step(ANSWER)], Capabilities(OutputForm.IDS, OutputForm.IDS, stop_visible=True, context=size)
    )
    with pytest.raises(ContextTooLong):
        await Runner(encoding, full).ask()
    assert full.jobs == []
    last = Scripted(
        encoding, [Step("x", FinishReason.LENGTH)], Capabilities(OutputForm.IDS, OutputForm.IDS, True, size + 1)
    )
    assert (await Runner(encoding, last).ask()).finished.reason is FinishReason.LENGTH
    assert last.jobs[0].max_tokens == 1


HIDDEN = {
    "a header": "<|channel|>commentary to=functions.f <|constrain|>json",
    "half a call": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":',
}


@pytest.mark.parametrize("output", HIDDEN.values(), ids=HIDDEN)
async def test_what_was_not_shown_yet_leaves_nothing_of_a_failed_backend_but_its_tokens(
    output: str, encoding: Encoding
) -> None:
    failing = Scripted(encoding, [Step(output, failure=BackendUnavailable("gone"), cached=7)], name="one")
    other = Scripted(encoding, [Step(THOUGHT + ANSWER)], name="two")
    outcome = await Runner(encoding, failing, other).ask(failover=False)
    assert items_of(outcome.events) == (R("Hm."), F("one two three"))
    assert (outcome.report.failovers, outcome.report.backend, outcome.report.recoveries) == (1, "two", [])
    generated = len(encoding.encode_as_server(output)) + len(encoding.encode_as_server(THOUGHT + ANSWER))
    assert outcome.finished.usage == Usage(len(other.jobs[0].prompt.tokens), generated, 2, 7)
    assert not outcome.finished.cut_call


REST = {"a header": "<|message|>{}<|call|>", "half a call": "1}<|call|>"}


@pytest.mark.parametrize("case", REST)
async def test_what_was_not_shown_yet_is_gone_on_with(case: str, encoding: Encoding) -> None:
    failing = Scripted(encoding, [Step(HIDDEN[case], failure=BackendUnavailable("gone"), cached=7)], name="one")
    other = Scripted(encoding, [Step(REST[case], cached=9)], name="two")
    outcome = await Runner(encoding, failing, other).ask()
    assert items_of(outcome.events) == (C("f", "{}" if case == "a header" else '{"a":1}'),)
    assert [(each.deployment, each.failure) for each in outcome.report.tries] == [
        ("one", "backend_unavailable"),
        ("two", ""),
    ]
    said = encoding.encode_as_server(HIDDEN[case])
    assert list(other.jobs[0].prompt.tokens) == [*failing.jobs[0].prompt.tokens, *said]
    generated = len(said) + len(encoding.encode_as_server(REST[case]))
    assert outcome.finished.usage == Usage(len(failing.jobs[0].prompt.tokens), generated, 0, 7)


RAISED: dict[str, tuple[UnisonoError, bool]] = {
    "nobody is to go on": (BackendUnavailable("gone"), False),
    "the request is refused": (BackendRejected("no"), True),
}


@pytest.mark.parametrize(("failure", "failover"), RAISED.values(), ids=RAISED)
async def test_a_failure_after_something_was_shown_is_raised_when(
    failure: UnisonoError, failover: bool, encoding: Encoding
) -> None:
    failing = Scripted(encoding, [Step("<|channel|>final<|message|>one", failure=failure)], per_chunk=1)
    other = Scripted(encoding, [Step(ANSWER)])
    runner = Runner(encoding, failing, other)
    with pytest.raises(type(failure)):
        await runner.ask(failover=failover)
    assert other.jobs == []
    assert runner.pool.failures == [failure]
    assert runner.pool.taken == 0


async def test_an_answer_that_finds_nowhere_to_go_on_has_not_moved(encoding: Encoding) -> None:
    gone = BackendUnavailable("gone")
    backend = Scripted(encoding, [Step("<|channel|>final<|message|>one", failure=gone)], per_chunk=1)
    run = Runner(encoding, backend).engine.start(GenerationRequest("m", ASKED))
    with pytest.raises(BackendUnavailable):
        [batch async for batch in run]
    assert run.report.failovers == 0
    assert [(each.deployment, each.failure) for each in run.report.tries] == [("scripted", gone.code)]


NOBODY = CannotGoOn("no")
STUCK = {
    "behind its thoughts": [Step(THOUGHT), Step("", failure=NOBODY)],
    "in its answer": [Step(THOUGHT + "<|start|>assistant<|channel|>final<|message|>one", failure=NOBODY)],
}


@pytest.mark.parametrize("steps", STUCK.values(), ids=STUCK)
async def test_an_answer_that_nobody_can_go_on_behind_is_given_up_in_the_end(
    steps: list[Step], encoding: Encoding
) -> None:
    backend = Scripted(encoding, steps * 9)
    run = Runner(encoding, backend).engine.start(GenerationRequest("m", ASKED, whole=True))
    events = [event async for batch in run for event in batch]
    check_lifecycle(events)
    assert items_of(events)[0] == R("Hm.")
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.LENGTH
    assert len(backend.jobs) <= 8


async def test_a_place_is_told_of_the_first_token_of_every_generation(encoding: Encoding) -> None:
    silent = Scripted(encoding, [Step("", failure=BackendUnavailable("gone"), cached=7)], name="one")
    failing = Scripted(encoding, [Step(THOUGHT, cached=7, failure=BackendUnavailable("gone"))], name="two", per_chunk=1)
    other = Scripted(encoding, [Step("<|return|>"), Step("one two<|return|>")], TEXT, name="three")
    runner = Runner(encoding, silent, failing, other)
    report = (await runner.ask()).report
    assert report.failovers == 2
    assert runner.pool.began == ["two", "three", "three"]
    # And of all that it took, whatever came of it.
    assert runner.pool.took == [step.prompt_tokens + step.generated for step in report.facts.steps]
    assert len(runner.pool.took) == 4


async def test_only_the_first_prompt_is_counted_and_what_of_it_was_cached(encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(THOUGHT, cached=0), Step("one two<|return|>", cached=10_000)])
    outcome = await Runner(encoding, backend).ask()
    assert outcome.finished.usage.prompt_tokens == len(backend.jobs[0].prompt.tokens)
    assert outcome.finished.usage.cached_tokens == 0


async def test_a_call_nobody_may_make_is_thought_and_the_answer_is_opened(encoding: Encoding) -> None:
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    backend = Scripted(encoding, [Step(call), Step("one<|return|>")])
    outcome = await Runner(encoding, backend).ask(calls_allowed=False)
    assert items_of(outcome.events) == (R("{}"), F("one"))
    backend = Scripted(encoding, [Step(call)])
    assert items_of((await Runner(encoding, backend).ask()).events) == (C("f"),)


async def test_a_prefilled_answer_is_remembered_as_the_client_will_send_it_back(encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(" a time<|return|>")])
    runner = Runner(encoding, backend)
    await runner.ask(Conversation(ASKED.preamble, ASKED.items, prefill="Once upon"))
    whole, half = AssistantMessage("Once upon a time"), AssistantMessage(" a time")
    for message, known in ((whole, True), (half, False)):
        sent = Conversation(ASKED.preamble, (*ASKED.items, message, UserMessage("Go on")))
        found = runner.memory.recall("team", sent).items[1]
        assert isinstance(found, AssistantMessage)
        assert found.text == message.text
        assert bool(found.tokens) is known
