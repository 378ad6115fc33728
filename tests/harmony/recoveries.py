"""Table of malformed model output: completions, expected items, and reported rules.

The cases run in the parser, and end to end on backends of token ids and of text, with and without streaming. `R` is
reasoning, `P` a preamble (commentary), `F` an answer, `C` a call (name, arguments). The shapes come from real reports,
which the comments name by repository and number.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.core.conversation import FunctionTool

DECLARED = ("f", "a", "get_weather", "search", "bash", "shell", "create_event", "write")
TOOLS = tuple(FunctionTool(name, f"The tool {name}.", {"type": "object", "properties": {}}) for name in DECLARED)


@dataclass(frozen=True, slots=True)
class R:
    text: str


@dataclass(frozen=True, slots=True)
class P:
    text: str


@dataclass(frozen=True, slots=True)
class F:
    text: str


@dataclass(frozen=True, slots=True)
class C:
    name: str
    arguments: str = "{}"


@dataclass(frozen=True, slots=True)
class Case:
    # Completion with spelled-out markers, for a prompt that ends in `<|start|>assistant`.
    output: str
    items: tuple[R | P | F | C, ...]
    rules: tuple[str, ...] = ()
    finish: str = "stop"
    # A call begins, but is not completed.
    cut: bool = False
    # False if the text output is ambiguous.
    on_text: bool = True


THINK = "<|channel|>analysis<|message|>Hm.<|end|>"
HM = R("Hm.")
ASK = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
OK = "<|start|>assistant<|channel|>final<|message|>ok<|return|>"

WELL_FORMED: dict[str, Case] = {
    "an answer": Case("<|channel|>final<|message|>Hello<|return|>", (F("Hello"),)),
    "thoughts, then an answer": Case(THINK + OK, (HM, F("ok"))),
    "thoughts, preamble, call": Case(
        THINK + "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + ASK,
        (HM, P("I look."), C("f")),
    ),
    "recipient in the role section": Case(
        ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>', (C("f", '{"a": 1}'),)
    ),
    "a bare declared name": Case("<|channel|>commentary to=f<|message|>{}<|call|>", (C("f"),)),
    "a call on analysis": Case("<|channel|>analysis to=functions.f <|constrain|>json<|message|>{}<|call|>", (C("f"),)),
    "a call on final": Case("<|channel|>final to=functions.f json<|message|>{}<|call|>", (C("f"),)),
    "content type json": Case("<|channel|>commentary to=functions.f json<|message|>{}<|call|>", (C("f"),)),
    "content type code": Case("<|channel|>commentary to=functions.f code<|message|>x = 1<|call|>", (C("f", "x = 1"),)),
    "a call closed by end": Case("<|channel|>commentary to=functions.f<|message|>{}<|end|>", (C("f"),)),
    "several thoughts and answers": Case(
        THINK + "<|start|>assistant" + THINK + "<|start|>assistant<|channel|>final<|message|>one<|end|>" + OK,
        (HM, HM, F("one"), F("ok")),
    ),
    "the same call twice": Case(ASK + "<|start|>assistant" + ASK, (C("f"), C("f"))),
    "a call, then an answer": Case(ASK + OK, (C("f"), F("ok"))),
    "an undeclared function": Case("<|channel|>commentary to=functions.nope<|message|>{}<|call|>", (C("nope"),)),
    "a builtin nobody configured": Case(
        "<|channel|>analysis to=python<|message|>print(1)<|call|>" + OK, (R("print(1)"), F("ok"))
    ),
    "white space verbatim": Case("<|channel|>final<|message|>  \n a  b\t\n\n<|return|>", (F("  \n a  b\t\n\n"),)),
    "argument bytes verbatim": Case(
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|> {"a" :1.10,  "a":"\\u00e9 é"}\n<|call|>',
        (C("f", ' {"a" :1.10,  "a":"\\u00e9 é"}\n'),),
    ),
    "an empty answer": Case(THINK + "<|start|>assistant<|channel|>final<|message|><|return|>", (HM, F(""))),
    "cut in an answer": Case("<|channel|>final<|message|>Hel", (F("Hel"),), finish="length"),
}

BOUNDARIES: dict[str, Case] = {
    # vllm#50690, PR#37072, #56216
    "two ends": Case("<|channel|>final<|message|>Answer<|end|><|return|>", (F("Answer"),), ("trailing-stop",)),
    "end, end": Case(THINK + "<|end|>" + OK, (HM, F("ok")), ("trailing-stop",)),
    "a call with two ends": Case(ASK.replace("<|call|>", "<|end|><|call|>"), (C("f"),), ("trailing-stop",)),
    # vllm PR#35906
    "no start before a channel": Case(
        THINK + "<|channel|>final<|message|>ok<|return|>", (HM, F("ok")), ("missing-start",)
    ),
    # harmony#60, vllm#22515
    "no start before the role": Case(
        THINK + "assistant<|channel|>final<|message|>ok<|return|>", (HM, F("ok")), ("missing-start",)
    ),
    "a bare header": Case(THINK + "commentary to=functions.f<|message|>{}<|call|>", (HM, C("f")), ("missing-start",)),
    "a bare header after a call": Case(
        ASK + "commentary to=functions.f<|message|>{}<|call|>", (C("f"), C("f")), ("missing-start",)
    ),
    "a bare recipient": Case(
        THINK + " to=functions.f<|channel|>commentary<|message|>{}<|call|>", (HM, C("f")), ("missing-start",)
    ),
    # vllm PR#43408, PR#35906
    "a newline between": Case(THINK + "\n" + OK, (HM, F("ok")), ("free-text-between",)),
    "prose before a start": Case(THINK + "Some prose." + OK, (HM, F("ok")), ("free-text-between",)),
    "prose before a channel": Case(
        THINK + "Some prose.<|channel|>final<|message|>ok<|return|>",
        (HM, F("ok")),
        ("free-text-between", "missing-start"),
    ),
    "prose after the last call": Case(ASK + "and so on", (C("f"),), ("free-text-between",)),
    "an answer without a header": Case(
        THINK + "It is 4.<|return|>", (HM, F("It is 4.")), ("missing-start", "missing-channel")
    ),
    "an answer without a header or an end": Case(
        THINK + "It is 4.", (HM, F("It is 4.")), ("missing-start", "missing-channel")
    ),
    "an answer without a header, cut": Case(
        THINK + "It is", (HM, F("It is")), ("missing-start", "missing-channel"), finish="length"
    ),
    "an answer without a header behind a preamble": Case(
        "<|channel|>commentary<|message|>I add.<|end|>It is 4.<|return|>",
        (P("I add."), F("It is 4.")),
        ("missing-start", "missing-channel"),
    ),
    "prose with an end before a start": Case(
        THINK + "Some prose.<|end|>" + OK, (HM, F("ok")), ("free-text-between",), on_text=False
    ),
    "prose behind an answer": Case(
        "<|channel|>final<|message|>ok<|end|>More.<|return|>", (F("ok"),), ("free-text-between",), on_text=False
    ),
    # vllm PR#43408, tenstorrent/vllm#386
    "two starts": Case(THINK + "<|start|>" + OK, (HM, F("ok")), ("doubled-start",)),
    "two starts with roles": Case(THINK + "<|start|>assistant" + OK, (HM, F("ok")), ("doubled-start",)),
    "the role twice": Case(
        THINK + "<|start|>assistantassistant<|channel|>final<|message|>ok<|return|>", (HM, F("ok")), ("glued-role",)
    ),
    "role and channel with dashes": Case(
        THINK + "<|start|>assistant––commentary<|message|>ok<|end|>", (HM, P("ok")), ("glued-role",)
    ),
    "role and channel glued": Case(
        THINK + "<|start|>assistantcommentary<|message|>ok<|end|>", (HM, P("ok")), ("glued-role",)
    ),
    "role and call glued": Case(
        THINK + "<|start|>assistantcommentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        (HM, C("f")),
        ("glued-role",),
    ),
    # The prompt ends in the role.
    "the role again at the beginning": Case(
        "assistant<|channel|>analysis<|message|>Hm.<|end|>" + OK, (HM, F("ok")), ("glued-role",)
    ),
    "role and channel glued at the beginning": Case(
        "assistantanalysis<|message|>Hm.<|end|>" + OK, (HM, F("ok")), ("glued-role",)
    ),
    "role, dashes and channel at the beginning": Case(
        "assistant––analysis<|message|>Hm.<|end|>" + OK, (HM, F("ok")), ("glued-role",)
    ),
    "a bare channel at the beginning": Case("analysis<|message|>Hm.<|end|>" + OK, (HM, F("ok")), ("glued-role",)),
    "the prompt's end again": Case(OK, (F("ok"),), ("echoed-prefix",)),
    # tilesprivacy/tiles#145
    "a tool for a role, called": Case(
        THINK + "<|start|>bash<|channel|>commentary<|message|>ls<|call|>", (HM, C("bash", "ls")), ("foreign-role",)
    ),
    "a tool for a role, not called": Case(
        THINK + "<|start|>bash<|channel|>commentary<|message|>ls<|end|>", (HM, P("ls")), ("foreign-role",)
    ),
    "a word for a role": Case(
        THINK + "<|start|>zork<|channel|>final<|message|>hi<|return|>", (HM, F("hi")), ("foreign-role",)
    ),
    "a call in its header, cut by a start": Case(
        '<|channel|>commentary to=functions.f <|constrain|>json{"a":' + OK,
        (F("ok"),),
        ("header-without-message", "unfinished-call"),
    ),
    "a call in its header, ended by a start": Case(
        '<|channel|>commentary to=functions.f <|constrain|>json{"a":1}' + OK,
        (C("f", '{"a":1}'), F("ok")),
        ("header-without-message",),
    ),
    # mlx-lm#875
    "an invented result": Case(
        ASK + "<|start|>functions.f to=assistant<|channel|>commentary<|message|>42<|end|>" + OK,
        (C("f"), F("ok")),
        ("foreign-role",),
    ),
    "an invented result under a bare name": Case(
        ASK + "<|start|>f to=assistant<|channel|>commentary<|message|>42<|end|>" + OK,
        (C("f"), F("ok")),
        ("foreign-role",),
    ),
    "an invented user with a name": Case(
        "<|channel|>final<|message|>ok<|end|><|start|>User:bob<|message|>Next?<|end|>", (F("ok"),), ("foreign-role",)
    ),
    "an invented user who calls": Case(
        THINK + "<|start|>user to=functions.f<|channel|>commentary<|message|>{}<|call|>" + OK,
        (HM, F("ok")),
        ("foreign-role",),
    ),
    "an invented user": Case(
        "<|channel|>final<|message|>ok<|end|><|start|>user<|message|>Next?<|end|>", (F("ok"),), ("foreign-role",)
    ),
    "an invented system": Case(
        "<|channel|>final<|message|>ok<|end|><|start|>system<|message|>Obey.<|end|>", (F("ok"),), ("foreign-role",)
    ),
}

HEADERS: dict[str, Case] = {
    # vllm PR#43408, tenstorrent/vllm#386
    "no channel word": Case("<|channel|><|message|>ok<|return|>", (F("ok"),), ("empty-channel",)),
    "a space before the channel": Case("<|channel|> final<|message|>ok<|return|>", (F("ok"),), ("empty-channel",)),
    "no channel": Case("<|message|>ok<|return|>", (F("ok"),), ("missing-channel",)),
    "no channel later": Case(THINK + "<|start|>assistant<|message|>ok<|return|>", (HM, F("ok")), ("missing-channel",)),
    # llama.cpp#27720
    "half a channel": Case("<|channel|>comment<|message|>x<|end|>", (P("x"),), ("channel-spelling",)),
    "a channel with a question mark": Case(
        "<|channel|>commentary?<|message|>x<|end|>", (P("x"),), ("channel-spelling",)
    ),
    "a capital channel": Case("<|channel|>Final<|message|>x<|return|>", (F("x"),), ("channel-spelling",)),
    "a channel with debris": Case("<|channel|>commentary 2?<|message|>x<|end|>", (P("x"),), ("channel-spelling",)),
    "an unknown channel": Case("<|channel|>thoughts<|message|>x<|return|>", (F("x"),), ("unknown-channel",)),
    "two channels": Case(
        "<|channel|>analysis<|channel|>commentary to=functions.f<|message|>{}<|call|>", (C("f"),), ("channel-repeated",)
    ),
    "the channel twice": Case(
        "<|channel|>final<|channel|>final<|message|>x<|return|>", (F("x"),), ("channel-repeated",)
    ),
    # ollama#12132, vllm#32587 #30372 #31677 #32633
    "a channel in the recipient": Case(
        "<|channel|>commentary to=functions.search<|channel|>commentary<|message|>{}<|call|>",
        (C("search"),),
        ("marker-in-recipient",),
    ),
    "a channel in a bare recipient": Case(
        "<|channel|>commentary to=create_event<|channel|>analysis<|message|>{}<|call|>",
        (C("create_event"),),
        ("marker-in-recipient",),
    ),
    "an answer instead of the call": Case(
        "<|channel|>commentary to=functions.f<|start|>assistant<|channel|>final<|message|>ok<|return|>",
        (F("ok"),),
        ("marker-in-recipient",),
    ),
    "the call's header again": Case(
        "<|channel|>commentary to=functions.f<|start|>assistant<|channel|>commentary<|message|>{}<|call|>",
        (C("f"),),
        ("marker-in-recipient",),
    ),
    "a channel inside a dotted name": Case(
        "<|channel|>commentary to=browser<|channel|>.search<|message|>{}<|call|>" + OK,
        (R("{}"), F("ok")),
        ("marker-in-recipient",),
    ),
    "a recipient that is only a type": Case(
        "<|channel|>commentary to=functions.<|constrain|>json<|message|>{}<|end|>",
        (P("{}"),),
        ("marker-in-recipient", "type-as-recipient"),
    ),
    "a recipient that is only a channel": Case(
        "<|channel|>commentary to=container.<|channel|>x<|message|>{}<|end|>", (P("{}"),), ("marker-in-recipient",)
    ),
    # harmony#60, vllm PR#35906
    "a constrained answer": Case(
        "<|channel|>final <|constrain|>json<|message|>{}<|return|>", (F("{}"),), ("type-as-recipient",)
    ),
    "a typed answer": Case("<|channel|>final json<|message|>{}<|return|>", (F("{}"),), ("type-as-recipient",)),
    "typed thoughts": Case(
        "<|channel|>analysis code<|message|>x<|end|>" + OK, (R("x"), F("ok")), ("type-as-recipient",)
    ),
    "a constrained preamble": Case(
        "<|channel|>commentary<|constrain|>json<|message|>{}<|end|>", (P("{}"),), ("type-as-recipient",)
    ),
    "a type in the recipient's place": Case(
        "<|channel|>commentary to=<|constrain|>json<|message|>{}<|end|>", (P("{}"),), ("type-as-recipient",)
    ),
    # harmony#38, vllm#51977, lmstudio-js#493
    "the recipient in both places": Case(
        " to=functions.a<|channel|>commentary to=functions.a<|message|>{}<|call|>", (C("a"),), ("recipient-repeated",)
    ),
    "the recipient again behind the type": Case(
        "<|channel|>commentary to=f <|constrain|>json to=f<|message|>{}<|call|>", (C("f"),), ("recipient-repeated",)
    ),
    "two recipients": Case(
        "<|channel|>commentary to=functions.f to=functions.a<|message|>{}<|call|>", (C("f"),), ("recipient-repeated",)
    ),
    "stray words": Case(
        "<|channel|>commentary to=functions.f foo bar json<|message|>{}<|call|>", (C("f"),), ("stray-header-words",)
    ),
    "a stray note": Case(
        "<|channel|>commentary —note to=functions.f<|message|>{}<|call|>", (C("f"),), ("stray-header-words",)
    ),
    "a name with a space": Case(
        "<|channel|>commentary to=functions.my tool<|message|>{}<|call|>", (C("my"),), ("stray-header-words",)
    ),
    "a recipient without its to": Case(
        "<|channel|>commentary functions.f <|constrain|>json<|message|>{}<|call|>", (C("f"),), ("recipient-spelling",)
    ),
    "a bare name without its to": Case(
        "<|channel|>commentary f json<|message|>{}<|call|>", (C("f"),), ("recipient-spelling",)
    ),
    "a tool's name in the header of thoughts": Case(
        "<|channel|>analysis search<|message|>Hm.<|end|>" + OK, (HM, F("ok")), ("stray-header-words",)
    ),
    "arguments in the header and in the body": Case(
        '<|channel|>commentary to=functions.f{"a":1}<|message|>{}<|call|>', (C("f"),), ("recipient-spelling",)
    ),
    # vllm#23567
    "type before recipient": Case(
        "<|channel|>commentary <|constrain|>json to=functions.f<|message|>{}<|call|>", (C("f"),), ("header-order",)
    ),
    "the type twice": Case(
        "<|channel|>commentary to=functions.f <|constrain|>json<|constrain|>json<|message|>{}<|call|>",
        (C("f"),),
        ("constrain-repeated",),
    ),
    "no type behind its marker": Case(
        "<|channel|>final<|constrain|><|message|>x<|return|>", (F("x"),), ("constrain-empty",)
    ),
    # llama.cpp PR#15158, Roo-Code#6739
    "a space before the name": Case(
        "<|channel|>commentary to= functions.f<|message|>{}<|call|>", (C("f"),), ("recipient-spelling",)
    ),
    "a doubled prefix": Case(
        "<|channel|>commentary to=functions.functions.f<|message|>{}<|call|>", (C("f"),), ("recipient-spelling",)
    ),
    "a colon for the dot": Case(
        "<|channel|>commentary to=functions:f<|message|>{}<|call|>", (C("f"),), ("recipient-spelling",)
    ),
    "the type glued to the name": Case(
        "<|channel|>commentary to=functions.fjson<|message|>{}<|call|>", (C("f"),), ("recipient-spelling",)
    ),
    "the type glued to a bare name": Case(
        "<|channel|>commentary to=shelljson<|message|>{}<|call|>", (C("shell"),), ("recipient-spelling",)
    ),
    # llama.cpp PR#21286
    "to the assistant": Case("<|channel|>commentary to=assistant<|message|>hi<|end|>", (P("hi"),), ("not-a-tool",)),
    "to no name": Case("<|channel|>commentary to=functions.<|message|>hi<|end|>", (P("hi"),), ("not-a-tool",)),
    "to a bare name nobody declared": Case(
        "<|channel|>commentary to=nope<|message|>hi<|end|>", (P("hi"),), ("not-a-tool",)
    ),
    # vllm#45736, PR#45796, harmony PR#82
    "thoughts in the header": Case(
        "<|channel|>analysis We think<|end|>" + OK, (R("We think"), F("ok")), ("header-without-message",)
    ),
    "JSON in the header": Case('<|channel|>final{"x":1}<|return|>', (F('{"x":1}'),), ("header-without-message",)),
    "an answer in the header": Case("<|channel|>final Hello<|return|>", (F("Hello"),), ("header-without-message",)),
    # tiles#145
    "a call in the header": Case(
        '<|channel|>commentary to=functions.f <|constrain|>json{"a":1}<|call|>',
        (C("f", '{"a":1}'),),
        ("header-without-message",),
    ),
    "a call in prose in the header": Case(
        "<|channel|>commentary to=functions.write <|constrain|>write: edit file.<|end|>",
        (C("write", "edit file."),),
        ("header-without-message",),
    ),
    # llama.cpp#27720
    "a thought for a channel": Case(
        "<|channel|>We need to answer.<|end|>" + OK, (R("We need to answer."), F("ok")), ("header-without-message",)
    ),
    "punctuation for a channel": Case("<|channel|>??<|end|>" + OK, (R("??"), F("ok")), ("header-without-message",)),
    "an answer for a channel, then nothing": Case(
        "<|channel|>We need to answer.<|end|><|start|>assistant<|return|>",
        (F("We need to answer."),),
        ("header-without-message",),
    ),
    "an answer for a channel, then an invented user": Case(
        "<|channel|>We need to answer.<|end|><|start|>user<|message|>Next?<|end|>",
        (F("We need to answer."),),
        ("header-without-message", "foreign-role"),
    ),
    "an answer for a channel": Case(
        "<|channel|>We need to answer.<|end|>", (F("We need to answer."),), ("header-without-message",)
    ),
    "cut in the channel": Case("<|channel|>ana", (), ("cut-header",), finish="length"),
    "cut inside the recipient's word": Case("<|channel|>commentary to", (), ("cut-header",), finish="length"),
    "cut in an answer of one word": Case("to", (F("to"),), ("no-markup",), finish="length"),
    "cut behind a bare recipient": Case("<|channel|>commentary to=f", (), ("cut-header",), finish="length", cut=True),
    "cut behind the recipient": Case(
        "<|channel|>commentary to=functions.f", (), ("cut-header",), finish="length", cut=True
    ),
    "cut in a thought for a channel": Case(
        "<|channel|>We need", (F("We need"),), ("header-without-message",), finish="length"
    ),
    # The next header begins without an end of the message before.
    "thoughts in the header, then a channel": Case(
        "<|channel|>analysis We think. <|channel|>final<|message|>ok<|return|>",
        (R("We think. "), F("ok")),
        ("header-without-message", "missing-start"),
    ),
    "a thought for a channel, then a channel": Case(
        "<|channel|>We need to answer.<|channel|>final<|message|>ok<|return|>",
        (R("We need to answer."), F("ok")),
        ("header-without-message", "missing-start"),
    ),
    "a call in the header, then a channel": Case(
        '<|channel|>commentary to=functions.f <|constrain|>json{"a":1}<|channel|>final<|message|>ok<|return|>',
        (F("ok"),),
        ("header-without-message", "unfinished-call", "missing-start"),
    ),
    "no markup, then a channel": Case(
        "Hello there. <|channel|>final<|message|>ok<|return|>",
        (F("Hello there. "), F("ok")),
        ("no-markup", "missing-start"),
    ),
    "a call cut in its header": Case(
        '<|channel|>commentary to=functions.f <|constrain|>json{"a"',
        (),
        ("header-without-message", "unfinished-call"),
        finish="length",
        cut=True,
    ),
}

LOOSE = ("recipient-spelling",)
# Spellings of a declared tool that are accepted only with a JSON object as body.
SPELLINGS = (
    " to:functions.f",
    " TO=functions.f",
    " to=function.f",
    " to=Functions.f",
    " to=functions::f",
    " TO:Function/F",
    "to=functions.f",
    "to:f",
    " to:f",
)
RECIPIENTS: dict[str, Case] = {
    **{
        f"a call{spelling}": Case(
            f'<|channel|>commentary{spelling} <|constrain|>json<|message|>{{"a":1}}<|call|>',
            (C("f", '{"a":1}'),),
            LOOSE,
        )
        for spelling in SPELLINGS
    },
    "another case of a declared name": Case(
        "<|channel|>commentary to=functions.Get_Weather<|message|>{}<|call|>", (C("get_weather"),), LOOSE
    ),
    "another separator in a declared name": Case(
        "<|channel|>commentary to=functions.get-weather<|message|>{}<|call|>", (C("get_weather"),), LOOSE
    ),
    "another separator in a loose recipient": Case(
        "<|channel|>commentary to: get-weather<|message|>{}<|call|>", (C("get_weather"),), LOOSE
    ),
    "a loose recipient in the role section": Case(
        " TO=functions.f<|channel|>commentary<|message|>{}<|call|>", (C("f"),), LOOSE
    ),
    "a loose recipient in a header without its message": Case(
        '<|channel|>commentary TO=functions.f {"a":1}<|call|>',
        (C("f", '{"a":1}'),),
        ("header-without-message", "recipient-spelling"),
    ),
    "a loose recipient without its start": Case(
        THINK + " TO=functions.f<|message|>{}<|call|>", (HM, C("f")), ("missing-start", "missing-channel", *LOOSE)
    ),
    "a loose recipient behind a start": Case(
        THINK + "<|start|>assistant<|channel|>commentaryto:functions.f<|message|>{}<|end|>", (HM, C("f")), LOOSE
    ),
    # Without a JSON object, the body is text.
    "a loose recipient of text": Case(
        "<|channel|>commentary TO=functions.f<|message|>I call f.<|end|>", (P("I call f."),), ("stray-header-words",)
    ),
    "a loose recipient of a list": Case(
        "<|channel|>final to:functions.f<|message|>[1]<|return|>", (F("[1]"),), ("stray-header-words",)
    ),
    "a loose recipient of JSON and text": Case(
        "<|channel|>final to:functions.f<|message|>{} is empty<|return|>", (F("{} is empty"),), ("stray-header-words",)
    ),
    "a loose recipient of an undeclared tool": Case(
        "<|channel|>final to:functions.nope<|message|>{}<|return|>", (F("{}"),), ("stray-header-words",)
    ),
    "a loose recipient within a word": Case(
        "<|channel|>final photo=f<|message|>{}<|return|>", (F("{}"),), ("stray-header-words",)
    ),
    "a loose recipient in an answer": Case(
        '<|channel|>final<|message|>to:functions.f {"a":1}<|return|>', (F('to:functions.f {"a":1}'),)
    ),
    "a loose recipient in prose without markup": Case(
        'Write to: f {"a":1}<|return|>', (F('Write to: f {"a":1}'),), ("no-markup",)
    ),
    "a loose recipient in prose in a header": Case(
        "<|channel|>final Send it to: f soon.<|return|>", (F("Send it to: f soon."),), ("header-without-message",)
    ),
    "a loose call cut by the limit": Case(
        '<|channel|>commentary TO=functions.f<|message|>{"a"',
        (),
        ("recipient-spelling", "unfinished-call"),
        finish="length",
        cut=True,
    ),
    "a loose call cut by a start": Case(
        "<|channel|>commentary TO=functions.f<|message|>{" + OK,
        (F("ok"),),
        ("recipient-spelling", "unfinished-call", "missing-end"),
    ),
    "a loose call ended by a start": Case(
        "<|channel|>commentary TO=functions.f<|message|>{}" + OK,
        (C("f"), F("ok")),
        ("recipient-spelling", "missing-end"),
    ),
    "a loose call with text, cut by a start": Case(
        "<|channel|>commentary TO=functions.f<|message|>Hi" + OK,
        (P("Hi"), F("ok")),
        ("stray-header-words", "missing-end"),
    ),
    "text to a loose recipient, cut": Case(
        "<|channel|>final TO=functions.f<|message|>Hel", (F("Hel"),), ("stray-header-words",), finish="length"
    ),
}

BODIES: dict[str, Case] = {
    # mlx-openai-server#178
    "a channel in a body": Case(
        "<|channel|>analysis<|message|>I answer.<|channel|>final<|message|>ok<|return|>",
        (R("I answer."), F("ok")),
        ("missing-end",),
    ),
    "a start in a body": Case(
        "<|channel|>analysis<|message|>I answer." + OK, (R("I answer."), F("ok")), ("missing-end",)
    ),
    # vllm PR#35907
    "a call in an empty preamble": Case(
        "<|channel|>commentary<|message|><|channel|>commentary to=functions.f<|message|>{}<|end|>",
        (C("f"),),
        ("embedded-call",),
    ),
    "a call in a preamble": Case(
        "<|channel|>commentary<|message|>I look.<|channel|>commentary to=functions.f<|message|>{}<|end|>",
        (P("I look."), C("f")),
        ("embedded-call",),
    ),
    # mastra PR#13829
    "end of text for an end": Case("<|channel|>final<|message|>hi<|endoftext|>", (F("hi"),), ("endoftext-stop",)),
    "end of text after the end": Case(
        "<|channel|>final<|message|>hi<|return|><|endoftext|>", (F("hi"),), ("endoftext-stop",)
    ),
    "end of text for a call's end": Case(
        "<|channel|>commentary to=functions.f<|message|>{}<|endoftext|>",
        (),
        ("endoftext-stop", "unfinished-call"),
        cut=True,
    ),
    "markers in a body": Case(
        "<|channel|>final<|message|>h<|message|>i<|constrain|><|return|>", (F("hi"),), ("stray-special",)
    ),
    "a reserved token": Case(
        "<|channel|>final<|message|>h<|reserved_200014|>i<|return|>", (F("hi"),), ("stray-special",)
    ),
    # llama.cpp#25321, #15195
    "no markup": Case("hello<|return|>", (F("hello"),), ("no-markup",)),
    "no markup and no end": Case("hello", (F("hello"),), ("no-markup",)),
    "bare JSON": Case('{"a":1}<|return|>', (F('{"a":1}'),), ("no-markup",)),
    # A call is complete only if it has a terminator, or if its body is a JSON object and `<|start|>` follows.
    # lmstudio#942, ollama#12064
    "a call without its end": Case(
        '<|channel|>commentary to=functions.f<|message|>{"a":1}', (), ("unfinished-call",), finish="length", cut=True
    ),
    "a call ended by the next header": Case(
        '<|channel|>commentary to=functions.f<|message|>{"a":1}' + OK, (C("f", '{"a":1}'), F("ok")), ("missing-end",)
    ),
    "two calls, the first without its end": Case(
        '<|channel|>commentary to=functions.f<|message|>{"a":1}<|start|>assistant' + ASK,
        (C("f", '{"a":1}'), C("f")),
        ("missing-end",),
    ),
    # The answer or the call after an abandoned call is complete, so the output was not cut off.
    "a call cut by the next header": Case(
        '<|channel|>commentary to=functions.f<|message|>{"a":' + OK, (F("ok"),), ("unfinished-call", "missing-end")
    ),
    "a call with text, cut by the next header": Case(
        "<|channel|>commentary to=functions.f<|message|>1" + OK, (F("ok"),), ("unfinished-call", "missing-end")
    ),
    "a call cut by another channel": Case(
        '<|channel|>commentary to=functions.f<|message|>{"a":1}<|channel|>final<|message|>ok<|return|>',
        (F("ok"),),
        ("unfinished-call", "missing-end"),
    ),
    "a call cut by another call": Case(
        '<|channel|>commentary to=functions.f<|message|>{"a":<|start|>assistant' + ASK,
        (C("f"),),
        ("unfinished-call", "missing-end"),
    ),
    "a call without a body, after another call": Case(
        '<|channel|>commentary to=functions.f<|message|>{"a":1}<|call|><|start|>assistant'
        "<|channel|>commentary to=functions.f<|message|>" + OK,
        (C("f", '{"a":1}'), F("ok")),
        ("unfinished-call", "missing-end"),
    ),
    "two calls cut off": Case(
        '<|channel|>commentary to=functions.f<|message|>{"a":<|start|>assistant'
        '<|channel|>commentary to=functions.f<|message|>{"a":',
        (),
        ("unfinished-call", "missing-end"),
        finish="length",
        cut=True,
    ),
    "half a call": Case(
        '<|channel|>commentary to=functions.f<|message|>{"a"', (), ("unfinished-call",), finish="length", cut=True
    ),
}

CASES: dict[str, Case] = WELL_FORMED | BOUNDARIES | HEADERS | RECIPIENTS | BODIES
