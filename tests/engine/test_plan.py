"""The step plan on scripted backends: what is cut, what is put there, and what the backend is asked for behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from tests.engine.planning import (
    ADD,
    ANY,
    ASKED,
    BACKENDS,
    CITY,
    CITY_FORM,
    FINAL,
    GUIDED,
    NAMED,
    NAMING,
    NOW,
    PARIS,
    PREAMBLE,
    SUM,
    TOOLS,
    WEATHER,
    WITHOUT_TOOLS,
    S,
    T,
    ask,
    turn,
)
from tests.engine.scripted import IDS, Step
from tests.harmony.recoveries import C, F, P, R
from unisono.core.conversation import AnswerForm, Preamble
from unisono.core.generation import AnyJson, Capabilities, Constraint, FinishReason, JsonSchema, OneOf
from unisono.core.recovery_rules import TOOL_NOT_ALLOWED
from unisono.engine.interventions.requirements import NO_ARGUMENTS, UNMET_ARGUMENTS, UNMET_CALL, UNMET_FORM, UNMET_NONE
from unisono.engine.request import AllowedTools, ForcedCalls, GenerationRequest

HM = R("Hm.")
ANSWERED = FINAL + "It rains.<|return|>"
RAIN = S + ANSWERED
CALLED = C("get_weather", PARIS)


@dataclass(frozen=True)
class Case:
    turn: GenerationRequest
    outputs: Sequence[str | Step]
    items: Sequence[R | P | F | C]
    behind: Sequence[str]
    """What each further prompt has behind the first one's."""
    constraints: Sequence[Constraint | None] = ()
    """Of each further step, on a backend that can."""
    rules: Sequence[str] = ()
    unmet: str = ""
    told: Sequence[Capabilities] = tuple(BACKENDS.values())


FREE = [told for told in BACKENDS.values() if not told.constrain]
ABLE = [told for told in BACKENDS.values() if told.constrain]

FORCED: dict[str, Case] = {
    "a tool is named, and the model answers": Case(
        turn(NAMED), [T + RAIN, PARIS + "<|call|>"], (HM, CALLED), [T + S + WEATHER], [JsonSchema(CITY)]
    ),
    "a tool is named, and the model answers at once": Case(
        turn(NAMED), [FINAL + "It rains.<|return|>", PARIS + "<|call|>"], (CALLED,), [WEATHER], [JsonSchema(CITY)]
    ),
    "a tool is named, and the model only thinks": Case(
        turn(NAMED),
        ["<|channel|>analysis<|message|>Hm.<|return|>", PARIS + "<|return|>"],
        (HM, CALLED),
        [T + S + WEATHER],
        [JsonSchema(CITY)],
    ),
    "a tool is named, and the model calls another one": Case(
        turn(NAMED), [T + S + ADD + '{"a":1}<|call|>', PARIS + "<|call|>"], (HM, CALLED), [T + S + WEATHER]
    ),
    "a tool is named, and the model begins with a preamble": Case(
        turn(NAMED), [T + S + PREAMBLE + "<|end|>" + RAIN, PARIS + "<|call|>"], (HM, CALLED), [T + S + WEATHER]
    ),
    "a tool is named, and the model calls it in its own words": Case(
        turn(NAMED),
        [T + S + " to=functions.get_weather<|channel|>commentary json<|message|>" + PARIS + "<|call|>"],
        (HM, CALLED),
        [],
        told=FREE,
    ),
    "a tool is named, and the header that the model gave it is kept": Case(
        turn(NAMED),
        [T + S + " to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|>", PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S + " to=functions.get_weather<|channel|>commentary json<|message|>"],
        [JsonSchema(CITY)],
        told=ABLE,
    ),
    "a tool is named, and what the model thinks has no end": Case(
        turn(NAMED),
        ["<|channel|>analysis<|message|>Hm.<|start|>assistant" + FINAL + "It rains.<|return|>", PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S + WEATHER],
        rules=("missing-end",),
    ),
    "a tool without arguments": Case(
        turn(ForcedCalls(frozenset({"now"}))),
        [ANSWERED, "{}<|call|>"],
        (C("now", "{}"),),
        [NOW],
        [JsonSchema(NO_ARGUMENTS)],
    ),
    "there is one tool": Case(
        turn(ANY, replace(ASKED, preamble=Preamble(tools=TOOLS[:1], date="2026-01-01"))),
        [T + RAIN, PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S + WEATHER],
    ),
    "one of several, whose name says itself early": Case(
        turn(ANY),
        [T + RAIN, ".get_weather", PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S + NAMING, T + S + WEATHER],
        [OneOf((".get_weather", ".add", ".now")), JsonSchema(CITY)],
    ),
    "one of several, with all that stands behind a name": Case(
        turn(ANY),
        [T + RAIN, ".add <|constrain|>json<|message|>{}<|call|>", '{"a":1}<|call|>'],
        (HM, C("add", '{"a":1}')),
        [T + S + NAMING, T + S + ADD],
        [OneOf((".get_weather", ".add", ".now")), JsonSchema(SUM)],
    ),
    "one of two": Case(
        turn(ForcedCalls(frozenset({"add", "now"}))),
        [T + RAIN, ".now", "{}<|call|>"],
        (HM, C("now", "{}")),
        [T + S + NAMING, T + S + NOW],
        [OneOf((".add", ".now")), JsonSchema(NO_ARGUMENTS)],
    ),
    "one of several, and no tool is called what the model says": Case(
        turn(ANY),
        [ANSWERED, ".subtract <|message|>", ".add", '{"a":1}<|call|>'],
        (C("add", '{"a":1}'),),
        [NAMING, NAMING, ADD],
    ),
    "one of several, and the model never says which": Case(
        turn(ANY),
        [T + RAIN, ".x <|message|>", "<|return|>", "?", FINAL + "It rains.<|return|>"],
        (HM, F("It rains.")),
        [T + S + NAMING] * 3 + [T + S],
        unmet=UNMET_CALL,
    ),
    "one of several, and the model calls one": Case(
        turn(ANY), [T + S + ADD + '{"a":1}<|call|>'], (HM, C("add", '{"a":1}')), [], told=FREE
    ),
    "arguments that do not match are generated again": Case(
        turn(NAMED),
        [ANSWERED, '{"town":"Paris"}<|call|>', '{"city":', PARIS + "<|call|>"],
        (CALLED,),
        [WEATHER] * 3,
        rules=("regenerated-call", "unfinished-call"),
        told=[IDS],
    ),
    "arguments that never match are handed over": Case(
        turn(NAMED),
        [ANSWERED, *['{"town":"Paris"}<|call|>'] * 3],
        (C("get_weather", '{"town":"Paris"}'),),
        [WEATHER] * 3,
        rules=("regenerated-call",),
        unmet=UNMET_ARGUMENTS,
    ),
    "none of the tools is there": Case(
        turn(ForcedCalls(frozenset({"other"}))), [T + RAIN], (HM, F("It rains.")), [], unmet=UNMET_NONE
    ),
    "no call is allowed": Case(turn(NAMED, calls_allowed=False), [T + RAIN], (HM, F("It rains.")), []),
}

OTHERS: dict[str, Case] = {
    "a strict tool is called": Case(
        turn(conversation=replace(ASKED, preamble=Preamble(tools=(replace(TOOLS[0], strict=True),)))),
        [T + S + WEATHER + "{}<|call|>", PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S + WEATHER],
        [JsonSchema(CITY)],
        told=ABLE,
    ),
    "a strict tool is called with other arguments": Case(
        turn(conversation=replace(ASKED, preamble=Preamble(tools=(replace(TOOLS[0], strict=True),)))),
        [T + S + WEATHER + "{}<|call|>", PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S + WEATHER],
        rules=("regenerated-call",),
        told=FREE,
    ),
    "a call whose arguments are no JSON": Case(
        turn(),
        [T + S + WEATHER + '{"city":"Paris"}]<|call|>', S.removeprefix(S) + WEATHER + PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S],
        rules=("regenerated-call",),
        told=FREE,
    ),
    "a call whose arguments are no JSON, on a backend that can be held to it": Case(
        turn(),
        [T + S + WEATHER + '{"city":"Paris"}]<|call|>', PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S + WEATHER],
        [JsonSchema(CITY)],
        rules=("regenerated-call",),
        told=ABLE,
    ),
    "a call whose arguments are never JSON": Case(
        turn(),
        [WEATHER + "Paris<|call|>"] * 3,
        (C("get_weather", "Paris"),),
        [""] * 2,
        rules=("regenerated-call",),
        told=FREE,
    ),
    "broken calls are left alone": Case(
        turn(disabled_rules=frozenset({"regenerated-call"})),
        [WEATHER + "Paris<|call|>"],
        (C("get_weather", "Paris"),),
        [],
    ),
    "a call that does not match a schema that is not strict": Case(
        turn(), [WEATHER + "{}<|call|>"], (C("get_weather", "{}"),), []
    ),
    "a tool that may be called": Case(
        turn(AllowedTools(frozenset({"get_weather"}))),
        [T + S + WEATHER + "{}<|call|>"],
        (HM, C("get_weather", "{}")),
        [],
    ),
    "a tool that may not be called": Case(
        turn(AllowedTools(frozenset({"add"}))),
        [T + S + WEATHER + "{}<|call|>", FINAL + "It rains.<|return|>"],
        (HM, F("It rains.")),
        [
            T + S + WEATHER + "{}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"
            "This tool is not available now. Use another one, or answer without.<|end|><|start|>assistant"
        ],
        rules=(TOOL_NOT_ALLOWED,),
    ),
    "a tool that may not be called, and is called again": Case(
        turn(AllowedTools(frozenset({"add"}))),
        [WEATHER + "{}<|call|>", WEATHER + "{}<|call|>", "It rains.<|return|>"],
        (F("It rains."),),
        [
            refused := WEATHER + "{}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"
            "This tool is not available now. Use another one, or answer without.<|end|><|start|>assistant",
            refused + FINAL,
        ],
        rules=(TOOL_NOT_ALLOWED,),
    ),
}

FORMED: dict[str, Case] = {
    "an answer of the form": Case(
        turn(form=CITY_FORM),
        [T + S + FINAL + PARIS + "<|return|>"],
        (HM, F(PARIS)),
        [],
        told=FREE,
    ),
    "an answer that the backend is held to": Case(
        turn(form=CITY_FORM),
        [T + S + FINAL + "It rains.<|return|>", PARIS + "<|return|>"],
        (HM, F(PARIS)),
        [T + S + FINAL],
        [JsonSchema(CITY)],
        told=ABLE,
    ),
    "any object": Case(
        turn(form=AnswerForm()),
        [T + S + FINAL + "{<|return|>", "{}<|return|>"],
        (HM, F("{}")),
        [T + S + FINAL],
        [AnyJson()],
        told=ABLE,
    ),
    "only thoughts": Case(
        turn(form=CITY_FORM), [T, PARIS + "<|return|>"], (HM, F(PARIS)), [T + S + FINAL], [JsonSchema(CITY)]
    ),
    "a preamble instead of an answer": Case(
        turn(form=CITY_FORM),
        [T + S + PREAMBLE + "<|return|>", PARIS + "<|return|>"],
        (HM, P("I look."), F(PARIS)),
        [T + S + PREAMBLE + "<|end|>" + S + FINAL],
        [JsonSchema(CITY)],
    ),
    "a call instead of an answer": Case(turn(form=CITY_FORM), [WEATHER + "{}<|call|>"], (C("get_weather", "{}"),), []),
    "an answer that is no JSON": Case(
        turn(form=CITY_FORM),
        [T + S + FINAL + "It rains.<|return|>", '{"town":"Paris"}<|return|>', PARIS + "<|return|>"],
        (HM, F(PARIS)),
        [T + S + FINAL] * 2,
        rules=("regenerated-answer",),
        told=FREE,
    ),
    "an answer that is never JSON": Case(
        turn(form=CITY_FORM),
        [T + S + FINAL + "It rains.<|return|>", *["It snows.<|return|>"] * 2],
        (HM, F("It rains.")),
        [T + S + FINAL] * 2,
        rules=("regenerated-answer",),
        unmet=UNMET_FORM,
        told=FREE,
    ),
    "blanks in the middle of an answer": Case(
        turn(form=CITY_FORM),
        [T + S + FINAL + '{"city": ' + " \n" * 99, '"Paris"}<|return|>'],
        (HM, F(PARIS)),
        [T + S + FINAL + '{"city":'],
        rules=("repetition",),
        told=FREE,
    ),
    "blanks in an answer that the backend is held to": Case(
        turn(form=CITY_FORM),
        [T + RAIN, '{"city": ' + " \n" * 99, '"Paris"}<|return|>'],
        (HM, F(PARIS)),
        [T + S + FINAL, T + S + FINAL + '{"city":'],
        rules=("repetition",),
        told=ABLE,
    ),
    "blanks behind an answer": Case(
        turn(form=CITY_FORM),
        [T + S + FINAL + PARIS + " \n" * 99],
        (HM, F(PARIS)),
        [],
        rules=("repetition",),
        told=FREE,
    ),
    "a fence around the answer": Case(
        turn(form=CITY_FORM),
        [FINAL + f"```json\n{PARIS}\n```<|return|>"],
        (F(PARIS),),
        [],
        rules=("code-fence",),
        told=FREE,
    ),
    "a fence around something else": Case(
        turn(form=CITY_FORM, disabled_rules=frozenset({"regenerated-answer"})),
        [FINAL + "```json\n{}\n```<|return|>"],
        (F("```json\n{}\n```"),),
        [],
        unmet=UNMET_FORM,
        told=FREE,
    ),
    "a form, and a tool that has to be called first": Case(
        turn(NAMED, form=CITY_FORM), [ANSWERED, PARIS + "<|call|>"], (CALLED,), [WEATHER], [JsonSchema(CITY)]
    ),
}

THOUGHTS = "<|channel|>analysis<|message|>one two three four five six"
BUDGETED: dict[str, Case] = {
    "without tools the answer is opened": Case(
        turn(conversation=WITHOUT_TOOLS, reasoning_budget=3),
        [THOUGHTS, "It rains.<|return|>"],
        (R("one two three"), F("It rains.")),
        ["<|channel|>analysis<|message|>one two three<|end|>" + S + FINAL],
        rules=("reasoning-budget",),
    ),
    "with tools the model chooses": Case(
        turn(reasoning_budget=3),
        [THOUGHTS, WEATHER + PARIS + "<|call|>"],
        (R("one two three"), CALLED),
        ["<|channel|>analysis<|message|>one two three<|end|>" + S],
        rules=("reasoning-budget",),
    ),
    "a model that goes on thinking is made to answer": Case(
        turn(reasoning_budget=3),
        [THOUGHTS, THOUGHTS, THOUGHTS, "It rains.<|return|>"],
        (R("one two three"), F("It rains.")),
        [
            "<|channel|>analysis<|message|>one two three<|end|>" + S,
            "<|channel|>analysis<|message|>one two three<|end|>" + S + "<|channel|>analysis<|message|><|end|>" + S,
            "<|channel|>analysis<|message|>one two three<|end|>"
            + S
            + "<|channel|>analysis<|message|><|end|>"
            + S
            + FINAL,
        ],
        rules=("reasoning-budget",),
    ),
    "a tool that has to be called is called": Case(
        turn(NAMED, reasoning_budget=3),
        [THOUGHTS, PARIS + "<|call|>"],
        (R("one two three"), CALLED),
        ["<|channel|>analysis<|message|>one two three<|end|>" + S + WEATHER],
        [JsonSchema(CITY)],
        rules=("reasoning-budget",),
    ),
    "an answer of a form is opened": Case(
        turn(conversation=WITHOUT_TOOLS, reasoning_budget=3, form=CITY_FORM),
        [THOUGHTS, PARIS + "<|return|>"],
        (R("one two three"), F(PARIS)),
        ["<|channel|>analysis<|message|>one two three<|end|>" + S + FINAL],
        [JsonSchema(CITY)],
        rules=("reasoning-budget",),
    ),
    "none at all": Case(
        turn(conversation=WITHOUT_TOOLS, reasoning_budget=0),
        [THOUGHTS, "It rains.<|return|>"],
        (F("It rains."),),
        [FINAL],
        rules=("reasoning-budget",),
    ),
    "thoughts as long as the budget": Case(turn(reasoning_budget=2), [T + RAIN], (HM, F("It rains.")), []),
    "thoughts as long as the budget, then more": Case(
        turn(conversation=WITHOUT_TOOLS, reasoning_budget=2),
        [T + S + THOUGHTS, "It rains.<|return|>"],
        (HM, F("It rains.")),
        [T + S + FINAL],
        rules=("reasoning-budget",),
    ),
    "thoughts within the budget": Case(turn(reasoning_budget=50), [T + RAIN], (HM, F("It rains.")), []),
}

# What a backend gives as text is counted as the network cut it.
CASES = FORCED | OTHERS | FORMED | {name: replace(case, told=(IDS, GUIDED)) for name, case in BUDGETED.items()}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("told", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("per_chunk", [1, 4, 1000])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_the_answer_is_what_was_asked_for(case: Case, per_chunk: int, told: Capabilities) -> None:
    if told not in case.told:
        return
    asked = await ask(case.outputs, case.turn, told, per_chunk=per_chunk)
    assert asked.items == tuple(case.items)
    assert asked.behind[1:] == list(case.behind)
    if case.constraints:
        assert asked.constraints[1:] == [each if told.constrain else None for each in case.constraints]
    else:
        assert told.constrain or not any(asked.constraints)
    expected = tuple(rule for rule in case.rules)
    assert tuple(rule for rule in asked.rules if rule != "restored-stop") == expected
    assert asked.report.unmet == case.unmet
    assert asked.finished.reason is FinishReason.STOP
