"""Interventions on scripted backends: tokens, prompts of further steps, and constraints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.engine.planning import (
    ADD,
    ANY,
    BACKENDS,
    CITY,
    CITY_FORM,
    CONVERSATION,
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
COMMENTARY = "<|channel|>commentary<|message|>"
OSLO = '{"city":"Oslo"}'


@dataclass(frozen=True)
class Case:
    turn: GenerationRequest
    outputs: Sequence[str | Step]
    items: Sequence[R | P | F | C]
    # Text that each further prompt adds to the first one.
    suffixes: Sequence[str]
    # Constraint of each further step, on a backend that enforces constraints.
    constraints: Sequence[Constraint | None] = ()
    rules: Sequence[str] = ()
    unmet: str = ""
    # Capabilities of the backends that the case applies to.
    told: Sequence[Capabilities] = tuple(BACKENDS.values())


UNCONSTRAINED = [each for each in BACKENDS.values() if not each.constrain]
CONSTRAINED = [each for each in BACKENDS.values() if each.constrain]

FORCED: dict[str, Case] = {
    "named tool, reasoning and answer": Case(
        turn(NAMED), [T + RAIN, PARIS + "<|call|>"], (HM, CALLED), [T + S + WEATHER], [JsonSchema(CITY)]
    ),
    "named tool, answer without reasoning": Case(
        turn(NAMED), [FINAL + "It rains.<|return|>", PARIS + "<|call|>"], (CALLED,), [WEATHER], [JsonSchema(CITY)]
    ),
    "named tool, only reasoning": Case(
        turn(NAMED),
        ["<|channel|>analysis<|message|>Hm.<|return|>", PARIS + "<|return|>"],
        (HM, CALLED),
        [T + S + WEATHER],
        [JsonSchema(CITY)],
    ),
    "named tool, call of another tool": Case(
        turn(NAMED), [T + S + ADD + '{"a":1}<|call|>', PARIS + "<|call|>"], (HM, CALLED), [T + S + WEATHER]
    ),
    "named tool, preamble and answer": Case(
        turn(NAMED), [T + S + PREAMBLE + "<|end|>" + RAIN, PARIS + "<|call|>"], (HM, CALLED), [T + S + WEATHER]
    ),
    "named tool, called with a header of the model": Case(
        turn(NAMED),
        [T + S + " to=functions.get_weather<|channel|>commentary json<|message|>" + PARIS + "<|call|>"],
        (HM, CALLED),
        [],
        told=UNCONSTRAINED,
    ),
    "named tool, header of the model kept": Case(
        turn(NAMED),
        [T + S + " to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|>", PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S + " to=functions.get_weather<|channel|>commentary json<|message|>"],
        [JsonSchema(CITY)],
        told=CONSTRAINED,
    ),
    "named tool, reasoning without an end": Case(
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
    "any tool, only one declared": Case(
        turn(ANY, replace(CONVERSATION, preamble=Preamble(tools=TOOLS[:1], date="2026-01-01"))),
        [T + RAIN, PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S + WEATHER],
    ),
    "any tool, unambiguous beginning of a name": Case(
        turn(ANY),
        [T + RAIN, ".get_weather", PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S + NAMING, T + S + WEATHER],
        [OneOf((".get_weather", ".add", ".now")), JsonSchema(CITY)],
    ),
    "any tool, name with the rest of the header": Case(
        turn(ANY),
        [T + RAIN, ".add <|constrain|>json<|message|>{}<|call|>", '{"a":1}<|call|>'],
        (HM, C("add", '{"a":1}')),
        [T + S + NAMING, T + S + ADD],
        [OneOf((".get_weather", ".add", ".now")), JsonSchema(SUM)],
    ),
    "one of two tools": Case(
        turn(ForcedCalls(frozenset({"add", "now"}))),
        [T + RAIN, ".now", "{}<|call|>"],
        (HM, C("now", "{}")),
        [T + S + NAMING, T + S + NOW],
        [OneOf((".add", ".now")), JsonSchema(NO_ARGUMENTS)],
    ),
    "any tool, unknown name first": Case(
        turn(ANY),
        [ANSWERED, ".subtract <|message|>", ".add", '{"a":1}<|call|>'],
        (C("add", '{"a":1}'),),
        [NAMING, NAMING, ADD],
    ),
    "any tool, never named": Case(
        turn(ANY),
        [T + RAIN, ".x <|message|>", "<|return|>", "?", FINAL + "It rains.<|return|>"],
        (HM, F("It rains.")),
        [T + S + NAMING] * 3 + [T + S],
        unmet=UNMET_CALL,
    ),
    "any tool, called by the model": Case(
        turn(ANY), [T + S + ADD + '{"a":1}<|call|>'], (HM, C("add", '{"a":1}')), [], told=UNCONSTRAINED
    ),
    "invalid arguments, regenerated": Case(
        turn(NAMED),
        [ANSWERED, '{"town":"Paris"}<|call|>', '{"city":', PARIS + "<|call|>"],
        (CALLED,),
        [WEATHER] * 3,
        rules=("regenerated-call", "unfinished-call"),
        told=[IDS],
    ),
    "invalid arguments after all retries": Case(
        turn(NAMED),
        [ANSWERED, *['{"town":"Paris"}<|call|>'] * 3],
        (C("get_weather", '{"town":"Paris"}'),),
        [WEATHER] * 3,
        rules=("regenerated-call",),
        unmet=UNMET_ARGUMENTS,
    ),
    "named tool not declared": Case(
        turn(ForcedCalls(frozenset({"other"}))), [T + RAIN], (HM, F("It rains.")), [], unmet=UNMET_NONE
    ),
    "calls not allowed": Case(turn(NAMED, calls_allowed=False), [T + RAIN], (HM, F("It rains.")), []),
}

CALLS: dict[str, Case] = {
    "strict tool, constrained retry": Case(
        turn(conversation=replace(CONVERSATION, preamble=Preamble(tools=(replace(TOOLS[0], strict=True),)))),
        [T + S + WEATHER + "{}<|call|>", PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S + WEATHER],
        [JsonSchema(CITY)],
        told=CONSTRAINED,
    ),
    "strict tool, unconstrained retry": Case(
        turn(conversation=replace(CONVERSATION, preamble=Preamble(tools=(replace(TOOLS[0], strict=True),)))),
        [T + S + WEATHER + "{}<|call|>", PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S + WEATHER],
        rules=("regenerated-call",),
        told=UNCONSTRAINED,
    ),
    "arguments not JSON, unconstrained retry": Case(
        turn(),
        [T + S + WEATHER + '{"city":"Paris"}]<|call|>', S.removeprefix(S) + WEATHER + PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S],
        rules=("regenerated-call",),
        told=UNCONSTRAINED,
    ),
    "arguments not JSON, constrained retry": Case(
        turn(),
        [T + S + WEATHER + '{"city":"Paris"}]<|call|>', PARIS + "<|call|>"],
        (HM, CALLED),
        [T + S + WEATHER],
        [JsonSchema(CITY)],
        rules=("regenerated-call",),
        told=CONSTRAINED,
    ),
    "arguments not JSON after all retries": Case(
        turn(),
        [WEATHER + "Paris<|call|>"] * 3,
        (C("get_weather", "Paris"),),
        [""] * 2,
        rules=("regenerated-call",),
        told=UNCONSTRAINED,
    ),
    "arguments not JSON, of the content type code": Case(
        turn(),
        ["<|channel|>analysis to=functions.get_weather code<|message|>Paris<|call|>", WEATHER + PARIS + "<|call|>"],
        (CALLED,),
        [""],
        rules=("regenerated-call",),
        told=UNCONSTRAINED,
    ),
    "regeneration of calls switched off": Case(
        turn(disabled_rules=frozenset({"regenerated-call"})),
        [WEATHER + "Paris<|call|>"],
        (C("get_weather", "Paris"),),
        [],
    ),
    "schema mismatch of a tool that is not strict": Case(
        turn(), [WEATHER + "{}<|call|>"], (C("get_weather", "{}"),), []
    ),
    "allowed tool": Case(
        turn(AllowedTools(frozenset({"get_weather"}))),
        [T + S + WEATHER + "{}<|call|>"],
        (HM, C("get_weather", "{}")),
        [],
    ),
    "tool not allowed": Case(
        turn(AllowedTools(frozenset({"add"}))),
        [T + S + WEATHER + "{}<|call|>", FINAL + "It rains.<|return|>"],
        (HM, F("It rains.")),
        [
            T + S + WEATHER + "{}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"
            "This tool is not available now. Use another one, or answer without.<|end|><|start|>assistant"
        ],
        rules=(TOOL_NOT_ALLOWED,),
    ),
    "tool not allowed, called twice": Case(
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
    "tool not allowed, called again after the answer": Case(
        turn(AllowedTools(frozenset({"add"}))),
        [*[WEATHER + "{}<|call|>"] * 2, "It rains.<|end|>" + S + WEATHER + "{}<|call|>"],
        (F("It rains."), F("get_weather({})")),
        [refused, refused + FINAL],
        rules=(TOOL_NOT_ALLOWED,),
    ),
    "tool not allowed, with the beginning of the answer": Case(
        turn(AllowedTools(frozenset({"add"})), replace(CONVERSATION, prefill="It")),
        [" rains in Oslo, and the sun shines in Rome.<|end|>" + S + WEATHER + "{}<|call|>", FINAL + "Now.<|return|>"],
        (F(" rains in Oslo, and the sun shines in Rome."), F("Now.")),
        [" rains in Oslo, and the sun shines in Rome.<|end|>" + S + refused],
        rules=(TOOL_NOT_ALLOWED,),
    ),
    "other tool after the forced call, one of two allowed tools": Case(
        turn(ForcedCalls(frozenset({"now", "add"}), exclusive=True)),
        [NOW + "{}<|call|>" + S + WEATHER + PARIS + "<|call|>", FINAL + "It is late.<|return|>"],
        (C("now", "{}"), F("It is late.")),
        [NOW + "{}<|call|>" + S + refused.replace("{}", PARIS)],
        rules=(TOOL_NOT_ALLOWED,),
        told=UNCONSTRAINED,
    ),
    "other tool after the forced call, a single allowed tool": Case(
        turn(ForcedCalls(frozenset({"now"}), exclusive=True)),
        [ANSWERED, "{}<|call|>" + S + WEATHER + PARIS + "<|call|>", FINAL + "It is late.<|return|>"],
        (C("now", "{}"), F("It is late.")),
        [NOW, NOW + "{}<|call|>" + S + refused.replace("{}", PARIS)],
        [JsonSchema(NO_ARGUMENTS), None],
        rules=(TOOL_NOT_ALLOWED,),
        told=UNCONSTRAINED,
    ),
    "other tool after the forced call, no list of allowed tools": Case(
        turn(ForcedCalls(frozenset({"now"}))),
        [ANSWERED, "{}<|call|>" + S + WEATHER + PARIS + "<|call|>"],
        (C("now", "{}"), CALLED),
        [NOW],
    ),
    "other tool if no allowed tool is available": Case(
        turn(ForcedCalls(frozenset({"other"}), exclusive=True)),
        [WEATHER + "{}<|call|>", ANSWERED],
        (F("It rains."),),
        [refused],
        rules=(TOOL_NOT_ALLOWED,),
        unmet=UNMET_NONE,
    ),
    "named tool, other tool called after the beginning of the answer": Case(
        turn(NAMED, replace(CONVERSATION, prefill="It")),
        [" rains in Oslo, and the sun shines in Rome.<|end|>" + S + ADD + "{}<|call|>", WEATHER + PARIS + "<|call|>"],
        (F(" rains in Oslo, and the sun shines in Rome."), CALLED),
        [" rains in Oslo, and the sun shines in Rome.<|end|>" + S + refused.replace("get_weather", "add")],
        rules=(TOOL_NOT_ALLOWED,),
    ),
    "any tool, with the beginning of the answer": Case(
        turn(ANY, replace(CONVERSATION, prefill="It")),
        [" rains in Oslo, and the sun shines in Rome.<|end|>" + S + ADD + "{}<|call|>"],
        (F(" rains in Oslo, and the sun shines in Rome."), C("add", "{}")),
        [],
    ),
}

FORMED: dict[str, Case] = {
    "answer in the form": Case(
        turn(form=CITY_FORM),
        [T + S + FINAL + PARIS + "<|return|>"],
        (HM, F(PARIS)),
        [],
        told=UNCONSTRAINED,
    ),
    "form enforced by the backend": Case(
        turn(form=CITY_FORM),
        [T + S + FINAL + "It rains.<|return|>", PARIS + "<|return|>"],
        (HM, F(PARIS)),
        [T + S + FINAL],
        [JsonSchema(CITY)],
        told=CONSTRAINED,
    ),
    "any JSON object": Case(
        turn(form=AnswerForm()),
        [T + S + FINAL + "{<|return|>", "{}<|return|>"],
        (HM, F("{}")),
        [T + S + FINAL],
        [AnyJson()],
        told=CONSTRAINED,
    ),
    "only reasoning": Case(
        turn(form=CITY_FORM), [T, PARIS + "<|return|>"], (HM, F(PARIS)), [T + S + FINAL], [JsonSchema(CITY)]
    ),
    "preamble instead of an answer": Case(
        turn(form=replace(CITY_FORM, keeps_preambles=True)),
        [T + S + PREAMBLE + "<|return|>", PARIS + "<|return|>"],
        (HM, P("I look."), F(PARIS)),
        [T + S + PREAMBLE + "<|end|>" + S + FINAL],
        [JsonSchema(CITY)],
    ),
    "call instead of an answer": Case(turn(form=CITY_FORM), [WEATHER + "{}<|call|>"], (C("get_weather", "{}"),), []),
    "preamble before the answer, as text": Case(
        turn(form=replace(CITY_FORM, keeps_preambles=True)),
        [PREAMBLE + "<|end|>" + S + FINAL + PARIS + "<|return|>"],
        (P("I look."), F(PARIS)),
        [],
        told=UNCONSTRAINED,
    ),
    "preamble before the answer": Case(
        turn(form=CITY_FORM),
        [T + S + PREAMBLE + "<|end|>" + S + FINAL + PARIS + "<|return|>"],
        (HM, R("I look."), F(PARIS)),
        [],
        told=UNCONSTRAINED,
    ),
    "preamble before the answer, form enforced by the backend": Case(
        turn(form=CITY_FORM),
        [T + S + PREAMBLE + "<|end|>" + S + FINAL + "{}<|return|>", PARIS + "<|return|>"],
        (HM, R("I look."), F(PARIS)),
        [T + S + PREAMBLE + "<|end|>" + S + FINAL],
        [JsonSchema(CITY)],
        told=CONSTRAINED,
    ),
    "preamble instead of an answer, as reasoning": Case(
        turn(form=CITY_FORM),
        [PREAMBLE + "<|return|>", PARIS + "<|return|>"],
        (R("I look."), F(PARIS)),
        [PREAMBLE + "<|end|>" + S + FINAL],
        [JsonSchema(CITY)],
    ),
    "preamble before the answer, without tools": Case(
        turn(conversation=WITHOUT_TOOLS, form=CITY_FORM),
        [T + S + PREAMBLE + "<|end|>" + S + FINAL + PARIS + "<|return|>"],
        (HM, R("I look."), F(PARIS)),
        [],
        told=UNCONSTRAINED,
    ),
    "preamble with the form before the answer": Case(
        turn(conversation=WITHOUT_TOOLS, form=CITY_FORM),
        [COMMENTARY + OSLO + "<|end|>" + S + FINAL + PARIS + "<|return|>"],
        (R(OSLO), F(PARIS)),
        [],
        told=UNCONSTRAINED,
    ),
    "preamble with the form instead of an answer": Case(
        turn(form=CITY_FORM), [T + S + COMMENTARY + PARIS + "<|return|>"], (HM, R(PARIS), F(PARIS)), []
    ),
    "preamble with the form instead of an answer, as text": Case(
        turn(conversation=WITHOUT_TOOLS, form=replace(CITY_FORM, keeps_preambles=True)),
        [COMMENTARY + PARIS + "<|return|>"],
        (P(PARIS), F(PARIS)),
        [],
    ),
    "only preambles": Case(
        turn(form=CITY_FORM),
        [PREAMBLE + "<|return|>"] * 4,
        (*[R("I look.")] * 4, F("I look.")),
        [(PREAMBLE + "<|end|>" + S + FINAL) * count for count in (1, 2, 3)],
        rules=("missing-end", "regenerated-answer"),
        unmet=UNMET_FORM,
        told=UNCONSTRAINED,
    ),
    "no call and no answer until the gateway opens an answer": Case(
        turn(NAMED, form=CITY_FORM),
        [T] * 3 + [PARIS + "<|return|>"],
        (*[HM] * 3, F(PARIS)),
        [(T + S + WEATHER) * count for count in (1, 2)] + [(T + S + WEATHER) * 2 + T + S + FINAL],
        rules=("unfinished-call", "missing-end"),
        unmet=UNMET_CALL,
        told=UNCONSTRAINED,
    ),
    "preamble and call, with a form": Case(
        turn(form=CITY_FORM),
        [PREAMBLE + "<|end|>" + S + WEATHER + "{}<|call|>"],
        (R("I look."), C("get_weather", "{}")),
        [],
    ),
    "preamble without a form": Case(turn(), [PREAMBLE + "<|end|>" + RAIN], (P("I look."), F("It rains.")), []),
    "text after the answer": Case(
        turn(form=CITY_FORM),
        [FINAL + PARIS + "<|end|>" + RAIN],
        (F(PARIS), R("It rains.")),
        [],
        told=UNCONSTRAINED,
    ),
    "text after the answer, without tools": Case(
        turn(conversation=WITHOUT_TOOLS, form=CITY_FORM),
        [FINAL + PARIS + "<|end|>" + RAIN],
        (F(PARIS), R("It rains.")),
        [],
        told=UNCONSTRAINED,
    ),
    "answer not in the form, regenerated": Case(
        turn(form=CITY_FORM),
        [T + S + FINAL + "It rains.<|return|>", '{"town":"Paris"}<|return|>', PARIS + "<|return|>"],
        (HM, F(PARIS)),
        [T + S + FINAL] * 2,
        rules=("regenerated-answer",),
        told=UNCONSTRAINED,
    ),
    "answer not in the form after all retries": Case(
        turn(form=CITY_FORM),
        [T + S + FINAL + "It rains.<|return|>", *["It snows.<|return|>"] * 2],
        (HM, F("It rains.")),
        [T + S + FINAL] * 2,
        rules=("regenerated-answer",),
        unmet=UNMET_FORM,
        told=UNCONSTRAINED,
    ),
    "blanks inside an answer": Case(
        turn(form=CITY_FORM),
        [T + S + FINAL + '{"city": ' + " \n" * 99, '"Paris"}<|return|>'],
        (HM, F(PARIS)),
        [T + S + FINAL + '{"city":'],
        rules=("repetition",),
        told=UNCONSTRAINED,
    ),
    "blanks inside a constrained answer": Case(
        turn(form=CITY_FORM),
        [T + RAIN, '{"city": ' + " \n" * 99, '"Paris"}<|return|>'],
        (HM, F(PARIS)),
        [T + S + FINAL, T + S + FINAL + '{"city":'],
        rules=("repetition",),
        told=CONSTRAINED,
    ),
    "blanks after an answer": Case(
        turn(form=CITY_FORM),
        [T + S + FINAL + PARIS + " \n" * 99],
        (HM, F(PARIS)),
        [],
        rules=("repetition",),
        told=UNCONSTRAINED,
    ),
    "a fence around the answer": Case(
        turn(form=CITY_FORM),
        [FINAL + f"```json\n{PARIS}\n```<|return|>"],
        (F(PARIS),),
        [],
        rules=("code-fence",),
        told=UNCONSTRAINED,
    ),
    "a fence around an invalid answer": Case(
        turn(form=CITY_FORM, disabled_rules=frozenset({"regenerated-answer"})),
        [FINAL + "```json\n{}\n```<|return|>"],
        (F("```json\n{}\n```"),),
        [],
        unmet=UNMET_FORM,
        told=UNCONSTRAINED,
    ),
    "forced call before a form": Case(
        turn(NAMED, form=CITY_FORM), [ANSWERED, PARIS + "<|call|>"], (CALLED,), [WEATHER], [JsonSchema(CITY)]
    ),
}

THOUGHTS = "<|channel|>analysis<|message|>one two three four five six"
BUDGETED: dict[str, Case] = {
    "answer opened without tools": Case(
        turn(conversation=WITHOUT_TOOLS, reasoning_budget=3),
        [THOUGHTS, "It rains.<|return|>"],
        (R("one two three"), F("It rains.")),
        ["<|channel|>analysis<|message|>one two three<|end|>" + S + FINAL],
        rules=("reasoning-budget",),
    ),
    "free choice with tools": Case(
        turn(reasoning_budget=3),
        [THOUGHTS, WEATHER + PARIS + "<|call|>"],
        (R("one two three"), CALLED),
        ["<|channel|>analysis<|message|>one two three<|end|>" + S],
        rules=("reasoning-budget",),
    ),
    "answer forced after further reasoning": Case(
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
    "forced call": Case(
        turn(NAMED, reasoning_budget=3),
        [THOUGHTS, PARIS + "<|call|>"],
        (R("one two three"), CALLED),
        ["<|channel|>analysis<|message|>one two three<|end|>" + S + WEATHER],
        [JsonSchema(CITY)],
        rules=("reasoning-budget",),
    ),
    "answer opened in a form": Case(
        turn(conversation=WITHOUT_TOOLS, reasoning_budget=3, form=CITY_FORM),
        [THOUGHTS, PARIS + "<|return|>"],
        (R("one two three"), F(PARIS)),
        ["<|channel|>analysis<|message|>one two three<|end|>" + S + FINAL],
        [JsonSchema(CITY)],
        rules=("reasoning-budget",),
    ),
    "budget of zero": Case(
        turn(conversation=WITHOUT_TOOLS, reasoning_budget=0),
        [THOUGHTS, "It rains.<|return|>"],
        (F("It rains."),),
        [FINAL],
        rules=("reasoning-budget",),
    ),
    "reasoning as long as the budget": Case(turn(reasoning_budget=2), [T + RAIN], (HM, F("It rains.")), []),
    "second reasoning beyond the budget": Case(
        turn(conversation=WITHOUT_TOOLS, reasoning_budget=2),
        [T + S + THOUGHTS, "It rains.<|return|>"],
        (HM, F("It rains.")),
        [T + S + FINAL],
        rules=("reasoning-budget",),
    ),
    "reasoning within the budget": Case(turn(reasoning_budget=50), [T + RAIN], (HM, F("It rains.")), []),
}


def applicable(
    cases: Mapping[str, Case],
    backends: Mapping[str, Capabilities],
    does_apply: Callable[[Case, Capabilities], bool] = lambda case, capabilities: capabilities in case.told,
) -> list[Any]:
    """Return the parameters of each case with each of the backends that it applies to."""
    return [
        pytest.param(case, capabilities, id=f"{name}-{backend}")
        for name, case in cases.items()
        for backend, capabilities in backends.items()
        if does_apply(case, capabilities)
    ]


# Reasoning budgets apply to token ids only, since text is counted in the chunks of the network.
CASES = FORCED | CALLS | FORMED | {name: replace(case, told=(IDS, GUIDED)) for name, case in BUDGETED.items()}


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("per_chunk", [1, 4, 1000])
@pytest.mark.parametrize(("case", "capabilities"), applicable(CASES, BACKENDS))
async def test_the_answer_meets_the_requirements_of_the_request(
    case: Case, per_chunk: int, capabilities: Capabilities
) -> None:
    outcome = await ask(case.outputs, case.turn, capabilities, per_chunk=per_chunk)
    assert outcome.items == tuple(case.items)
    assert outcome.suffixes[1:] == list(case.suffixes)
    if case.constraints:
        assert outcome.constraints[1:] == [each if capabilities.constrain else None for each in case.constraints]
    else:
        assert capabilities.constrain or not any(outcome.constraints)
    expected = tuple(rule for rule in case.rules)
    assert tuple(rule for rule in outcome.rules if rule != "restored-stop") == expected
    assert outcome.report.unmet == case.unmet
    assert outcome.finished.reason is FinishReason.STOP
