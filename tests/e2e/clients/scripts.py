"""Scripts of the scripted backend, chosen by the last user message: `script: slow`.

With several names, `script: two calls, then: an answer`, the model plays the next script after every tool result. The
last one is repeated.

`script: the prompt` answers with the prompt itself, with markers as plain text. Names that are not in `SCRIPTS` are
malformed outputs of `tests.harmony.recoveries`.
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
CLIENT_TOOL = THOUGHT + "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
ECHO = THOUGHT + "<|channel|>commentary to=functions.echo<|message|>" + '{"input":"said \\"so\\""}<|call|>'
PATCH = '{"type":"create_file","path":"a.py","diff":"+1"}'
MEMORY = '{"command":"create","path":"/memories/tea.txt","file_text":"They like tea."}'
TRAINED = THOUGHT + "<|channel|>analysis to={} code<|message|>{}<|call|>"
CITING = THOUGHT + "<|channel|>final<|message|>It is Paris【1†L4】.<|return|>"
PROMPT = "the prompt"
RESULT_OF_A_TOOL = re.compile(r"<\|start\|>(?:functions\.|browser\.|python )")
# Index of the faulty event: after the reasoning and a few words of the answer.
BROKEN_AT = 24


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
    "a shell": playing(CLIENT_TOOL.format("shell", '{"commands":["ls","pwd"]}')),
    "a local shell": playing(CLIENT_TOOL.format("local_shell", '{"command":["ls"]}')),
    "a patch": playing(CLIENT_TOOL.format("apply_patch", PATCH)),
    "a tool search": playing(CLIENT_TOOL.format("tool_search", '{"query":"weather"}')),
    "a search of Anthropic": playing(CLIENT_TOOL.format("tool_search_tool_bm25", '{"query":"weather"}')),
    "a memory": playing(CLIENT_TOOL.format("memory", MEMORY)),
    "a handoff": playing(HANDOFF),
    "a result": playing(RESULT),
    "a tool": playing(calls("echo", text="hello")),
    "a question": playing(calls("book", city="Oslo")),
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


def _is_same_token(token: int, expected: object) -> bool:
    return token == expected or (token in ENDS and expected in ENDS)


def going_on(script: VllmScript, prompt: list[int]) -> VllmScript | None:
    """Return the rest of a script after the tokens that the prompt already contains.

    None if the prompt contains none of its tokens. The end tokens of a call and of any other message count as equal.
    """
    for start in [at for at, token in enumerate(prompt) if token == generation.START]:
        generated = prompt[start + 2 :]
        expected = script.tokens[: len(generated)]
        is_prefix = len(expected) == len(generated) and all(map(_is_same_token, generated, expected))
        if prompt[start : start + 2] == ASSISTANT and generated and is_prefix:
            return replace(script, tokens=script.tokens[len(generated) :])
    return None


def script_of() -> Callable[[dict[str, Any]], VllmScript | Refusal]:
    """Return the behaviour of a new backend.

    It continues after any tokens that it generated itself. Otherwise it writes the shortest text that the constraint of
    the request allows, or `I am sorry.` after any other header.

    Two scripts depend on more than their name: `fails once ...` answers from the second request on, and `n in reverse`
    delays the choice with the higher seed.
    """
    request_counts: Counter[str] = Counter()

    def script(body: dict[str, Any]) -> VllmScript | Refusal:
        prompt = ENCODING.decode(body["prompt"])
        constraint = constraints.vllm(body)
        own = SCRIPTS.get(prompt.rpartition("script: ")[2].partition("<|")[0].partition(", then: ")[0])
        if isinstance(own, VllmScript) and (remaining := going_on(own, body["prompt"])) is not None:
            return remaining
        if constraint is not None or prompt.endswith("<|message|>"):
            return playing((constraint.example() if constraint is not None else "I am sorry.") + "<|return|>")
        _, named, rest = prompt.rpartition("script: ")
        if not named:
            return SCRIPTS["an answer"]  # a probe of the gateway
        names = rest.partition("<|")[0].split(", then: ")
        name = names[min(len(RESULT_OF_A_TOOL.findall(rest)), len(names) - 1)]
        request_counts[name] += 1
        if name == PROMPT:
            return playing(THOUGHT + f"<|channel|>final<|message|>{prompt.replace('<|', '<')}<|return|>")
        if name.startswith("fails once"):
            return SCRIPTS["an answer"] if request_counts[name] > 1 else refusing(503, "starting")
        if name == "n in reverse":
            return playing(ANSWER, first_delay_s=0.3 * (body["seed"] - 6))
        return SCRIPTS.get(name) or playing(CASES[name].output, finish=CASES[name].finish)

    return script
