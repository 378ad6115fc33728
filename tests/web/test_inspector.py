"""Inspection of text, token ids and recordings.

Repairs are at their positions, and any input gives a result or an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.harmony.recoveries import CASES
from unisono.api.error_responses import failure_of
from unisono.core.events import Repaired
from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted, StepDone
from unisono.core.recovery_rules import RULES
from unisono.engine.journal import STEP_ENDED, JournalEntry, TokenSource
from unisono.errors import InvalidRequest
from unisono.harmony.encoding import load_encoding
from unisono.observe.recording import dumped, to_document
from unisono.web.inspector import MAX_CHARACTERS, MAX_TOKENS, InspectRequest, inspected

ENCODING = load_encoding()
BEGAN = GenerationStarted(
    "req_1", "ann", "", "chat", "gpt-oss", background=False, at=1_790_000_000.0, recorded_request={}
)


def inspect(**body: Any) -> dict[str, Any]:
    """Return the inspection as it is sent. A value that JSON cannot represent fails here."""
    found: dict[str, Any] = json.loads(dumped(inspected(InspectRequest.model_validate(body))))
    return found


def as_text(segments: Sequence[dict[str, Any]]) -> str:
    """Return segments as text: bodies after their kind, repairs in brackets."""
    lines = []
    for one in segments:
        match one["kind"]:
            case "text":
                lines.append(f"{one['of']}:{''.join(piece[0] for piece in one['tokens'])}")
            case "special":
                lines.append(one["text"])
            case "repair":
                lines.append(f"[{one['rule']}]")
            case kind:
                lines.append(f"({kind})")
    return " ".join(lines)


def output_of(found: dict[str, Any]) -> str:
    return as_text(found["steps"][0]["output"])


def prompt_of(found: dict[str, Any]) -> str:
    return " ".join(as_text(prompt["segments"]) for prompt in found["steps"][0]["prompts"])


TEXTS: dict[str, tuple[str, str, str]] = {
    "output only": (
        "<|channel|>final<|message|>Hi<|return|>",
        "",
        "<|channel|> header:final <|message|> final:Hi <|return|>",
    ),
    "a conversation": (
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Yo<|return|>",
        "<|start|> header:user <|message|> user:Hi <|end|> <|start|> header:assistant",
        "<|channel|> header:final <|message|> final:Yo <|return|>",
    ),
    "prompt only": (
        "<|start|>system<|message|>Be.<|end|>",
        "<|start|> header:system <|message|> system:Be. <|end|>",
        "",
    ),
    "a tool's result in the prompt": (
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>1<|end|><|start|>assistant",
        "<|start|> header:functions.f to=assistant <|channel|> header:commentary <|message|> tool:1 <|end|> <|start|> "
        "header:assistant",
        "",
    ),
    "a call of an undeclared tool": (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "",
        "<|channel|> header:commentary to=functions.f  <|constrain|> header:json <|message|> call:{} <|call|>",
    ),
    "a repair at its position": (
        "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Yo<|return|>",
        "",
        "<|channel|> header:analysis <|message|> analysis:Hm <|channel|> [missing-end] header:final "
        "<|message|> final:Yo <|return|>",
    ),
    "a channel named twice": (
        "<|channel|>analysis<|channel|>final<|message|>Yo<|return|>",
        "",
        "<|channel|> header:analysis <|channel|> header:final <|message|> [channel-repeated] final:Yo <|return|>",
    ),
    "a misspelt channel": (
        "<|channel|>analys<|message|>Hm<|end|>",
        "",
        "<|channel|> header:analys <|message|> [channel-spelling] analysis:Hm <|end|>",
    ),
    "an unknown word in a header": (
        "<|channel|>commentary final<|message|>Yo<|return|>",
        "",
        "<|channel|> header:commentary final <|message|> [stray-header-words] commentary:Yo <|return|>",
    ),
    "a user with a name": (
        "<|start|>user:bob<|message|>Hi<|end|>",
        "<|start|> header:user:bob <|message|> user:Hi <|end|>",
        "",
    ),
    "an emoji of several tokens": (
        "<|channel|>final<|message|>🦜<|return|>",
        "",
        "<|channel|> header:final <|message|> final:🦜 <|return|>",
    ),
}


@pytest.mark.parametrize(("text", "prompt", "output"), TEXTS.values(), ids=TEXTS)
def test_segments_have_the_kinds_of_their_text(text: str, prompt: str, output: str) -> None:
    for found in (inspect(text=text), inspect(tokens=ENCODING.encode_marked(text))):
        assert prompt_of(found) == prompt
        assert output_of(found) == output


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_repair_has_its_explanation(case: Any) -> None:
    tokens = ENCODING.encode_as_server(case.output)
    found = inspect(tokens=tokens, all_output=True)
    output = found["steps"][0]["output"]
    assert all(one["why"] == RULES[one["rule"]] for one in output if one["kind"] == "repair")
    texts = [piece for one in output if one["kind"] == "text" for piece in one["tokens"]]
    assert sum(len(piece) - 1 for piece in texts) + sum(one["kind"] == "special" for one in output) == len(tokens)


def test_items_are_those_of_the_client() -> None:
    found = inspect(
        text="<|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{"
    )
    assert [(item["kind"], item["name"], item["text"], item["complete"]) for item in found["items"]] == [
        ("analysis", "", "Hm", True),
        ("call", "f", "{", False),
    ]


def test_a_prompt_can_be_read_as_output() -> None:
    text = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Yo<|return|>"
    assert "[foreign-role]" in output_of(inspect(text=text, all_output=True))


# -- recordings


def recorded(journal: Sequence[int], output: Sequence[Repaired] = (), steps: Sequence[StepDone] = ()) -> Any:
    done = GenerationDone(
        BEGAN, 1.0, GenerationOutcome.COMPLETED, finish="stop", journal=journal, output=output, steps=steps
    )
    return json.loads(dumped(to_document(done, "test", 1 << 20)))


def step(number: int, prompt: str) -> StepDone:
    return StepDone(number, "vllm-1", 0.0, 0.1, 0.2, 10, 2, 3, "stop", prompt=ENCODING.encode_marked(prompt))


def test_a_recording_is_inspected_by_steps() -> None:
    encode = ENCODING.encode_marked
    journal = [
        *JournalEntry({"able": ["json_object"]}).numbers(),
        TokenSource(guessed=True).mark,
        *encode("<|channel|>analysis<|message|>a<|channel|>final<|message|>b"),
        STEP_ENDED,
        *encode("<|channel|>final<|message|>c<|return|>"),
    ]
    steps = [
        step(0, "<|start|>user<|message|>x"),
        step(1, "<|start|>user<|message|>xy"),
        step(1, "<|start|>user<|message|>xy"),
    ]
    found = inspect(trace=recorded(journal, [Repaired("missing-end", 5)], steps))
    assert [as_text(one["output"]) for one in found["steps"]] == [
        "(aside) (aside) <|channel|> header:analysis <|message|> analysis:a <|channel|> [missing-end] header:final "
        "<|message|> final:b",
        "<|channel|> header:final <|message|> final:c <|return|>",
    ]
    assert [len(one["generations"]) for one in found["steps"]] == [1, 2]
    assert [prompt["behind"] for one in found["steps"] for prompt in one["prompts"]] == [0, 3]
    assert found["about"]["id"] == "req_1"


RECORDING = recorded(
    [*ENCODING.encode_marked("<|channel|>final<|message|>c<|return|>")],
    [Repaired("missing-end", 2)],
    [step(0, "<|start|>user<|message|>x")],
)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def damaged(path: Sequence[str | int], value: Any) -> Any:
    document = json.loads(json.dumps(RECORDING))
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return document


PATHS: list[list[str | int]] = [
    *([name] for name in RECORDING if name not in {"object", "version"}),
    *(["steps", 0, name] for name in RECORDING["steps"][0]),
    *(["steps", 0, "prompt", name] for name in ("same", "tokens", "gap")),
    *(["said", 0, name] for name in RECORDING["said"][0]),
    ["output", 0],
]


@given(st.sampled_from(PATHS), ANY_JSON)
def test_a_damaged_recording_is_inspected_or_rejected(path: list[str | int], value: Any) -> None:
    with suppress(InvalidRequest):
        inspect(trace=damaged(path, value))


HUGE_RECORDINGS: dict[str, Any] = {
    "a gap of a trillion tokens": damaged(["steps", 0, "prompt", "gap"], {"at": 1, "tokens": 10**12}),
    "a journal entry of a gigabyte": damaged(["output"], [0xFFFF_FFF8, 10**9, 5]),
    "ten thousand copies of a prompt": {
        **RECORDING,
        "steps": [{**RECORDING["steps"][0], "prompt": {"same": 10**9, "tokens": [1], "gap": None}}] * 10_000,
    },
}


@pytest.mark.parametrize("document", HUGE_RECORDINGS.values(), ids=HUGE_RECORDINGS)
def test_an_inspection_is_not_much_larger_than_its_recording(document: Any) -> None:
    try:
        found = inspect(trace=document)
    except InvalidRequest:
        return
    assert len(dumped(found)) < 2 * len(dumped(document)) + 100_000


# -- arbitrary input


@given(st.lists(st.integers(-(2**52), 2**52) | st.integers(199_990, 201_100) | st.integers(0, 201_088), max_size=40))
def test_any_token_ids_are_inspected(tokens: list[int]) -> None:
    inspect(tokens=tokens)
    inspect(tokens=tokens, all_output=True)


PIECE = st.sampled_from(
    ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "assistant", " to=functions.f", "final"]
)


@given(st.lists(PIECE | st.text(max_size=6), max_size=12).map("".join))
def test_any_text_is_inspected(text: str) -> None:
    inspect(text=text)
    inspect(text=text, all_output=True)


INVALID: dict[str, tuple[dict[str, Any], str | None]] = {
    "no input": ({}, None),
    "two inputs": ({"text": "a", "tokens": [1]}, None),
    "a number for text": ({"text": 1}, "text"),
    "too much text": ({"text": "a " * MAX_CHARACTERS}, "text"),
    "too many token ids": ({"tokens": [1] * (MAX_TOKENS + 1)}, "tokens"),
    "a boolean as a token id": ({"tokens": [1, True]}, "tokens.1"),
    "a token id that is too large": ({"tokens": [2**60]}, "tokens.0"),
    "a fraction as a token id": ({"tokens": [1.5]}, "tokens.0"),
    "an object that is not a recording": ({"trace": {"object": "x"}}, "trace"),
    "a recording of another version": ({"trace": {"object": "unisono.trace", "version": 2}}, "trace"),
    "an incomplete recording": ({"trace": {"object": "unisono.trace", "version": 1}}, "trace"),
    "a tool that is not a name": ({"text": "a", "tools": [{}]}, "tools.0"),
    "text for a boolean": ({"text": "a", "all_output": "yes"}, "all_output"),
}


@pytest.mark.parametrize(("body", "param"), INVALID.values(), ids=INVALID)
def test_an_error_names_the_invalid_field(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises((InvalidRequest, ValidationError)) as refused:
        inspect(**body)
    failure = failure_of(refused.value)
    assert isinstance(failure, InvalidRequest)
    assert failure.param == param
