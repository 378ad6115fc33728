"""Generator of `docs/recoveries.md`: one example of each recovery rule.

The examples run through the real router and engine.

`python -m tests.docs.mended > docs/recoveries.md` regenerates the page. The tables of the tests contain the model
output; the current code produces the results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.engine import test_plan
from tests.engine.hosting import ANSWER, ENCODING, SEARCH, Servers, Talk, call, calls_of, tool
from tests.engine.planning import CONVERSATION, FINAL, PARIS, PREAMBLE, WEATHER, ask, turn
from tests.engine.scripted import Step
from tests.engine.test_loop import decided, hosting, lost, other
from tests.engine.test_unfinished_turns import UNKNOWN
from tests.harmony.fold import items_of, new_router, rules_of
from tests.harmony.recoveries import CASES, C, F, P, R
from unisono.api.chat.schema import ChatRequest
from unisono.core.conversation import FunctionTool
from unisono.core.events import Event
from unisono.core.generation import FinishReason
from unisono.core.recovery_rules import (
    MEDIA_LEFT_OUT,
    OF_HOSTED_TOOLS,
    OF_THE_ANSWER,
    OF_THE_REQUEST,
    PARSING_RULES,
    SWITCHABLE,
)
from unisono.engine.request import ApprovalDecision

COMMAND = "python -m tests.docs.mended > docs/recoveries.md"


@dataclass(frozen=True)
class Example:
    """Model output of each step, and what it leads to.

    `received` are the items that the client receives, in words. `read` are the texts that the model reads, such as
    results of tool calls. `condition` is a sentence about the request or the backend.
    """

    outputs: Sequence[str]
    received: Sequence[str]
    rules: Sequence[str]
    condition: str = ""
    read: Sequence[str] = ()


def visible(events: Sequence[Event]) -> list[str]:
    """Return the items that the client receives, in words."""
    return [_word(item) for item in items_of(events)] or ["no items"]


def _word(item: R | P | F | C) -> str:
    match item:
        case R(text):
            return f"the reasoning `{text}`"
        case P(text):
            return f"the preamble `{text}`"
        case F(text):
            return f"the answer `{text}`"
        case C(name, arguments):
            return f"a call to `{name}` with `{arguments}`"


# Cases that illustrate their rule better than shorter ones.
ILLUSTRATIVE = ("a channel in the recipient", "a call in the header", "a call in a preamble", "no markup")


def parsing_examples() -> Mapping[str, Example]:
    """Return an example of each rule.

    It is one of `ILLUSTRATIVE`, else the shortest case with the fewest other rules.
    """
    found: dict[str, Example] = {}
    rest = sorted(CASES.values(), key=lambda case: (len(case.rules), case.finish == "length", len(case.output)))
    for case in [*(CASES[name] for name in ILLUSTRATIVE), *rest]:
        events = _read(ENCODING.encode_as_server(case.output), case.finish)
        cut = "The output was cut off at this point." if case.finish == "length" else ""
        for rule in rules_of(events):
            found.setdefault(rule, Example([case.output], visible(events), rules_of(events), cut))
    marked, half = ENCODING.encode_marked, next(t for t in range(256) if ENCODING.decode_bytes([t])[0] >= 0xF0)
    unreadable = [*marked("<|channel|>final"), half, *marked("<|message|>It rains.<|return|>")]
    no_token = [*marked("<|channel|>final<|message|>It "), 201_088, *marked("rains.<|return|>")]
    for rule, tokens, text in (
        ("undecodable-header", unreadable, "<|channel|>final\ufffd<|message|>It rains.<|return|>"),
        ("bad-token", no_token, "<|channel|>final<|message|>It ⟨201088⟩rains.<|return|>"),
    ):
        events = _read(tokens, "stop")
        found[rule] = Example([text], visible(events), rules_of(events))
    open_end = "<|channel|>final<|message|>It rains."
    events = _read(ENCODING.encode_marked(open_end), "stop", stop_hidden=True)
    condition = "The backend does not send the stop token."
    found["restored-stop"] = Example([open_end], visible(events), rules_of(events), condition)
    return found


def _read(tokens: Sequence[int], finish: str, *, stop_hidden: bool = False) -> list[Event]:
    router = new_router(ENCODING)
    return [*router.feed(tokens), *router.end(FinishReason(finish), stop_hidden=stop_hidden)]


# Case and condition of each answer rule. By default, the shortest case that has no other rule.
PLANNED: Mapping[str, tuple[str, str]] = {
    "code-fence": ("a fence around the answer", "The request requires a JSON answer."),
    "reasoning-budget": ("", "The request has a small reasoning budget."),
    "regenerated-answer": ("", "The request requires JSON that conforms to a schema."),
    "regenerated-call": ("", "The tool has a schema for its arguments."),
    "tool-not-allowed": ("", "The request declares the tool, but its `tool_choice` does not allow it."),
}


# Steps of a turn that ends early, or that calls a tool which does not exist.
UNFINISHED: Mapping[str, list[str]] = {
    "dangling-preamble": [PREAMBLE + "<|return|>", WEATHER + PARIS + "<|call|>"],
    "undeclared-tool": [UNKNOWN, WEATHER + PARIS + "<|call|>"],
}


async def answer_examples() -> Mapping[str, Example]:
    found: dict[str, Example] = {}
    for rule, (name, condition) in PLANNED.items():
        cases = (
            [test_plan.CASES[name]]
            if name
            else [c for c in test_plan.CASES.values() if tuple(c.rules) == (rule,) and not c.unmet]
        )
        case = min(cases, key=lambda case: len(str(case.outputs)))
        answered = await ask(case.outputs, case.turn, case.told[0], spare=True)
        outputs = [step.output if isinstance(step, Step) else step for step in case.outputs]
        found[rule] = Example(outputs, visible(answered.events), answered.rules, condition)
    reasoning_only = ["<|channel|>analysis<|message|>Hm.<|return|>", "It rains.<|return|>"]
    answered = await ask(reasoning_only, turn())
    found["analysis-only"] = Example(reasoning_only, visible(answered.events), answered.report.recoveries)
    for rule, outputs in UNFINISHED.items():
        answered = await ask(outputs, turn())
        found[rule] = Example(outputs, visible(answered.events), answered.report.recoveries)
    free = replace(CONVERSATION.preamble, tools=(FunctionTool("note", parameters={"type": "string"}, free_text=True),))
    wrapped = ['<|channel|>commentary to=functions.note <|constrain|>json<|message|>{"input":"Buy tea."}<|call|>']
    answered = await ask(wrapped, turn(conversation=replace(CONVERSATION, preamble=free)))
    condition = "The tool takes plain text."
    found["wrapped-input"] = Example(wrapped, visible(answered.events), answered.rules, condition)
    answered = await ask([FINAL + "la " * 6000], turn(), spare=True)
    [(answer,)] = [answered.items]
    assert isinstance(answer, F)
    so_far = f"the answer `{answer.text[:12]}...`, which was stopped after {len(answer.text) // 3:,} words"
    found["repetition"] = Example([FINAL + "la la la la ..."], [so_far], answered.rules)
    return found


def _server_tool_talks() -> Mapping[str, Talk]:
    odd = replace(tool("docs", "odd"), schema={"type": "object", "properties": {"a" * 300: {"type": "string"}}})
    behind = "It is so.<|end|><|start|>assistant" + other(2)
    return {
        "approval-void": decided(Talk([ANSWER], Servers({"files": ()})), ApprovalDecision("call_old", "mcpr_1", True)),
        "bad-tool-arguments": Talk([call("docs__search", "{q"), ANSWER]),
        "call-limit": hosting(Talk([other(1), other(2), "It is so.<|return|>"]), max_calls=1),
        "call-not-repeated": Talk([SEARCH, ANSWER], Servers(answer=lost)),
        "late-call": hosting(Talk([other(1), behind]), max_calls=0),
        "repeated-call": Talk([SEARCH, SEARCH, SEARCH, ANSWER]),
        "tool-deadline": hosting(Talk([other(1), "It is so.<|return|>"]), total_s=0.0),
        "tool-left-out": Talk([ANSWER], Servers({"docs": (odd, tool("docs", "search"))})),
        "tools-ended": hosting(Talk([other(1), "It is so.<|return|>"]), max_calls=0),
        "unknown-tool": Talk([call("docs__write"), ANSWER]),
    }


# Conditions of the examples with server tools.
SERVER_TOOL_CONDITIONS: Mapping[str, str] = {
    "approval-void": "The request approves a call to a tool that no longer exists.",
    "call-limit": "The request allows one call.",
    "call-not-repeated": "The connection to the server is lost during the call.",
    "late-call": "The request allows no calls.",
    "tool-deadline": "The time limit for server tools has passed before the first call.",
    "tool-left-out": "One of the server's tools has a schema that cannot be declared to the model.",
    "tools-ended": "The request allows no calls.",
}


async def server_tool_examples() -> Mapping[str, Example]:
    found: dict[str, Example] = {}
    for rule, talk in _server_tool_talks().items():
        events, report = await talk.events()
        read = [f"the tool result `{text}`" for _, _, text in calls_of(events) if text]
        condition = SERVER_TOOL_CONDITIONS.get(rule, "")
        found[rule] = Example(
            talk.outputs, visible(events)[-1:], report.recoveries, condition, read=list(dict.fromkeys(read))
        )
    return found


def request_examples() -> Mapping[str, Example]:
    """Return an example of each rule for requests. It validates a request with media."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "See."}, image]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "Go on."},
    ]
    request = ChatRequest.model_validate({"model": "gpt-oss", "messages": messages})
    line = request.messages[0].content[1].text
    sent = 'user: "See." and an image\nassistant: "I see."\nuser: "Go on."'
    return {MEDIA_LEFT_OUT: Example([sent], [], request.recoveries, read=[f"`{line}` instead of the image"])}


HEAD = f"""# Recoveries from malformed output

This page lists every recovery rule, with an example. Read it when an answer reports a recovery and you want to know
what the gateway changed. `{COMMAND}` generates this page from
`unisono/core/recovery_rules.py` and from the test cases that it runs.

Malformed model output never causes an error. The gateway reads it as the most probable valid message, or emits it as
text. It then reports the name of the rule that it applied:

| where | what is reported |
| --- | --- |
| `unisono.recoveries` in the answer | names of all rules that were applied to this answer |
| header `x-unisono-recoveries` | the same names, if the answer is not streamed |
| metric `unisono_recoveries_total` | number of recoveries for each rule |
| a [recording](traces.md) | each rule at its position in the output |

These rules can be switched off for a model: {", ".join(f"`{rule}`" for rule in sorted(SWITCHABLE))}.
For example, `unisono: {{recoveries: {{repetition: off}}}}` in an entry of `model_list` switches off `repetition`. All
other rules are a part of the parser and cannot be switched off.

Each example shows malformed model output, one line for each run of the model. The output continues a prompt that ends
in `<|start|>assistant`. A line that begins with text continues a message that the gateway has begun. The request
declares the tools `f`, `a`, `bash`, `search` and others. Below the output, the example says what the client receives.
If the gateway informs the model, the example also says what the model reads.
"""


def page() -> str:
    """Return the content of `docs/recoveries.md`."""
    return HEAD + "".join(asyncio.run(_parts()))


async def _parts() -> list[str]:
    return [
        *_part("Reading malformed output", PARSING_RULES, parsing_examples()),
        *_part("Meeting the requirements of the request", OF_THE_ANSWER, await answer_examples()),
        *_part("Running server tools", OF_HOSTED_TOOLS, await server_tool_examples()),
        *_part("Requests with content that the model cannot read", OF_THE_REQUEST, request_examples()),
    ]


def _part(title: str, rules: Mapping[str, str], examples: Mapping[str, Example]) -> Iterator[str]:
    yield f"\n## {title}\n"
    for rule, sentence in rules.items():
        yield f"\n### `{rule}`\n\n{sentence}\n"
        example = examples[rule]
        assert rule in example.rules, (rule, example)
        steps = "\n".join(step if rule in OF_THE_REQUEST else step.replace("\n", "\\n") for step in example.outputs)
        others = [f"`{other}`" for other in example.rules if other != rule]
        sentences = [
            example.condition,
            _sentence("The model reads", example.read),
            _sentence("The client receives", example.received),
            _sentence("The answer also has", [f"the recovery {each}" for each in others]),
        ]
        yield f"\n```text\n{steps}\n```\n\n{' '.join(filter(None, sentences))}\n"


def _sentence(begin: str, objects: Sequence[str]) -> str:
    """Return a sentence that lists the objects; "" without objects."""
    listed = [each.replace("\n", "\\n") for each in objects]
    *most, last = listed or [""]
    if not last:
        return ""
    return f"{begin} {' and '.join([', '.join(most), last]) if most else last}."


if __name__ == "__main__":
    print(page(), end="")
