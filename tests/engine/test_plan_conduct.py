"""Interventions with streaming, usage, rejected constraints, repetition and server tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import pytest

from tests.engine.hosting import ANSWER, call, calls_of
from tests.engine.hosting import Talk as ServerToolTalk
from tests.engine.planning import (
    BACKENDS,
    CITY,
    CITY_FORM,
    CONVERSATION,
    ENCODING,
    FINAL,
    GUIDED,
    NAMED,
    PARIS,
    PREAMBLE,
    WEATHER,
    WITHOUT_TOOLS,
    S,
    T,
    ask,
    turn,
)
from tests.engine.scripted import IDS, TEXT, Line, Scripted, Step
from tests.harmony.fold import check_lifecycle, items_of
from tests.harmony.recoveries import C, F, R
from unisono.core.conversation import AnswerForm
from unisono.core.events import Closed, Delta, Event, Opened, Text
from unisono.core.generation import Capabilities, Chunk, CompletionJob, FinishReason, JsonSchema, Sampling
from unisono.core.recovery_rules import TOOL_NOT_ALLOWED
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.generation import Engine
from unisono.engine.interventions.policy import MAX_EDITS
from unisono.engine.interventions.requirements import UNMET_CALL, UNMET_FORM
from unisono.engine.journal import generated_in
from unisono.engine.request import AllowedTools, ForcedCalls, GenerationRequest, GenerationStream
from unisono.errors import BackendRejected, ConstraintRefused
from unisono.harmony.render import Renderer
from unisono.schemas import violation

RAIN = FINAL + "It rains.<|return|>"


def engine(*backends: Scripted) -> Engine:
    return Engine(
        EngineDeps(
            encoding=ENCODING,
            renderer=Renderer(ENCODING),
            pool=Line(backends),
            memory=ConversationCache(),
            new_call_id=lambda: "call_1",
            violation=violation,
        )
    )


def texts_of(events: Sequence[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Closed) and isinstance(event.item, Text)]


async def batches_of(run: GenerationStream) -> list[list[Event]]:
    return [batch async for batch in run]


async def test_a_constrained_answer_is_streamed() -> None:
    backend = Scripted(ENCODING, [Step(T + S + RAIN), Step(PARIS + "<|return|>")], GUIDED, per_chunk=1)
    batches = await batches_of(engine(backend).start(turn(form=CITY_FORM)))
    deltas = [event.text for batch in batches for event in batch if isinstance(event, Delta) and event.item.index == 1]
    assert len(deltas) > 2
    assert "".join(deltas) == PARIS


async def test_an_unconstrained_answer_is_emitted_after_validation() -> None:
    backend = Scripted(ENCODING, [Step(T + S + RAIN), Step(PARIS + "<|return|>")], IDS, per_chunk=1)
    batches = await batches_of(engine(backend).start(turn(form=CITY_FORM)))
    [at] = [
        at for at, batch in enumerate(batches) if any(isinstance(e, Opened) and isinstance(e.item, Text) for e in batch)
    ]
    assert [event.text for event in batches[at] if isinstance(event, Delta)] == [PARIS]


# A JSON grammar accepts this output, since it takes markers inside a string for text.
BROKEN = '{"city":"Pa<|end|>'


@pytest.mark.parametrize("option", [{"whole": True}, {"is_streamed": False}], ids=["whole", "not streamed"])
async def test_an_unseen_broken_constrained_answer_is_regenerated(option: dict[str, bool]) -> None:
    outputs = [T + S + RAIN, BROKEN, PARIS + "<|return|>"]
    outcome = await ask(outputs, turn(form=CITY_FORM, **option), GUIDED)
    assert outcome.items == (R("Hm."), F(PARIS))
    assert outcome.rules == ("regenerated-answer",)
    assert outcome.report.unmet == ""
    assert outcome.constraints == [None, JsonSchema(CITY), JsonSchema(CITY)]


@pytest.mark.parametrize("option", [{"whole": True}, {"is_streamed": False}], ids=["whole", "not streamed"])
async def test_a_constrained_answer_broken_in_every_retry_is_unfit(option: dict[str, bool]) -> None:
    outcome = await ask([T + S + RAIN, BROKEN, BROKEN, BROKEN], turn(form=CITY_FORM, **option), GUIDED)
    [answer] = [event.item for event in outcome.events if isinstance(event, Closed) and isinstance(event.item, Text)]
    assert answer.unfit
    assert outcome.report.unmet == UNMET_FORM


async def test_an_emitted_broken_constrained_answer_is_reported() -> None:
    outcome = await ask([T + S + RAIN, BROKEN], turn(form=CITY_FORM), GUIDED)
    assert texts_of(outcome.events) == ['{"city":"Pa']
    assert outcome.report.unmet == UNMET_FORM


@pytest.mark.parametrize("whole", [False, True])
async def test_a_constrained_answer_cut_at_the_limit_is_reported(whole: bool) -> None:
    cut = Step('{"city":"Pa', FinishReason.LENGTH)
    outcome = await ask([T + S + RAIN, cut], turn(form=CITY_FORM, whole=whole), GUIDED)
    assert texts_of(outcome.events) == ['{"city":"Pa']
    assert outcome.finished.reason is FinishReason.LENGTH
    assert outcome.report.unmet == UNMET_FORM


async def test_an_answer_cut_at_the_limit_is_returned_incomplete() -> None:
    outcome = await ask([Step(FINAL + '{"city":"Pa', FinishReason.LENGTH)], turn(form=CITY_FORM))
    assert outcome.items == (F('{"city":"Pa'),)
    assert outcome.finished.reason is FinishReason.LENGTH


async def test_stored_tokens_of_an_unfenced_answer_match_its_text() -> None:
    outcome = await ask([FINAL + f"```\n{PARIS}\n```<|return|>"], turn(form=CITY_FORM))
    [closed] = [event for event in outcome.events if isinstance(event, Closed)]
    assert ENCODING.decode(closed.tokens) == S + FINAL + PARIS + "<|return|>"


async def test_stored_tokens_of_a_forced_call_are_a_complete_message() -> None:
    outcome = await ask([T + S + RAIN, PARIS + "<|return|>"], turn(NAMED))
    closed = [event for event in outcome.events if isinstance(event, Closed)]
    assert ENCODING.decode(closed[1].tokens) == S + WEATHER + PARIS + "<|return|>"


# Numbers of tokens per chunk of the backend.
CHUNKS = (1, 2, 16, 32, 1000)
UP_TO_HEADER = T + S + FINAL
LATER = T + S + "Hello there.<|start|>user<|message|>" + "word " * 20 + "<|end|>" + S
# Requests, the outputs of the backend, and the part of each output that counts.
STOPPED: dict[str, tuple[GenerationRequest, Sequence[str], Sequence[str]]] = {
    "a named tool": (
        turn(NAMED),
        [T + S + RAIN, '{"town":1}<|call|>' + S + RAIN, PARIS + "<|call|>"],
        [UP_TO_HEADER, '{"town":1}<|call|>', PARIS + "<|call|>"],
    ),
    "any tool": (
        turn(ForcedCalls()),
        [T + S + RAIN, ".get_weather <|constrain|>json<|message|>{}<|call|>", PARIS + "<|call|>"],
        [UP_TO_HEADER, ".get", PARIS + "<|call|>"],
    ),
    "an undeclared tool": (
        turn(),
        [T + S + "<|channel|>commentary to=functions.x<|message|>{}<|call|>" + S + RAIN, RAIN],
        [T + S + "<|channel|>commentary to=functions.x<|message|>{}<|call|>", RAIN],
    ),
    "a reasoning budget": (
        turn(conversation=WITHOUT_TOOLS, reasoning_budget=3),
        ["<|channel|>analysis<|message|>one two three four five", "It rains.<|return|>"],
        ["<|channel|>analysis<|message|>one two three", "It rains.<|return|>"],
    ),
    "a text whose meaning a later message decides": (
        turn(ForcedCalls(frozenset({"now"})), reasoning_budget=2),
        [LATER + "<|channel|>analysis<|message|>one two three<|end|>", "{}<|call|>"],
        [LATER + "<|channel|>analysis<|message|>", "{}<|call|>"],
    ),
}


@pytest.mark.parametrize("per_chunk", CHUNKS)
@pytest.mark.parametrize(("generation_request", "outputs", "counted"), STOPPED.values(), ids=STOPPED)
async def test_tokens_after_an_intervention_do_not_count(
    generation_request: GenerationRequest, outputs: Sequence[str], counted: Sequence[str], per_chunk: int
) -> None:
    lengths = [len(ENCODING.encode_as_server(output)) for output in counted]
    limited = replace(generation_request, answer=replace(generation_request.answer, max_tokens=sum(lengths)))
    outcome = await ask(outputs, limited, per_chunk=per_chunk)
    assert [job.max_tokens for job in outcome.jobs] == [sum(lengths[at:]) for at in range(len(lengths))]
    assert outcome.finished.reason is FinishReason.STOP
    assert outcome.finished.usage.completion_tokens == sum(lengths)
    assert outcome.finished.usage.prompt_tokens == len(outcome.jobs[0].prompt.tokens)
    # The usage of an answer that does not complete is the sum of its attempts.
    assert outcome.report.facts.usage.completion_tokens == sum(lengths)
    assert generated_in(outcome.report.journal) == sum(lengths)


# Outputs whose meaning only their end decides.
UNDECIDED = {
    "ended in a message of the user": T + S + "Hello there.<|start|>user<|message|>" + "word " * 50 + "<|return|>",
    "text without a channel": "Hello there. " + "word " * 50 + "<|return|>",
}
LATE_REQUESTS = {"any tool": turn(ForcedCalls(frozenset({"now"}))), "a form": turn(form=CITY_FORM)}


@pytest.mark.parametrize("per_chunk", CHUNKS)
@pytest.mark.parametrize("output", UNDECIDED.values(), ids=UNDECIDED)
@pytest.mark.parametrize("owed", LATE_REQUESTS.values(), ids=LATE_REQUESTS)
async def test_tokens_before_a_late_intervention_count(owed: GenerationRequest, output: str, per_chunk: int) -> None:
    rest = "{}<|call|>" if owed.answer.form is None else PARIS + "<|return|>"
    lengths = [len(ENCODING.encode_as_server(each)) for each in (output, rest)]
    limited = replace(owed, answer=replace(owed.answer, max_tokens=sum(lengths)))
    outcome = await ask([output, rest], limited, per_chunk=per_chunk)
    assert [job.max_tokens for job in outcome.jobs] == [sum(lengths), lengths[1]]
    assert outcome.finished.usage.completion_tokens == sum(lengths)
    assert outcome.report.facts.usage.completion_tokens == sum(lengths)
    assert sum(step.generated for step in outcome.report.facts.steps) == sum(lengths)
    assert generated_in(outcome.report.journal) == sum(lengths)


async def test_the_answer_ends_if_no_tokens_are_left_for_the_call() -> None:
    size = len(ENCODING.encode_as_server(UP_TO_HEADER))
    outcome = await ask([T + S + RAIN], turn(NAMED, max_tokens=size), per_chunk=1000)
    assert outcome.items == (R("Hm."),)
    assert outcome.finished.reason is FinishReason.LENGTH
    assert outcome.report.unmet


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("capabilities", [IDS, GUIDED, TEXT], ids=["ids", "guided", "text"])
async def test_retries_use_other_deterministic_seeds(capabilities: Capabilities, seed: int | None) -> None:
    sampling = Sampling(temperature=0.0, seed=seed)
    outputs = [RAIN, '{"town":1}<|call|>', '{"town":2}<|call|>', PARIS + "<|call|>"]
    outcomes = [await ask(outputs, turn(NAMED, sampling=sampling), capabilities, per_chunk=size) for size in (1, 3)]
    first, second = ([job.sampling for job in each.jobs] for each in outcomes)
    assert first == second
    assert first[:2] == [sampling, sampling]
    assert [each.temperature > 0 and each.seed is not None for each in first] == [False, False, True, True]
    assert len({each.seed for each in first}) == 3


async def test_backends_receive_temperature_0_instead_of_top_p_0() -> None:
    outputs = [RAIN, '{"town":1}<|call|>', '{"town":2}<|call|>', PARIS + "<|call|>"]
    outcome = await ask(outputs, turn(NAMED, sampling=Sampling(temperature=0.7, top_p=0.0, top_k=5)))
    first, *_, last = [job.sampling for job in outcome.jobs]
    assert first == Sampling(temperature=0.0, top_k=5)
    assert (last.temperature > 0, last.top_p) == (True, 1.0), "a retry must be able to differ"


async def test_the_first_retry_under_a_constraint_keeps_the_sampling_of_the_client() -> None:
    sampling = Sampling(temperature=0.0, seed=7)
    outputs = [WEATHER + '{"city":<|call|>', '{"city":<|call|>', PARIS + "<|call|>"]
    outcome = await ask(outputs, turn(sampling=sampling), GUIDED)
    assert [job.constraint is not None for job in outcome.jobs] == [False, True, True]
    assert [job.sampling == sampling for job in outcome.jobs] == [True, True, False]


@dataclass
class Refusing(Scripted):
    """Backend that rejects every constraint, although it reports that it enforces them."""

    refusal: type[BackendRejected] = ConstraintRefused
    refused: int = 0

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        if job.constraint is not None:
            self.refused += 1
            raise self.refusal("no")
        async for chunk in super().complete(job):
            yield chunk


async def test_a_rejected_constraint_is_dropped_and_the_output_validated() -> None:
    outputs = [T + S + RAIN, '{"town":1}<|return|>', PARIS + "<|return|>"]
    backend = Refusing(ENCODING, [Step(output) for output in outputs], GUIDED, per_chunk=1)
    run = engine(backend).start(turn(form=CITY_FORM))
    events = [event for batch in await batches_of(run) for event in batch]
    check_lifecycle(events)
    assert items_of(events) == (R("Hm."), F(PARIS))
    assert backend.refused == 1
    assert run.report.unmet == ""


async def test_another_rejection_under_a_constraint_is_raised() -> None:
    backend = Refusing(ENCODING, [Step(T + S + RAIN)], GUIDED, refusal=BackendRejected)
    with pytest.raises(BackendRejected):
        await batches_of(engine(backend).start(turn(form=CITY_FORM)))


async def test_a_plain_request_is_one_unconstrained_generation() -> None:
    outcome = await ask([T + S + RAIN], turn(conversation=WITHOUT_TOOLS), GUIDED)
    assert outcome.constraints == [None]
    assert outcome.report.journal == ENCODING.encode_as_server(T + S + RAIN)


async def test_streamed_calls_are_not_regenerated() -> None:
    outcome = await ask([WEATHER + "Paris<|call|>"], turn(hold_calls=False))
    assert outcome.items == (C("get_weather", "Paris"),)


async def test_a_call_that_is_not_allowed_is_not_streamed() -> None:
    outcome = await ask(
        [T + S + WEATHER + "{}<|call|>", "It rains.<|return|>"],
        turn(AllowedTools(frozenset({"add"})), hold_calls=False),
    )
    assert outcome.items == (R("Hm."), F("It rains."))


REPETITION = "la " * 4_500


@pytest.mark.parametrize("capabilities", [IDS, TEXT], ids=["ids", "text"])
@pytest.mark.parametrize("per_chunk", [1, 7, 5000])
async def test_repetitive_reasoning_is_ended(capabilities: object, per_chunk: int) -> None:
    outcome = await ask(
        ["<|channel|>analysis<|message|>" + REPETITION, "It rains.<|return|>"],
        turn(),
        IDS if capabilities is IDS else TEXT,
        per_chunk=per_chunk if capabilities is IDS else max(per_chunk, 3),
    )
    thought, answer = outcome.items
    assert answer == F("It rains.")
    assert isinstance(thought, R)
    assert len(thought.text) < len(REPETITION)
    assert outcome.suffixes[1] == "<|channel|>analysis<|message|>" + thought.text + "<|end|>" + S + FINAL
    assert "repetition" in outcome.rules


async def test_a_repetitive_answer_ends_at_the_same_token_for_any_chunk_size() -> None:
    lengths = set()
    for per_chunk in (1, 7, 5000):
        outcome = await ask([FINAL + REPETITION], turn(), per_chunk=per_chunk)
        [answer] = outcome.items
        assert outcome.finished.reason is FinishReason.LENGTH
        assert outcome.rules == ("repetition",)
        assert isinstance(answer, F)
        assert len(answer.text) < len(REPETITION)
        lengths.add(len(answer.text))
    assert len(lengths) == 1


async def test_repetition_detection_can_be_switched_off() -> None:
    outcome = await ask([FINAL + REPETITION + "<|return|>"], turn(disabled_rules=frozenset({"repetition"})))
    assert outcome.items == (F(REPETITION),)


async def test_a_forced_server_tool_runs_and_then_the_model_chooses() -> None:
    steps = [RAIN, '{"q":"one"}<|call|>', ANSWER]
    talk = ServerToolTalk(
        steps,
        turn=replace(
            ServerToolTalk([]).turn,
            answer=replace(ServerToolTalk([]).turn.answer, choice=ForcedCalls(hosted=frozenset({("docs", "search")}))),
        ),
    )
    events, report = await talk.events()
    assert calls_of(events) == [("docs", "search", "search of one")]
    assert [event.text for event in events if isinstance(event, Closed) and isinstance(event.item, Text)] == [
        "It is so."
    ]
    assert report.unmet == ""


@pytest.mark.parametrize("is_parallel", [True, False])
async def test_after_a_forced_call_no_server_tool_outside_the_allowed_list_runs(*, is_parallel: bool) -> None:
    other = call("docs__fetch", '{"q":"two"}')
    steps = ['{"q":"one"}<|end|>' + S + other, ANSWER] if is_parallel else ['{"q":"one"}<|call|>', other]
    choice = ForcedCalls(hosted=frozenset({("docs", "search")}), exclusive=True)
    request = ServerToolTalk([]).turn
    talk = ServerToolTalk(
        [RAIN, *steps, ANSWER],
        turn=replace(request, answer=replace(request.answer, choice=choice)),
    )
    events, report = await talk.events()
    assert calls_of(events) == [("docs", "search", "search of one")]
    assert TOOL_NOT_ALLOWED in report.recoveries


async def test_a_forced_server_accepts_any_of_its_tools() -> None:
    steps = [RAIN, ".docs__fetch<|message|>", '{"q":"one"}<|call|>', ANSWER]
    talk = ServerToolTalk(
        steps,
        turn=replace(
            ServerToolTalk([]).turn,
            answer=replace(ServerToolTalk([]).turn.answer, choice=ForcedCalls(hosted=frozenset({("docs", None)}))),
        ),
    )
    events, _ = await talk.events()
    assert calls_of(events) == [("docs", "fetch", "fetch of one")]


async def test_the_form_is_enforced_after_tool_results() -> None:
    steps = [call("docs__search", '{"q":"one"}'), FINAL + PARIS + "<|return|>"]
    talk = ServerToolTalk(
        steps,
        caps=GUIDED,
        turn=replace(ServerToolTalk([]).turn, answer=replace(ServerToolTalk([]).turn.answer, form=CITY_FORM)),
    )
    backend = talk.backend()
    batches, report = await talk.batches(backends=[backend])
    assert texts_of([event for batch in batches for event in batch]) == [PARIS]
    assert report.unmet == ""
    assert [job.constraint for job in backend.jobs] == [None, None, JsonSchema(CITY)]


async def test_the_form_is_enforced_after_the_tool_limit() -> None:
    calls = [call("docs__nothing", "{}")] * 3
    talk = ServerToolTalk(
        [*calls, PARIS + "<|return|>"],
        caps=GUIDED,
        turn=replace(ServerToolTalk([]).turn, answer=replace(ServerToolTalk([]).turn.answer, form=CITY_FORM)),
    )
    events, report = await talk.events()
    assert texts_of(events) == [PARIS]
    assert "tools-ended" in report.recoveries
    assert talk.bases[-1].constraint == JsonSchema(CITY)


ONLY_REASONING = "<|channel|>analysis<|message|>Hm.<|return|>"
WITHOUT_CALL = {"preambles": PREAMBLE + "<|end|><|return|>", "reasoning": ONLY_REASONING}


@pytest.mark.parametrize("capabilities", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("choice", [NAMED, ForcedCalls()], ids=["a named tool", "any tool"])
@pytest.mark.parametrize("output", WITHOUT_CALL.values(), ids=WITHOUT_CALL)
async def test_a_forced_call_that_is_missing_in_all_steps_is_reported(
    output: str, choice: ForcedCalls, capabilities: Capabilities
) -> None:
    outcome = await ask([output] * 3 * MAX_EDITS, turn(choice), capabilities, spare=True)
    assert not any(isinstance(item, C) for item in outcome.items)
    assert outcome.report.unmet == UNMET_CALL
    assert outcome.finished.reason is FinishReason.STOP


async def test_a_forced_call_in_a_later_step_meets_the_requirement() -> None:
    late = "It rains.<|end|>" + S + WEATHER + PARIS + "<|call|>"
    outcome = await ask([*[ONLY_REASONING] * 3, late], turn(NAMED))
    assert outcome.items[3:] == (F("It rains."), C("get_weather", PARIS))
    assert "analysis-only" in outcome.rules
    assert outcome.report.unmet == ""


TOWN = '{"town":1}'
LOOK = FINAL + "I look.<|end|>" + S
OTHER_CALL = "<|channel|>commentary to=functions.x <|constrain|>json<|message|>{}<|call|>"
# Output that the model repeats instead of the forced call, and the items of the answer.
ABANDONED: dict[str, tuple[str, Sequence[C | F | R], str]] = {
    "a call of an undeclared tool": (OTHER_CALL, [F("x({})")], UNMET_FORM),
    "text before the call": (LOOK + WEATHER + PARIS + "<|call|>", [F("I look."), C("get_weather", PARIS)], UNMET_FORM),
    "an invalid answer": (FINAL + TOWN + "<|return|>", [F(TOWN)], UNMET_FORM),
    "two answers": (FINAL + PARIS + "<|end|>" + S + FINAL + TOWN + "<|return|>", [F(PARIS), R(TOWN)], UNMET_CALL),
    "a fence around the answer": (FINAL + f"```json\n{PARIS}\n```<|return|>", [F(PARIS)], UNMET_CALL),
}


@pytest.mark.parametrize("capabilities", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize(("output", "items", "unmet"), ABANDONED.values(), ids=ABANDONED)
async def test_an_answer_instead_of_the_forced_call_must_have_the_form(
    output: str, items: Sequence[C | F | R], unmet: str, capabilities: Capabilities
) -> None:
    outcome = await ask([output] * (MAX_EDITS + 3), turn(NAMED, form=CITY_FORM), capabilities, spare=True)
    assert outcome.items == tuple(items)
    assert outcome.report.unmet == unmet
    texts = [event.item for event in outcome.events if isinstance(event, Closed) and isinstance(event.item, Text)]
    assert [text.unfit for text in texts] == [unmet == UNMET_FORM]


async def test_a_second_forced_call_is_dropped_without_parallel_calls() -> None:
    message = WEATHER + PARIS + "<|end|>"
    outcome = await ask([message + S + message + S + RAIN], turn(NAMED, parallel_calls=False))
    assert outcome.items == (C("get_weather", PARIS), F("It rains."))


SECTIONS: dict[str, tuple[AnswerForm, str]] = {
    "a schema": (AnswerForm("city", {"type": "object"}), '# Response Formats\n\n## city\n\n{"type": "object"}'),
    "a description": (
        AnswerForm("city", {"type": "object"}, "A city.\nOne."),
        '# Response Formats\n\n## city\n\n// A city.\n// One.\n{"type": "object"}',
    ),
    "any object": (AnswerForm(), '# Response Formats\n\n## json\n\n{"type": "object"}'),
    "an odd name": (AnswerForm("a\n# b", {}), "# Response Formats\n\n## a___b\n\n{}"),
}


@pytest.mark.parametrize(("form", "section"), SECTIONS.values(), ids=SECTIONS)
async def test_the_form_is_described_at_the_end_of_the_instructions(form: AnswerForm, section: str) -> None:
    conversation = replace(CONVERSATION, preamble=replace(CONVERSATION.preamble, instructions="Be brief."))
    outcome = await ask(
        [RAIN], turn(conversation=conversation, form=form, disabled_rules=frozenset({"regenerated-answer"}))
    )
    prompt = ENCODING.decode(outcome.jobs[0].prompt.tokens)
    assert f"// namespace functions\n\n{section}<|end|>" in prompt
    assert await engine(Scripted(ENCODING, [])).count(turn(conversation=conversation, form=form)) == len(
        outcome.jobs[0].prompt.tokens
    )


async def test_the_form_is_described_without_tools_or_instructions() -> None:
    outcome = await ask([FINAL + PARIS + "<|return|>"], turn(conversation=WITHOUT_TOOLS, form=CITY_FORM))
    prompt = ENCODING.decode(outcome.jobs[0].prompt.tokens)
    assert "<|start|>developer<|message|># Response Formats\n\n## city\n\n{" in prompt
