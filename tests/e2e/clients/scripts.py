"""What the scripted backend writes, by the name a request's last user message gives: `script: slow`. With several
names, `script: two calls, then: an answer`, each further one is for one more answer of a tool, the last one for all
after it.

Names that are not here are those of the malformed outputs in `tests.harmony.recoveries`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.e2e.hosting import calls
from tests.fakes import Refusal, VllmScript, constraints, inject_at, reset_at, stall_at, vllm_context_error
from tests.harmony.recoveries import CASES
from unisono.core import generation
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
ASSISTANT = ENCODING.encode_marked("<|start|>assistant")

THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
ANSWER = THOUGHT + "<|channel|>final<|message|>Here is the answer.<|return|>"
LONG = THOUGHT + "<|channel|>final<|message|>" + " word" * 1500 + "<|return|>"
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
TWO_CALLS = THOUGHT + CALL + '{"location":"Paris"}<|call|><|start|>assistant' + CALL + '{"location":"Rome"}<|call|>'
PREAMBLE = (
    THOUGHT
    + "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
    + CALL
    + '{"location":"Paris"}<|call|>'
)
CUT_CALL = THOUGHT + CALL + '{"location":"Par'
HANDOFF = THOUGHT + "<|channel|>commentary to=functions.transfer_to_poet <|constrain|>json<|message|>{}<|call|>"
RESULT = (
    THOUGHT
    + "<|channel|>commentary to=functions.final_result <|constrain|>json<|message|>"
    + '{"city":"Paris","degrees":18}<|call|>'
)
ECHO = THOUGHT + "<|channel|>commentary to=functions.echo<|message|>" + '{"input":"said \\"so\\""}<|call|>'
TRAINED = THOUGHT + "<|channel|>analysis to={} code<|message|>{}<|call|>"
CITING = THOUGHT + "<|channel|>final<|message|>It is Paris【1†L4】.<|return|>"
RESULT_OF_A_TOOL = re.compile(r"<\|start\|>(?:functions\.|browser\.|python )")
BROKEN_AT = 24
"""Which event of an answer is the fault: its thought and a few words are through by then."""


def playing(text: str, **fields: Any) -> VllmScript:
    return VllmScript(tokens=ENCODING.encode_marked(text), **fields)


def refusing(status: int, words: str, **headers: str) -> Refusal:
    body = b'{"error": {"message": "%s", "type": "x", "param": null, "code": %d}}' % (words.encode(), status)
    return Refusal(status, body, headers={name.replace("_", "-"): value for name, value in headers.items()})


SCRIPTS: dict[str, VllmScript | Refusal] = {
    "an answer": playing(ANSWER),
    "two calls": playing(TWO_CALLS),
    "two calls, slowly": playing(TWO_CALLS, delay_s=0.01),
    "a preamble": playing(PREAMBLE),
    "a cut call": playing(CUT_CALL, finish="length"),
    "a custom call": playing(ECHO),
    "a handoff": playing(HANDOFF),
    "a result": playing(RESULT),
    "a tool": playing(calls("echo", text="hello")),
    "a tool, slowly": playing(calls("slow", seconds=0.5)),
    "a tool that fails": playing(calls("broken")),
    "a guarded tool": playing(calls("echo", text="hello").replace("docs__", "guarded__")),
    "a search": playing(TRAINED.format("browser.search", '{"query":"capital France"}')),
    "a page": playing(TRAINED.format("browser.open", '{"id":0}')),
    "a program": playing(TRAINED.format("python", "print(6 * 7)")),
    "a citation": playing(CITING),
    "no JSON": playing(THOUGHT + "<|channel|>final<|message|>I would rather not.<|return|>"),
    "slow": playing(LONG, delay_s=0.02),
    "silence at first": playing(ANSWER, faults=(stall_at(0),)),
    "silence later": playing(LONG, faults=(stall_at(BROKEN_AT),)),
    "a reset later": playing(LONG, faults=(reset_at(BROKEN_AT),)),
    "garbage later": playing(LONG, delay_s=0.005, faults=(inject_at(BROKEN_AT, b"data: {]\n\n"),)),
    "busy": refusing(429, "busy", retry_after="7"),
    "broken": refusing(500, "an inner secret"),
    "rejected": refusing(400, "min_p is odd"),
    "locked": refusing(401, "who are you"),
    "too long": vllm_context_error(),
}


ENDS = {generation.CALL, generation.END}


def _is_alike(one: int, other: object) -> bool:
    return one == other or (one in ENDS and other in ENDS)


def going_on(script: VllmScript, prompt: list[int]) -> VllmScript | None:
    """What is left of a script that the prompt holds the beginning of; None where it holds nothing of it. A call that
    another message follows ends as any message does."""
    for place in [at for at, token in enumerate(prompt) if token == generation.START]:
        said = prompt[place + 2 :]
        written = script.tokens[: len(said)]
        alike = len(written) == len(said) and all(map(_is_alike, said, written))
        if prompt[place : place + 2] == ASSISTANT and said and alike:
            return replace(script, tokens=script.tokens[len(said) :])
    return None


def script_of() -> Callable[[dict[str, Any]], VllmScript | Refusal]:
    """A fresh backend's behaviour. Two scripts look at more than their name: `fails once ...` answers from the second
    time it is asked, and `n in reverse` lets the choice with the higher seed wait. It goes on behind what it said
    itself; where it is kept to a schema otherwise it writes the least that is allowed, and behind any other header that
    it did not write `I am sorry.`"""
    asked_before: Counter[str] = Counter()

    def script(asked: dict[str, Any]) -> VllmScript | Refusal:
        prompt = ENCODING.decode(asked["prompt"])
        held = constraints.vllm(asked)
        own = SCRIPTS.get(prompt.rpartition("script: ")[2].partition("<|")[0].partition(", then: ")[0])
        if isinstance(own, VllmScript) and (rest_of_it := going_on(own, asked["prompt"])) is not None:
            return rest_of_it
        if held is not None or prompt.endswith("<|message|>"):
            return playing((held.example() if held is not None else "I am sorry.") + "<|return|>")
        _, named, rest = prompt.rpartition("script: ")
        if not named:
            return SCRIPTS["an answer"]  # the gateway looks whether anybody is there
        names = rest.partition("<|")[0].split(", then: ")
        name = names[min(len(RESULT_OF_A_TOOL.findall(rest)), len(names) - 1)]
        asked_before[name] += 1
        if name.startswith("fails once"):
            return SCRIPTS["an answer"] if asked_before[name] > 1 else refusing(503, "starting")
        if name == "n in reverse":
            return playing(ANSWER, first_delay_s=0.3 * (asked["seed"] - 6))
        return SCRIPTS.get(name) or playing(CASES[name].output, finish=CASES[name].finish)

    return script
