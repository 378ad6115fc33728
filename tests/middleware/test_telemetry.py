"""Observation of generations: who decides on their tokens, and observers that fail."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import Any

import pytest

from unisono.core.conversation import AnswerForm, Conversation, FunctionTool, Phase, Preamble
from unisono.core.events import Delta, Event, Finished, Text
from unisono.core.generation import FinishReason, Sampling, Usage
from unisono.core.observer import GenerationDone, GenerationStarted, Observer
from unisono.engine.request import AnswerOptions, GenerationReport, GenerationRequest
from unisono.middleware.telemetry import GenerationObservation, is_free

REQUEST = GenerationRequest("gpt-oss", Conversation(Preamble()))
# Sampling options with which the model alone decides on the tokens, and others.
FREE_OPTIONS: dict[str, Any] = {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 1}
OTHER_OPTIONS: dict[str, Any] = {
    "temperature": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {5: 1.0},
}


def sampled(**values: Any) -> GenerationRequest:
    return replace(REQUEST, answer=AnswerOptions(sampling=Sampling(**values)))


def test_the_model_alone_decides_without_constraints_and_penalties() -> None:
    assert {*FREE_OPTIONS, *OTHER_OPTIONS} == {field.name for field in fields(Sampling)}
    assert is_free(REQUEST)
    assert is_free(sampled(**FREE_OPTIONS))
    for name, value in OTHER_OPTIONS.items():
        assert not is_free(sampled(**{name: value})), name


def test_the_model_does_not_decide_alone_on_a_form_or_a_strict_call() -> None:
    lax, strict = FunctionTool("f"), FunctionTool("g", strict=True)
    assert is_free(replace(REQUEST, conversation=Conversation(Preamble(tools=(lax,)))))
    assert not is_free(replace(REQUEST, conversation=Conversation(Preamble(tools=(lax, strict)))))
    assert not is_free(replace(REQUEST, answer=AnswerOptions(form=AnswerForm())))
    assert not is_free(replace(REQUEST, answer=AnswerOptions(reasoning_budget=5)))


def test_is_free_is_determined_only_with_recorded_prompts() -> None:
    started = []
    for model in ("gpt-oss", "other"):
        collecting = Collecting()
        gate = GenerationObservation([collecting], with_prompts={model})(REQUEST)
        gate.report = GenerationReport()
        gate.start()
        started += collecting.seen
    assert [began.is_free for began in started if isinstance(began, GenerationStarted)] == [True, False]


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
