"""How the step plan behaves beside everything else: what is shown, what is counted, who refuses, what comes after."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import pytest

from tests.engine.hosting import ANSWER, call, calls_of
from tests.engine.hosting import Talk as Hosted
from tests.engine.planning import (
    ASKED,
    CITY,
    CITY_FORM,
    ENCODING,
    FINAL,
    GUIDED,
    NAMED,
    PARIS,
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
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.interventions.requirements import UNMET_FORM
from unisono.engine.request import AllowedTools, ForcedCalls, GenerationStream
from unisono.engine.service import Engine
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


async def test_an_answer_is_shown_as_it_comes_where_the_backend_is_held_to_its_form() -> None:
    backend = Scripted(ENCODING, [Step(T + S + RAIN), Step(PARIS + "<|return|>")], GUIDED, per_chunk=1)
    batches = await batches_of(engine(backend).start(turn(form=CITY_FORM)))
    shown = [event.text for batch in batches for event in batch if isinstance(event, Delta) and event.item.index == 1]
    assert len(shown) > 2
    assert "".join(shown) == PARIS


async def test_nothing_of_an_answer_is_shown_before_it_is_right_where_it_is_not() -> None:
    backend = Scripted(ENCODING, [Step(T + S + RAIN), Step(PARIS + "<|return|>")], IDS, per_chunk=1)
    batches = await batches_of(engine(backend).start(turn(form=CITY_FORM)))
    [at] = [
        at for at, batch in enumerate(batches) if any(isinstance(e, Opened) and isinstance(e.item, Text) for e in batch)
    ]
    assert [event.text for event in batches[at] if isinstance(event, Delta)] == [PARIS]


BROKEN = '{"city":"Pa<|end|>'
"""What a grammar of JSON lets through: in a string any token is text to it, markers too."""


async def test_an_answer_that_broke_off_under_a_grammar_is_generated_again_where_nothing_was_shown() -> None:
    outputs = [T + S + RAIN, BROKEN, PARIS + "<|return|>"]
    asked = await ask(outputs, turn(form=CITY_FORM, whole=True), GUIDED)
    assert asked.items == (R("Hm."), F(PARIS))
    assert asked.rules == ("regenerated-answer",)
    assert asked.report.unmet == ""
    assert asked.constraints == [None, JsonSchema(CITY), JsonSchema(CITY)]


async def test_an_answer_that_breaks_off_under_a_grammar_each_time_is_no_answer() -> None:
    asked = await ask([T + S + RAIN, BROKEN, BROKEN, BROKEN], turn(form=CITY_FORM, whole=True), GUIDED)
    [answer] = [event.item for event in asked.events if isinstance(event, Closed) and isinstance(event.item, Text)]
    assert answer.unfit
    assert asked.report.unmet == UNMET_FORM


async def test_an_answer_that_broke_off_under_a_grammar_and_was_shown_is_told_to_be_none() -> None:
    asked = await ask([T + S + RAIN, BROKEN], turn(form=CITY_FORM), GUIDED)
    assert texts_of(asked.events) == ['{"city":"Pa']
    assert asked.report.unmet == UNMET_FORM


@pytest.mark.parametrize("whole", [False, True])
async def test_an_answer_that_is_cut_under_a_grammar_is_told_to_be_none(whole: bool) -> None:
    cut = Step('{"city":"Pa', FinishReason.LENGTH)
    asked = await ask([T + S + RAIN, cut], turn(form=CITY_FORM, whole=whole), GUIDED)
    assert texts_of(asked.events) == ['{"city":"Pa']
    assert asked.finished.reason is FinishReason.LENGTH
    assert asked.report.unmet == UNMET_FORM


async def test_an_answer_that_is_cut_is_given_as_far_as_it_came() -> None:
    asked = await ask([Step(FINAL + '{"city":"Pa', FinishReason.LENGTH)], turn(form=CITY_FORM))
    assert asked.items == (F('{"city":"Pa'),)
    assert asked.finished.reason is FinishReason.LENGTH


async def test_the_stored_tokens_of_an_unfenced_answer_are_those_of_what_was_shown() -> None:
    asked = await ask([FINAL + f"```\n{PARIS}\n```<|return|>"], turn(form=CITY_FORM))
    [closed] = [event for event in asked.events if isinstance(event, Closed)]
    assert ENCODING.decode(closed.tokens) == S + FINAL + PARIS + "<|return|>"


async def test_the_stored_tokens_of_a_forced_call_are_a_whole_message() -> None:
    asked = await ask([T + S + RAIN, PARIS + "<|return|>"], turn(NAMED))
    closed = [event for event in asked.events if isinstance(event, Closed)]
    assert ENCODING.decode(closed[1].tokens) == S + WEATHER + PARIS + "<|return|>"


async def test_every_generated_token_is_counted_and_no_other() -> None:
    outputs = [T + S + RAIN, '{"town":1}<|call|>', PARIS + "<|call|>"]
    asked = await ask(outputs, turn(NAMED), per_chunk=1000)
    generated = sum(len(ENCODING.encode_as_server(output)) for output in outputs)
    assert asked.finished.usage.completion_tokens == generated
    assert asked.finished.usage.reasoning_tokens == len(ENCODING.encode_text("Hm."))
    assert asked.finished.usage.prompt_tokens == len(asked.jobs[0].prompt.tokens)


async def test_dropped_tokens_count_against_the_limit_and_added_ones_do_not() -> None:
    outputs = [T + S + RAIN, '{"town":1}<|call|>', PARIS + "<|call|>"]
    asked = await ask(outputs, turn(NAMED, max_tokens=100), per_chunk=1000)
    lengths = [len(ENCODING.encode_as_server(output)) for output in outputs]
    assert [job.max_tokens for job in asked.jobs] == [100, 100 - lengths[0], 100 - lengths[0] - lengths[1]]


async def test_without_room_for_the_call_the_answer_ends() -> None:
    size = len(ENCODING.encode_as_server(T + S + RAIN))
    asked = await ask([T + S + RAIN], turn(NAMED, max_tokens=size), per_chunk=1000)
    assert asked.items == (R("Hm."),)
    assert asked.finished.reason is FinishReason.LENGTH
    assert asked.report.unmet


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("told", [IDS, GUIDED, TEXT], ids=["ids", "guided", "text"])
async def test_a_retry_is_drawn_differently_and_the_same_way_each_time(told: Capabilities, seed: int | None) -> None:
    sampling = Sampling(temperature=0.0, seed=seed)
    outputs = [RAIN, '{"town":1}<|call|>', '{"town":2}<|call|>', PARIS + "<|call|>"]
    asked = [await ask(outputs, turn(NAMED, sampling=sampling), told, per_chunk=size) for size in (1, 3)]
    first, second = ([job.sampling for job in each.jobs] for each in asked)
    assert first == second
    assert first[:2] == [sampling, sampling]
    assert [each.temperature > 0 and each.seed is not None for each in first] == [False, False, True, True]
    assert len({each.seed for each in first}) == 3


async def test_the_first_retry_under_a_constraint_keeps_the_sampling_of_the_client() -> None:
    sampling = Sampling(temperature=0.0, seed=7)
    outputs = [WEATHER + '{"city":<|call|>', '{"city":<|call|>', PARIS + "<|call|>"]
    asked = await ask(outputs, turn(sampling=sampling), GUIDED)
    assert [job.constraint is not None for job in asked.jobs] == [False, True, True]
    assert [job.sampling == sampling for job in asked.jobs] == [True, True, False]


@dataclass
class Refusing(Scripted):
    """Keeps to no constraint, whatever it promised."""

    refusal: type[BackendRejected] = ConstraintRefused
    refused: int = 0

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        if job.constraint is not None:
            self.refused += 1
            raise self.refusal("no")
        async for chunk in super().complete(job):
            yield chunk


async def test_a_backend_that_refuses_a_constraint_is_asked_without_it() -> None:
    outputs = [T + S + RAIN, '{"town":1}<|return|>', PARIS + "<|return|>"]
    backend = Refusing(ENCODING, [Step(output) for output in outputs], GUIDED, per_chunk=1)
    run = engine(backend).start(turn(form=CITY_FORM))
    events = [event for batch in await batches_of(run) for event in batch]
    check_lifecycle(events)
    assert items_of(events) == (R("Hm."), F(PARIS))
    assert backend.refused == 1
    assert run.report.unmet == ""


async def test_a_refusal_of_something_else_is_none_of_the_constraint() -> None:
    backend = Refusing(ENCODING, [Step(T + S + RAIN)], GUIDED, refusal=BackendRejected)
    with pytest.raises(BackendRejected):
        await batches_of(engine(backend).start(turn(form=CITY_FORM)))


async def test_a_turn_that_asks_for_nothing_is_one_generation_without_a_constraint() -> None:
    asked = await ask([T + S + RAIN], turn(conversation=WITHOUT_TOOLS), GUIDED)
    assert asked.constraints == [None]
    assert asked.report.journal == ENCODING.encode_as_server(T + S + RAIN)


async def test_calls_that_are_shown_while_they_come_are_not_generated_again() -> None:
    asked = await ask([WEATHER + "Paris<|call|>"], turn(hold_calls=False))
    assert asked.items == (C("get_weather", "Paris"),)


async def test_a_call_that_may_not_be_made_is_not_shown_while_it_comes() -> None:
    asked = await ask(
        [T + S + WEATHER + "{}<|call|>", "It rains.<|return|>"],
        turn(AllowedTools(frozenset({"add"})), hold_calls=False),
    )
    assert asked.items == (R("Hm."), F("It rains."))


LA = "la " * 4_500


@pytest.mark.parametrize("told", [IDS, TEXT], ids=["ids", "text"])
@pytest.mark.parametrize("per_chunk", [1, 7, 5000])
async def test_thoughts_that_repeat_themselves_are_ended(told: object, per_chunk: int) -> None:
    asked = await ask(
        ["<|channel|>analysis<|message|>" + LA, "It rains.<|return|>"],
        turn(),
        IDS if told is IDS else TEXT,
        per_chunk=per_chunk if told is IDS else max(per_chunk, 3),
    )
    thought, answer = asked.items
    assert answer == F("It rains.")
    assert isinstance(thought, R)
    assert len(thought.text) < len(LA)
    assert asked.behind[1] == "<|channel|>analysis<|message|>" + thought.text + "<|end|>" + S + FINAL
    assert "repetition" in asked.rules


async def test_an_answer_that_repeats_itself_is_broken_off() -> None:
    lengths = set()
    for per_chunk in (1, 7, 5000):
        asked = await ask([FINAL + LA], turn(), per_chunk=per_chunk)
        [answer] = asked.items
        assert asked.finished.reason is FinishReason.LENGTH
        assert asked.rules == ("repetition",)
        assert isinstance(answer, F)
        assert len(answer.text) < len(LA)
        lengths.add(len(answer.text))
    assert len(lengths) == 1


async def test_repetition_may_be_left_alone() -> None:
    asked = await ask([FINAL + LA + "<|return|>"], turn(disabled_rules=frozenset({"repetition"})))
    assert asked.items == (F(LA),)


async def test_a_forced_call_of_a_hosted_tool_is_run_and_the_rest_is_the_models_choice() -> None:
    said = [RAIN, '{"q":"one"}<|call|>', ANSWER]
    talk = Hosted(said, turn=replace(Hosted([]).turn, choice=ForcedCalls(hosted=frozenset({("docs", "search")}))))
    events, report = await talk.events()
    assert calls_of(events) == [("docs", "search", "search of one")]
    assert [event.text for event in events if isinstance(event, Closed) and isinstance(event.item, Text)] == [
        "It is so."
    ]
    assert report.unmet == ""


async def test_any_tool_of_a_server_will_do_where_the_server_is_named() -> None:
    said = [RAIN, ".docs__fetch<|message|>", '{"q":"one"}<|call|>', ANSWER]
    talk = Hosted(said, turn=replace(Hosted([]).turn, choice=ForcedCalls(hosted=frozenset({("docs", None)}))))
    events, _ = await talk.events()
    assert calls_of(events) == [("docs", "fetch", "fetch of one")]


async def test_the_form_is_asked_for_behind_results_too() -> None:
    said = [call("docs__search", '{"q":"one"}'), FINAL + PARIS + "<|return|>"]
    talk = Hosted(said, told=GUIDED, turn=replace(Hosted([]).turn, form=CITY_FORM))
    backend = talk.backend()
    batches, report = await talk.batches(backends=[backend])
    assert texts_of([event for batch in batches for event in batch]) == [PARIS]
    assert report.unmet == ""
    assert [job.constraint for job in backend.jobs] == [None, None, JsonSchema(CITY)]


async def test_an_answer_that_is_opened_when_tools_have_ended_has_the_form_too() -> None:
    calls = [call("docs__nothing", "{}")] * 3
    talk = Hosted([*calls, PARIS + "<|return|>"], told=GUIDED, turn=replace(Hosted([]).turn, form=CITY_FORM))
    events, report = await talk.events()
    assert texts_of(events) == [PARIS]
    assert "tools-ended" in report.recoveries
    assert talk.bases[-1].constraint == JsonSchema(CITY)


async def test_one_call_is_enough_where_one_is_asked_for() -> None:
    one = WEATHER + PARIS + "<|end|>"
    asked = await ask([one + S + one + S + RAIN], turn(NAMED, parallel_calls=False))
    assert asked.items == (C("get_weather", PARIS), F("It rains."))


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
async def test_the_model_is_told_the_form_at_the_end_of_its_instructions(form: AnswerForm, section: str) -> None:
    conversation = replace(ASKED, preamble=replace(ASKED.preamble, instructions="Be brief."))
    asked = await ask(
        [RAIN], turn(conversation=conversation, form=form, disabled_rules=frozenset({"regenerated-answer"}))
    )
    prompt = ENCODING.decode(asked.jobs[0].prompt.tokens)
    assert f"// namespace functions\n\n{section}<|end|>" in prompt
    assert await engine(Scripted(ENCODING, [])).count(turn(conversation=conversation, form=form)) == len(
        asked.jobs[0].prompt.tokens
    )


async def test_a_form_without_tools_or_instructions_is_told_too() -> None:
    asked = await ask([FINAL + PARIS + "<|return|>"], turn(conversation=WITHOUT_TOOLS, form=CITY_FORM))
    prompt = ENCODING.decode(asked.jobs[0].prompt.tokens)
    assert "<|start|>developer<|message|># Response Formats\n\n## city\n\n{" in prompt
