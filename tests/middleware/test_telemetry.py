"""Observation of generations: what can change their tokens, and observers that fail."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from unisono.core.conversation import AnswerForm, Conversation, FunctionTool, Phase, Preamble
from unisono.core.events import Delta, Event, Finished, Text
from unisono.core.generation import FinishReason, Sampling, Usage
from unisono.core.observer import GenerationDone, GenerationStarted, Observer, TokenInfluences
from unisono.engine.request import AnswerOptions, ForcedCalls, GenerationReport, GenerationRequest, RawPrompt
from unisono.middleware.telemetry import GenerationObservation, influences_on

REQUEST = GenerationRequest("gpt-oss", Conversation(Preamble()))
NO_INFLUENCES = TokenInfluences(Sampling(), False, False, False, False, False)


def test_the_options_that_can_change_tokens_are_reported() -> None:
    assert influences_on(REQUEST) == NO_INFLUENCES
    sampling, choice = Sampling(temperature=0.5, presence_penalty=0.5), ForcedCalls(frozenset({"f"}))
    answer = AnswerOptions(sampling=sampling, choice=choice, form=AnswerForm(), reasoning_budget=0)
    tools = (FunctionTool("f"), FunctionTool("g", strict=True))
    conversation = Conversation(Preamble(tools=tools))
    request = replace(REQUEST, conversation=conversation, answer=answer, raw=RawPrompt("text"))
    assert influences_on(request) == TokenInfluences(sampling, True, True, True, True, True)
    assert influences_on(replace(REQUEST, conversation=Conversation(Preamble(tools=tools[:1])))) == NO_INFLUENCES


def test_influences_are_reported_only_with_recorded_prompts() -> None:
    started = []
    for model in ("gpt-oss", "other"):
        collecting = Collecting()
        gate = GenerationObservation([collecting], with_prompts={model})(REQUEST)
        gate.report = GenerationReport()
        gate.start()
        started += collecting.seen
    assert [began.influences for began in started if isinstance(began, GenerationStarted)] == [NO_INFLUENCES, None]


class Failing(Observer):
    def generation_started(self, began: GenerationStarted) -> None:
        raise RuntimeError("at the start")

    def ended(self, done: GenerationDone) -> None:
        raise RuntimeError("at the end")


class Collecting(Observer):
    def __init__(self) -> None:
        self.seen: list[GenerationStarted | GenerationDone] = []

    def generation_started(self, began: GenerationStarted) -> None:
        self.seen.append(began)

    def ended(self, done: GenerationDone) -> None:
        self.seen.append(done)


def test_an_observer_that_fails_is_logged_and_the_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    collecting = Collecting()
    gate = GenerationObservation([Failing(), collecting])(REQUEST)
    gate.report = GenerationReport()
    batch: list[Event] = [Finished(FinishReason.STOP, Usage(3, 9))]
    with caplog.at_level(logging.ERROR):
        gate.start()
        gate.observe(batch)
        gate.end(None)
    started, done = collecting.seen
    assert isinstance(done, GenerationDone)
    assert done.start is started
    assert (done.usage, done.finish) == (Usage(3, 9), "stop")
    assert [record.message for record in caplog.records] == ["an observer failed"] * 2


def test_the_first_delta_gives_the_time_of_the_first_event() -> None:
    collecting, item = Collecting(), Text(0, Phase.FINAL)
    gate = GenerationObservation([collecting])(REQUEST)
    gate.report = GenerationReport()
    gate.start()
    gate.observe([Delta(item, "a")])
    gate.report.began -= 100
    gate.observe([Delta(item, "b")])
    gate.observe([Delta(item, "c"), Finished(FinishReason.STOP, Usage(3, 9))])
    gate.end(None)
    done = collecting.seen[1]
    assert isinstance(done, GenerationDone)
    assert done.first_s is not None
    assert done.first_s < 50 < done.ended_s
    assert (done.usage, done.finish) == (Usage(3, 9), "stop")
