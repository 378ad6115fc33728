"""Runs on scripted backends: steps, limits, failover, usage and cached conversations."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tests.engine.scripted import ANSWER, CONVERSATION, IDS, TEXT, THOUGHT, Runner, Scripted, Step
from tests.harmony.fold import check_lifecycle, items_of
from tests.harmony.recoveries import C, F, P, R
from unisono.core.conversation import AssistantMessage, Conversation, UserMessage
from unisono.core.events import Finished
from unisono.core.generation import Capabilities, FinishReason, OutputForm, Usage
from unisono.engine.request import AnswerOptions, GenerationRequest, RoutingOptions
from unisono.errors import BackendRejected, BackendUnavailable, CannotGoOn, ContextTooLong, UnisonoError
from unisono.harmony.encoding import Encoding


@pytest.mark.parametrize("capabilities", [IDS, TEXT], ids=["ids", "text"])
@pytest.mark.parametrize("per_chunk", [1, 1000])
async def test_a_missing_answer_is_opened(capabilities: Capabilities, per_chunk: int, encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(THOUGHT), Step("one two")], capabilities, per_chunk)
    outcome = await Runner(encoding, backend).ask()
    assert items_of(outcome.events) == (R("Hm."), F("one two"))
    assert outcome.finished.reason is FinishReason.STOP
    assert outcome.report.recoveries == ["analysis-only", *(["restored-stop"] if capabilities is TEXT else [])]
    opened = encoding.encode_marked(THOUGHT + "<|start|>assistant<|channel|>final<|message|>")
    assert list(backend.jobs[1].prompt.tokens) == [*backend.jobs[0].prompt.tokens, *opened]
    generated = len(encoding.encode_as_server(THOUGHT + "one two"))
    # The hidden stop token counts as generated.
    assert outcome.finished.usage.completion_tokens == generated + (capabilities is TEXT)


async def test_a_missing_answer_is_opened_only_once(encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(THOUGHT), Step("<|return|>")])
    outcome = await Runner(encoding, backend).ask()
    assert items_of(outcome.events) == (R("Hm."), F(""))
    assert len(backend.jobs) == 2


@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
@pytest.mark.parametrize("capabilities", [IDS, TEXT], ids=["ids", "text"])
async def test_a_stop_string_matches_in_an_opened_answer(
    capabilities: Capabilities, per_chunk: int, encoding: Encoding
) -> None:
    backend = Scripted(encoding, [Step(THOUGHT), Step("one END two")], capabilities, per_chunk)
    outcome = await Runner(encoding, backend).ask(stop=("END", "Hm"))
    assert items_of(outcome.events) == (R("Hm."), F("one "))
    assert outcome.finished.stop_sequence == "END"
    assert outcome.finished.reason is FinishReason.STOP


AFTER_THE_STOP: dict[str, str] = {
    "unfinished call": '<|channel|>commentary to=functions.f<|message|>{"a":1}<|endoftext|>',
    "call cut off": '<|channel|>commentary to=functions.f<|message|>{"a":',
    "complete call": '<|channel|>commentary to=functions.f<|message|>{"a":1}<|call|>',
    "answer": "<|channel|>final<|message|>three<|return|>",
}


@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
@pytest.mark.parametrize("after", AFTER_THE_STOP.values(), ids=AFTER_THE_STOP)
async def test_output_after_a_stop_string_does_not_change_the_answer(
    after: str, per_chunk: int, encoding: Encoding
) -> None:
    before = "<|channel|>commentary<|message|>one END"
    backend = Scripted(encoding, [Step(f"{before} two<|end|><|start|>assistant{after}")], per_chunk=per_chunk)
    outcome = await Runner(encoding, backend).ask(stop=("END",))
    assert items_of(outcome.events) == (P("one "),)
    assert outcome.finished.usage.completion_tokens == len(encoding.encode_as_server(before))
    assert outcome.finished.reason is FinishReason.STOP
    assert not outcome.finished.cut_call
    assert (outcome.report.recoveries, outcome.report.unmet) == ([], "")


async def test_max_tokens_applies_to_all_steps_together(encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(THOUGHT), Step("one", FinishReason.LENGTH)])
    outcome = await Runner(encoding, backend).ask(max_tokens=len(encoding.encode_marked(THOUGHT)) + 1)
    assert [job.max_tokens for job in backend.jobs] == [len(encoding.encode_marked(THOUGHT)) + 1, 1]
    assert outcome.finished.reason is FinishReason.LENGTH


async def test_an_answer_is_not_opened_without_remaining_tokens(encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(THOUGHT)])
    outcome = await Runner(encoding, backend).ask(max_tokens=len(encoding.encode_marked(THOUGHT)))
    assert items_of(outcome.events) == (R("Hm."),)
    assert outcome.finished.reason is FinishReason.LENGTH
    assert outcome.report.recoveries == []


async def test_an_answer_is_not_opened_without_room_in_the_context(encoding: Encoding) -> None:
    first = Scripted(encoding, [Step(THOUGHT), Step("one")])
    await Runner(encoding, first).ask()
    for context, steps in ((len(first.jobs[1].prompt.tokens), 1), (len(first.jobs[1].prompt.tokens) + 1, 2)):
        capabilities = Capabilities(OutputForm.IDS, OutputForm.IDS, stop_visible=True, context=context)
        backend = Scripted(encoding, [Step(THOUGHT), Step("one", FinishReason.LENGTH)], capabilities)
        outcome = await Runner(encoding, backend).ask()
        assert outcome.finished.reason is FinishReason.LENGTH
        assert len(backend.jobs) == steps
        assert backend.jobs[-1].max_tokens == context - len(backend.jobs[-1].prompt.tokens)


async def test_a_conversation_that_fills_the_context_is_rejected(encoding: Encoding) -> None:
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


UNSEEN = {
    "header": "<|channel|>commentary to=functions.f <|constrain|>json",
    "incomplete call": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":',
}


@pytest.mark.parametrize("output", UNSEEN.values(), ids=UNSEEN)
async def test_unseen_output_of_a_failed_backend_is_dropped_without_failover(output: str, encoding: Encoding) -> None:
    failing = Scripted(encoding, [Step(output, failure=BackendUnavailable("gone"), cached=7)], name="one")
    other = Scripted(encoding, [Step(THOUGHT + ANSWER)], name="two")
    outcome = await Runner(encoding, failing, other).ask(failover=False)
    assert items_of(outcome.events) == (R("Hm."), F("one two three"))
    assert (outcome.report.failovers, outcome.report.backend, outcome.report.recoveries) == (1, "two", [])
    generated = len(encoding.encode_as_server(output)) + len(encoding.encode_as_server(THOUGHT + ANSWER))
    assert outcome.finished.usage == Usage(len(other.jobs[0].prompt.tokens), generated, 2, 7)
    assert not outcome.finished.cut_call


REST = {"header": "<|message|>{}<|call|>", "incomplete call": "1}<|call|>"}


@pytest.mark.parametrize("case", REST)
async def test_unseen_output_of_a_failed_backend_is_continued(case: str, encoding: Encoding) -> None:
    failing = Scripted(encoding, [Step(UNSEEN[case], failure=BackendUnavailable("gone"), cached=7)], name="one")
    other = Scripted(encoding, [Step(REST[case], cached=9)], name="two")
    outcome = await Runner(encoding, failing, other).ask()
    assert items_of(outcome.events) == (C("f", "{}" if case == "header" else '{"a":1}'),)
    assert [(each.deployment, each.failure) for each in outcome.report.tries] == [
        ("one", "backend_unavailable"),
        ("two", ""),
    ]
    unseen = encoding.encode_as_server(UNSEEN[case])
    assert list(other.jobs[0].prompt.tokens) == [*failing.jobs[0].prompt.tokens, *unseen]
    generated = len(unseen) + len(encoding.encode_as_server(REST[case]))
    assert outcome.finished.usage == Usage(len(failing.jobs[0].prompt.tokens), generated, 0, 7)


RAISED: dict[str, tuple[UnisonoError, bool]] = {
    "failover disabled": (BackendUnavailable("gone"), False),
    "rejected request": (BackendRejected("no"), True),
}


@pytest.mark.parametrize(("failure", "failover"), RAISED.values(), ids=RAISED)
async def test_a_failure_after_emitted_output_is_raised(
    failure: UnisonoError, failover: bool, encoding: Encoding
) -> None:
    failing = Scripted(encoding, [Step("<|channel|>final<|message|>one", failure=failure)], per_chunk=1)
    other = Scripted(encoding, [Step(ANSWER)])
    runner = Runner(encoding, failing, other)
    with pytest.raises(type(failure)):
        await runner.ask(failover=failover)
    assert other.jobs == []
    assert runner.pool.failures == [failure]
    assert runner.pool.slots_in_use == 0


async def test_a_failure_without_another_backend_is_no_failover(encoding: Encoding) -> None:
    gone = BackendUnavailable("gone")
    backend = Scripted(encoding, [Step("<|channel|>final<|message|>one", failure=gone)], per_chunk=1)
    run = Runner(encoding, backend).engine.start(GenerationRequest("m", CONVERSATION))
    with pytest.raises(BackendUnavailable):
        [batch async for batch in run]
    assert run.report.failovers == 0
    assert [(each.deployment, each.failure) for each in run.report.tries] == [("scripted", gone.code)]


CANNOT_CONTINUE = CannotGoOn("no")
STUCK = {
    "after reasoning": [Step(THOUGHT), Step("", failure=CANNOT_CONTINUE)],
    "in the answer": [Step(THOUGHT + "<|start|>assistant<|channel|>final<|message|>one", failure=CANNOT_CONTINUE)],
}


@pytest.mark.parametrize("steps", STUCK.values(), ids=STUCK)
async def test_an_answer_that_no_backend_can_continue_ends(steps: list[Step], encoding: Encoding) -> None:
    backend = Scripted(encoding, steps * 9)
    run = Runner(encoding, backend).engine.start(GenerationRequest("m", CONVERSATION, answer=AnswerOptions(whole=True)))
    events = [event async for batch in run for event in batch]
    check_lifecycle(events)
    assert items_of(events)[0] == R("Hm.")
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.LENGTH
    assert len(backend.jobs) <= 8


async def test_an_answer_that_the_client_has_seen_never_starts_over(encoding: Encoding) -> None:
    call = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a"'
    failing = Scripted(
        encoding, [Step(THOUGHT + call, failure=CANNOT_CONTINUE), Step("<|channel|>final<|message|>one<|return|>")]
    )
    other = Scripted(encoding, [Step(THOUGHT + "<|start|>assistant<|channel|>final<|message|>two<|return|>")])
    run = Runner(encoding, failing, other).engine.start(
        GenerationRequest("m", CONVERSATION, routing=RoutingOptions(failover=False))
    )
    events = [event async for batch in run for event in batch]
    check_lifecycle(events)
    # The call, of which the client has seen nothing, is generated again on the same deployment.
    assert items_of(events) == (R("Hm."), F("one"))
    assert not other.jobs
    end = encoding.encode_marked("<|channel|>final<|message|>one<|return|>")
    assert run.report.journal[-len(end) :] == end


async def test_the_slot_records_first_tokens_and_token_counts(encoding: Encoding) -> None:
    silent = Scripted(encoding, [Step("", failure=BackendUnavailable("gone"), cached=7)], name="one")
    failing = Scripted(encoding, [Step(THOUGHT, cached=7, failure=BackendUnavailable("gone"))], name="two", per_chunk=1)
    other = Scripted(encoding, [Step("<|return|>"), Step("one two<|return|>")], TEXT, name="three")
    runner = Runner(encoding, silent, failing, other)
    report = (await runner.ask()).report
    assert report.failovers == 2
    assert runner.pool.first_tokens == ["two", "three", "three"]
    # Failed generations count too.
    assert runner.pool.token_counts == [step.prompt_tokens + step.generated for step in report.facts.steps]
    assert len(runner.pool.token_counts) == 4


async def test_usage_counts_only_the_first_prompt(encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(THOUGHT, cached=0), Step("one two<|return|>", cached=10_000)])
    outcome = await Runner(encoding, backend).ask()
    assert outcome.finished.usage.prompt_tokens == len(backend.jobs[0].prompt.tokens)
    assert outcome.finished.usage.cached_tokens == 0


async def test_a_call_that_is_not_allowed_is_reasoning(encoding: Encoding) -> None:
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    backend = Scripted(encoding, [Step(call), Step("one<|return|>")])
    outcome = await Runner(encoding, backend).ask(calls_allowed=False)
    assert items_of(outcome.events) == (R("{}"), F("one"))
    backend = Scripted(encoding, [Step(call)])
    assert items_of((await Runner(encoding, backend).ask()).events) == (C("f"),)


async def test_a_prefilled_answer_is_cached_with_its_prefill(encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(" a time<|return|>")])
    runner = Runner(encoding, backend)
    await runner.ask(Conversation(CONVERSATION.preamble, CONVERSATION.items, prefill="Once upon"))
    complete, suffix = AssistantMessage("Once upon a time"), AssistantMessage(" a time")
    for message, is_cached in ((complete, True), (suffix, False)):
        sent = Conversation(CONVERSATION.preamble, (*CONVERSATION.items, message, UserMessage("Go on")))
        found = runner.memory.recall("team", sent).items[1]
        assert isinstance(found, AssistantMessage)
        assert found.text == message.text
        assert bool(found.tokens) is is_cached


def test_a_request_with_other_options_keeps_all_other_fields() -> None:
    kind: Any = GenerationRequest
    values = {field.name: object() for field in fields(kind)}
    origin = object()
    changed = kind(**values).with_options(origin=origin)
    assert {name: getattr(changed, name) for name in values} == values | {"origin": origin}
