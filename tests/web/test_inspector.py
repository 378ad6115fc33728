"""What the inspector makes of text, ids and recordings: every repair in its place with its sentence, and for no input
anything but an inspection or a refusal."""

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
from unisono.api.inspect_request import MAX_CHARACTERS, MAX_TOKENS, InspectRequest
from unisono.core.events import Repaired
from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted, StepDone
from unisono.core.recovery_rules import RULES
from unisono.engine.journal import STEP_ENDED, JournalEntry, TokenSource
from unisono.errors import InvalidRequest
from unisono.harmony.encoding import load_encoding
from unisono.observe.recording import dumped, to_document
from unisono.web.inspector import inspected

ENCODING = load_encoding()
BEGAN = GenerationStarted(
    "req_1", "ann", "", "chat", "gpt-oss", background=False, at=1_790_000_000.0, recorded_request={}
)


def read(**body: Any) -> dict[str, Any]:
    """As it is sent: what no JSON could hold fails here."""
    found: dict[str, Any] = json.loads(dumped(inspected(InspectRequest.model_validate(body))))
    return found


def told(segments: Sequence[dict[str, Any]]) -> str:
    """All of it as text: bodies behind what they are, repairs in brackets."""
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
    return told(found["steps"][0]["output"])


def prompt_of(found: dict[str, Any]) -> str:
    return " ".join(told(prompt["segments"]) for prompt in found["steps"][0]["prompts"])


TEXTS: dict[str, tuple[str, str, str]] = {
    "only output": (
        "<|channel|>final<|message|>Hi<|return|>",
        "",
        "<|channel|> header:final <|message|> final:Hi <|return|>",
    ),
    "a conversation": (
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Yo<|return|>",
        "<|start|> header:user <|message|> user:Hi <|end|> <|start|> header:assistant",
        "<|channel|> header:final <|message|> final:Yo <|return|>",
    ),
    "a prompt alone": (
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
    "a call, of tools that are not declared": (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "",
        "<|channel|> header:commentary to=functions.f  <|constrain|> header:json <|message|> call:{} <|call|>",
    ),
    "a repair where it was decided": (
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
    "a word that no channel is": (
        "<|channel|>commentary final<|message|>Yo<|return|>",
        "",
        "<|channel|> header:commentary final <|message|> [stray-header-words] commentary:Yo <|return|>",
    ),
    "a user with a name": (
        "<|start|>user:bob<|message|>Hi<|end|>",
        "<|start|> header:user:bob <|message|> user:Hi <|end|>",
        "",
    ),
    "a parrot": (
        "<|channel|>final<|message|>🦜<|return|>",
        "",
        "<|channel|> header:final <|message|> final:🦜 <|return|>",
    ),
}


@pytest.mark.parametrize(("text", "prompt", "output"), TEXTS.values(), ids=TEXTS)
def test_text_is_shown_as_what_it_is(text: str, prompt: str, output: str) -> None:
    for found in (read(text=text), read(tokens=ENCODING.encode_marked(text))):
        assert prompt_of(found) == prompt
        assert output_of(found) == output


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_malformed_shape_is_explained(case: Any) -> None:
    tokens = ENCODING.encode_as_server(case.output)
    found = read(tokens=tokens, all_output=True)
    output = found["steps"][0]["output"]
    assert all(one["why"] == RULES[one["rule"]] for one in output if one["kind"] == "repair")
    texts = [piece for one in output if one["kind"] == "text" for piece in one["tokens"]]
    assert sum(len(piece) - 1 for piece in texts) + sum(one["kind"] == "special" for one in output) == len(tokens)


def test_items_are_what_clients_get() -> None:
    found = read(
        text="<|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{"
    )
    assert [(item["kind"], item["name"], item["text"], item["complete"]) for item in found["items"]] == [
        ("analysis", "", "Hm", True),
        ("call", "f", "{", False),
    ]


def test_text_in_front_may_be_the_models_too() -> None:
    text = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Yo<|return|>"
    assert "[foreign-role]" in output_of(read(text=text, all_output=True))


# -- recordings


def recorded(journal: Sequence[int], said: Sequence[Repaired] = (), steps: Sequence[StepDone] = ()) -> Any:
    done = GenerationDone(
        BEGAN, 1.0, GenerationOutcome.COMPLETED, finish="stop", journal=journal, output=said, steps=steps
    )
    return json.loads(dumped(to_document(done, "test", 1 << 20)))


def step(number: int, prompt: str) -> StepDone:
    return StepDone(number, "vllm-1", 0.0, 0.1, 0.2, 10, 2, 3, "stop", prompt=ENCODING.encode_marked(prompt))


def test_a_recording_is_shown_by_its_steps() -> None:
    say = ENCODING.encode_marked
    journal = [
        *JournalEntry({"able": ["json_object"]}).numbers(),
        TokenSource(guessed=True).mark,
        *say("<|channel|>analysis<|message|>a<|channel|>final<|message|>b"),
        STEP_ENDED,
        *say("<|channel|>final<|message|>c<|return|>"),
    ]
    steps = [
        step(0, "<|start|>user<|message|>x"),
        step(1, "<|start|>user<|message|>xy"),
        step(1, "<|start|>user<|message|>xy"),
    ]
    found = read(trace=recorded(journal, [Repaired("missing-end", 5)], steps))
    assert [told(one["output"]) for one in found["steps"]] == [
        "(aside) (aside) <|channel|> header:analysis <|message|> analysis:a <|channel|> [missing-end] header:final "
        "<|message|> final:b",
        "<|channel|> header:final <|message|> final:c <|return|>",
    ]
    assert [len(one["generations"]) for one in found["steps"]] == [1, 2]
    assert [prompt["behind"] for one in found["steps"] for prompt in one["prompts"]] == [0, 3]
    assert found["about"]["id"] == "req_1"


WHOLE = recorded(
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


def spoiled(path: Sequence[str | int], value: Any) -> Any:
    document = json.loads(json.dumps(WHOLE))
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return document


PLACES: list[list[str | int]] = [
    *([name] for name in WHOLE if name not in {"object", "version"}),
    *(["steps", 0, name] for name in WHOLE["steps"][0]),
    *(["steps", 0, "prompt", name] for name in ("same", "tokens", "gap")),
    *(["said", 0, name] for name in WHOLE["said"][0]),
    ["output", 0],
]


@given(st.sampled_from(PLACES), ANY_JSON)
def test_a_spoiled_recording_is_shown_or_refused(place: list[str | int], value: Any) -> None:
    with suppress(InvalidRequest):
        read(trace=spoiled(place, value))


HUGE: dict[str, Any] = {
    "a gap of a trillion": spoiled(["steps", 0, "prompt", "gap"], {"at": 1, "tokens": 10**12}),
    "a note of a gigabyte": spoiled(["output"], [0xFFFF_FFF8, 10**9, 5]),
    "ten thousand prompts of one": {
        **WHOLE,
        "steps": [{**WHOLE["steps"][0], "prompt": {"same": 10**9, "tokens": [1], "gap": None}}] * 10_000,
    },
}


@pytest.mark.parametrize("document", HUGE.values(), ids=HUGE)
def test_a_recording_costs_no_more_than_its_size(document: Any) -> None:
    try:
        found = read(trace=document)
    except InvalidRequest:
        return
    assert len(dumped(found)) < 2 * len(dumped(document)) + 100_000


# -- anything at all


@given(st.lists(st.integers(-(2**52), 2**52) | st.integers(199_990, 201_100) | st.integers(0, 201_088), max_size=40))
def test_no_ids_are_too_strange(tokens: list[int]) -> None:
    read(tokens=tokens)
    read(tokens=tokens, all_output=True)


PIECE = st.sampled_from(
    ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "assistant", " to=functions.f", "final"]
)


@given(st.lists(PIECE | st.text(max_size=6), max_size=12).map("".join))
def test_no_text_is_too_strange(text: str) -> None:
    read(text=text)
    read(text=text, all_output=True)


REFUSED: dict[str, tuple[dict[str, Any], str | None]] = {
    "nothing": ({}, None),
    "two of them": ({"text": "a", "tokens": [1]}, None),
    "text that is none": ({"text": 1}, "text"),
    "too much text": ({"text": "a " * MAX_CHARACTERS}, "text"),
    "too many ids": ({"tokens": [1] * (MAX_TOKENS + 1)}, "tokens"),
    "ids that are no numbers": ({"tokens": [1, True]}, "tokens.1"),
    "ids too large for anybody": ({"tokens": [2**60]}, "tokens.0"),
    "fractions": ({"tokens": [1.5]}, "tokens.0"),
    "no recording": ({"trace": {"object": "x"}}, "trace"),
    "one of another version": ({"trace": {"object": "unisono.trace", "version": 2}}, "trace"),
    "a damaged one": ({"trace": {"object": "unisono.trace", "version": 1}}, "trace"),
    "tools that are no names": ({"text": "a", "tools": [{}]}, "tools.0"),
    "an unclear wish": ({"text": "a", "all_output": "yes"}, "all_output"),
}


@pytest.mark.parametrize(("body", "param"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_refused_by_its_field(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises((InvalidRequest, ValidationError)) as refused:
        read(**body)
    failure = failure_of(refused.value)
    assert isinstance(failure, InvalidRequest)
    assert failure.param == param
