"""One example of every rule of mending, run through the real router and engine, and the page made of them.

`python -m tests.docs.mended > docs/recoveries.md` writes the page anew. What the model wrote stands in the tables of
the tests; what came of it is what comes of it now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.engine import test_plan
from tests.engine.hosting import ANSWER, ENCODING, SEARCH, Servers, Talk, call, calls_of, tool
from tests.engine.planning import FINAL, ask, turn
from tests.engine.scripted import Step
from tests.engine.test_loop import decided, hosting, lost, other
from tests.harmony.fold import items_of, new_router, rules_of
from tests.harmony.recoveries import CASES, C, F, P, R
from unisono.core.events import Event
from unisono.core.generation import FinishReason
from unisono.core.recovery_rules import OF_HOSTED_TOOLS, OF_READING, OF_THE_ANSWER
from unisono.engine.interventions.controller import SWITCHABLE
from unisono.engine.request import ApprovalDecision

COMMAND = "python -m tests.docs.mended > docs/recoveries.md"


@dataclass(frozen=True)
class Example:
    """What the model wrote, step by step, and what came of it. `aside` says what else matters."""

    wrote: Sequence[str]
    came: Sequence[str]
    rules: Sequence[str]
    aside: str = ""


def said(events: Sequence[Event]) -> list[str]:
    """What a client gets, in words."""
    return [_word(item) for item in items_of(events)] or ["nothing"]


def _word(item: R | P | F | C) -> str:
    match item:
        case R(text):
            return f"thoughts `{text}`"
        case P(text):
            return f"preamble `{text}`"
        case F(text):
            return f"answer `{text}`"
        case C(name, arguments):
            return f"call `{name}` with `{arguments}`"


TELLING = ("a channel in the recipient", "a call in the header", "a call in a preamble", "no markup")
"""Shapes that show their rule better than shorter ones."""


def of_reading() -> Mapping[str, Example]:
    """For each rule a telling shape, else the one that needs the fewest others, and the shortest of those."""
    found: dict[str, Example] = {}
    rest = sorted(CASES.values(), key=lambda case: (len(case.rules), case.finish == "length", len(case.output)))
    for case in [*(CASES[name] for name in TELLING), *rest]:
        events = _read(ENCODING.encode_as_server(case.output), case.finish)
        cut = "It was cut off there." if case.finish == "length" else ""
        for rule in rules_of(events):
            found.setdefault(rule, Example([case.output], said(events), rules_of(events), cut))
    marked, half = ENCODING.encode_marked, next(t for t in range(256) if ENCODING.decode_bytes([t])[0] >= 0xF0)
    unreadable = [*marked("<|channel|>final"), half, *marked("<|message|>It rains.<|return|>")]
    no_token = [*marked("<|channel|>final<|message|>It "), 201_088, *marked("rains.<|return|>")]
    for rule, tokens, shown in (
        ("undecodable-header", unreadable, "<|channel|>final\ufffd<|message|>It rains.<|return|>"),
        ("bad-token", no_token, "<|channel|>final<|message|>It ⟨201088⟩rains.<|return|>"),
    ):
        events = _read(tokens, "stop")
        found[rule] = Example([shown], said(events), rules_of(events))
    open_end = "<|channel|>final<|message|>It rains."
    events = _read(ENCODING.encode_marked(open_end), "stop", stop_hidden=True)
    found["restored-stop"] = Example([open_end], said(events), rules_of(events), "The backend hides the stop.")
    return found


def _read(tokens: Sequence[int], finish: str, *, stop_hidden: bool = False) -> list[Event]:
    router = new_router(ENCODING)
    return [*router.feed(tokens), *router.end(FinishReason(finish), stop_hidden=stop_hidden)]


PLANNED: Mapping[str, tuple[str, str]] = {
    "code-fence": ("a fence around the answer", "JSON was asked for."),
    "reasoning-budget": ("", "The budget for thoughts was small."),
    "regenerated-answer": ("", "JSON of a schema was asked for."),
    "regenerated-call": ("", "The tool's arguments have a schema."),
    "tool-not-allowed": ("", "The tool must not be called now."),
}
"""For rules of the answer: the case, by default the first that has the rule alone, and what was asked for."""


async def of_the_answer() -> Mapping[str, Example]:
    found: dict[str, Example] = {}
    for rule, (name, aside) in PLANNED.items():
        cases = (
            [test_plan.CASES[name]]
            if name
            else [c for c in test_plan.CASES.values() if tuple(c.rules) == (rule,) and not c.unmet]
        )
        case = min(cases, key=lambda case: len(str(case.outputs)))
        asked = await ask(case.outputs, case.turn, case.told[0], spare=True)
        wrote = [step.output if isinstance(step, Step) else step for step in case.outputs]
        found[rule] = Example(wrote, said(asked.events), asked.rules, aside)
    thought = ["<|channel|>analysis<|message|>Hm.<|return|>", "It rains.<|return|>"]
    asked = await ask(thought, turn())
    found["analysis-only"] = Example(thought, said(asked.events), asked.report.recoveries)
    asked = await ask([FINAL + "la " * 6000], turn(), spare=True)
    [(answer,)] = [asked.items]
    assert isinstance(answer, F)
    so_far = f"answer `{answer.text[:12]}...`, broken off after {len(answer.text) // 3:,} words"
    found["repetition"] = Example([FINAL + "la la la la ..."], [so_far], asked.rules)
    return found


def _hosted() -> Mapping[str, Talk]:
    odd = replace(tool("docs", "odd"), schema={"type": "object", "properties": {"a\nb": {"type": "string"}}})
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


async def of_hosted_tools() -> Mapping[str, Example]:
    found: dict[str, Example] = {}
    for rule, talk in _hosted().items():
        events, report = await talk.events()
        told = [f"the model reads `{text}`" for _, _, text in calls_of(events) if text]
        found[rule] = Example(talk.outputs, [*dict.fromkeys(told), *said(events)[-1:]], report.recoveries)
    return found


HEAD = f"""# What is mended, and how

Written by `{COMMAND}` from `unisono/core/recovery_rules.py` and the shapes that
the tests are made of, by running them.

What a model writes never becomes an error. It is read as what it must have meant, or handed over as text, and the
rule's name is told: in the header `x-unisono-recoveries`, in the answer's `unisono.recoveries`, in the metric
`unisono_recoveries_total`, and at its place in a [recording](traces.md).

Rules can be switched off where they cost something, per model, as `unisono: {{recoveries: {{repetition: off}}}}`:
{", ".join(f"`{rule}`" for rule in sorted(SWITCHABLE))}. All others are what reading means.

In the examples the prompt ends in `<|start|>assistant`, the tools `f`, `a`, `bash`, `search` and others are declared,
and each line is one step of the model's.
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(asyncio.run(_parts()))


async def _parts() -> list[str]:
    return [
        *_part("Reading what the model wrote", OF_READING, of_reading()),
        *_part("Getting the answer that was asked for", OF_THE_ANSWER, await of_the_answer()),
        *_part("Tools that the gateway runs", OF_HOSTED_TOOLS, await of_hosted_tools()),
    ]


def _part(title: str, rules: Mapping[str, str], examples: Mapping[str, Example]) -> Iterator[str]:
    yield f"\n## {title}\n"
    for rule, sentence in rules.items():
        yield f"\n### `{rule}`\n\n{sentence}\n"
        example = examples[rule]
        assert rule in example.rules, (rule, example)
        steps = "\n".join(step.replace("\n", "\\n") for step in example.wrote)
        others = [f"`{other}`" for other in example.rules if other != rule]
        also = f" Beside it: {', '.join(others)}." if others else ""
        came = "; ".join(text.replace("\n", "\\n") for text in example.came)
        aside = f"{example.aside} " if example.aside else ""
        yield f"\n```text\n{steps}\n```\n\n{aside}Comes as: {came}.{also}\n"


if __name__ == "__main__":
    print(page(), end="")
