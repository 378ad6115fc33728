"""Properties of the router for arbitrary tokens."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

import openai_harmony
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import examples
from tests.harmony.fold import check_lifecycle, items_of, new_router, rules_of
from tests.harmony.recoveries import CASES, C, F, P, R
from unisono.core.events import Closed, Delta, Event, Repaired, join_deltas
from unisono.core.generation import FIRST_SPECIAL, Chunk, FinishReason, OutputForm
from unisono.core.recovery_rules import RULES
from unisono.harmony.decode import decoder_for
from unisono.harmony.encoding import MARKERS, Encoding, load_encoding
from unisono.harmony.library_parser import load_library
from unisono.harmony.repair_table import STEPS, State, TokenMark

ENCODING = load_encoding()
WORDS = (
    *("assistant", "analysis", "commentary", "final", "comment", "user", "functions.f", " to=functions.f", " to=f"),
    *(" to=python", " to=", " json", "json", "{", '{"a":', "1}", " ", "\n", "–", "?", ".search", " bash", "f", "Hello"),
)
word_tokens = st.sampled_from([token for word in WORDS for token in ENCODING.encode_text(word)])
pieces = st.sampled_from([tuple(ENCODING.encode_text(word)) for word in WORDS])
marks = st.sampled_from([*MARKERS.values(), 199_999])
odd = st.sampled_from([-1, 199_998, 200_000, 200_013, 200_018, 201_087, 201_088, 2**31, 10**12])
anything = st.one_of(pieces, pieces, marks.map(lambda t: (t,)), marks.map(lambda t: (t,)), odd.map(lambda t: (t,)))
raw_bytes = st.integers(0, 255).map(lambda t: (t,))
outputs = st.lists(st.one_of(anything, raw_bytes), max_size=60).map(lambda parts: [t for part in parts for t in part])
grammatical = st.lists(st.sampled_from([case.output for case in CASES.values()]), min_size=1, max_size=3).map(
    lambda texts: ENCODING.encode_as_server("<|start|>assistant".join(texts))
)


@st.composite
def mutated_outputs(draw: st.DrawFn) -> list[int]:
    """Draw grammatical output with dropped, doubled, swapped and inserted tokens."""
    tokens = list(draw(grammatical))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, max(0, len(tokens) - 1)))
        match draw(st.sampled_from(["drop", "double", "swap", "insert", "cut"])):
            case "drop":
                tokens[at : at + 1] = []
            case "double":
                tokens[at:at] = tokens[at : at + 1]
            case "swap":
                tokens[at : at + 2] = tokens[at : at + 2][::-1]
            case "insert":
                tokens.insert(at, draw(st.integers(-1, 201_100)))
            case _:
                tokens = tokens[:at]
    return tokens


streams = st.one_of(outputs, mutated_outputs())
reasons = st.sampled_from(list(FinishReason))


def run(
    parts: Sequence[Sequence[int]], reason: FinishReason, *, hidden: bool = False, hold: bool = True
) -> list[Event]:
    router = new_router(ENCODING, hold_calls=hold)
    events: list[Event] = []
    for part in parts:
        events += router.feed(part)
    return events + router.end(reason, stop_hidden=hidden)


def cut_at(tokens: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    return [tokens[a:b] for a, b in pairwise(edges)]


@settings(max_examples=examples(400), deadline=None)
@given(streams, reasons, st.booleans(), st.booleans())
def test_any_tokens_give_items_with_a_valid_lifecycle(
    tokens: list[int], reason: FinishReason, hidden: bool, hold: bool
) -> None:
    events = run([tokens], reason, hidden=hidden, hold=hold)
    check_lifecycle(events)
    assert {event.rule for event in events if isinstance(event, Repaired)} <= RULES.keys()


@settings(max_examples=examples(400), deadline=None)
@given(streams, reasons, st.booleans(), st.lists(st.integers(0, 10_000), max_size=8))
def test_events_do_not_depend_on_chunk_boundaries(
    tokens: list[int], reason: FinishReason, hidden: bool, cuts: list[int]
) -> None:
    whole = join_deltas(run([tokens], reason, hidden=hidden))
    assert join_deltas(run(cut_at(tokens, cuts), reason, hidden=hidden)) == whole
    assert join_deltas(run([[token] for token in tokens], reason, hidden=hidden)) == whole


@settings(max_examples=examples(300), deadline=None)
@given(streams, reasons)
def test_no_marker_is_emitted_as_text(tokens: list[int], reason: FinishReason) -> None:
    # No ordinary token in these streams spells a marker, so that an emitted marker was a control token.
    for event in run([tokens], reason, hold=False):
        if isinstance(event, Delta | Closed):
            assert "<|" not in event.text
            assert not any(0xD800 <= ord(c) < 0xE000 for c in event.text)


@settings(max_examples=examples(300), deadline=None)
@given(streams, reasons)
def test_a_truncated_message_is_never_a_call(tokens: list[int], reason: FinishReason) -> None:
    for event in run([tokens], reason):
        if isinstance(event, Closed) and event.tokens and isinstance(items_of([event])[0], C):
            assert event.complete
            assert event.tokens[-1] >= FIRST_SPECIAL


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
stops = st.sampled_from(["<|end|>", "<|return|>", "<|call|>"])
headers = st.sampled_from(
    [
        ("<|channel|>analysis", R),
        ("<|channel|>commentary", P),
        ("<|channel|>final", F),
        ("<|channel|>commentary to=functions.f <|constrain|>json", C),
        (" to=functions.f<|channel|>commentary <|constrain|>json", C),
        ("<|channel|>commentary to=functions.f code", C),
        ("<|channel|>analysis to=f json", C),
    ]
)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(headers, texts, st.sampled_from(["<|end|>", "<|return|>", "<|call|>"])), min_size=1, max_size=5)
)
def test_well_formed_output_is_read_as_by_openai_harmony(
    messages: list[tuple[tuple[str, type], str, str]],
) -> None:
    tokens: list[int] = []
    for n, ((header, _), text, stop) in enumerate(messages):
        start = "<|start|>assistant" if n else ""
        tokens += ENCODING.encode_marked(f"{start}{header}<|message|>")
        tokens += [*ENCODING.encode_text(text), *ENCODING.encode_marked(stop)]
    theirs = load_library().parse_messages_from_completion_tokens(tokens, openai_harmony.Role.ASSISTANT)
    events = run([tokens], FinishReason.STOP)
    assert rules_of(events) == ()
    assert [event.text for event in events if isinstance(event, Closed)] == [m.content[0].text for m in theirs]
    assert [type(item) for item in items_of(events)] == [kind for (_, kind), _, _ in messages]


HEADER_DEBRIS = {"stray-header-words", "channel-repeated", "constrain-repeated", "recipient-repeated", "doubled-start"}
# Rules that may drop a word, since it was a part of a header or of a dropped message.
DROPPING = HEADER_DEBRIS | {
    *("free-text-between", "foreign-role", "unfinished-call", "cut-header", "unknown-channel", "marker-in-recipient"),
    *("type-as-recipient", "glued-role", "header-order", "not-a-tool", "empty-channel", "channel-spelling"),
}


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.one_of(st.just("word"), st.just("word"), marks.map(str)), max_size=50), reasons)
def test_every_word_is_emitted_once_in_order_or_its_loss_is_reported(script: list[str], reason: FinishReason) -> None:
    tokens: list[int] = []
    words: list[str] = []
    for n, part in enumerate(script):
        if part == "word":
            words.append(f" w{n}.")
            tokens += ENCODING.encode_text(words[-1])
        else:
            tokens.append(int(part))
    events = run([tokens], reason)
    emitted = "|".join(event.text for event in events if isinstance(event, Closed))
    position = 0
    for word in words:
        found = emitted.find(word.strip(), position)
        if found < 0:
            assert DROPPING & set(rules_of(events))
        else:
            position = found + 1
            assert emitted.count(word.strip()) == 1


# Tokens of incomplete characters, and words that they may follow.
FRAGMENTS = [
    token for token in range(0, FIRST_SPECIAL, 7) if "\ufffd" in ENCODING.decode([token])
] + ENCODING.encode_text("“It’s 日本語 🙂 नमस्ते")


@settings(max_examples=examples(400))
@given(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.integers(0, FIRST_SPECIAL - 1)), max_size=12), st.data())
def test_invalid_utf8_does_not_affect_the_surrounding_text(body: list[int], data: st.DataObject) -> None:
    head, stop = (ENCODING.encode_marked(text) for text in ("<|channel|>final<|message|>", "<|return|>"))
    cut = data.draw(st.integers(0, len(body)))
    events = run([[*head, *body[:cut]], [*body[cut:], *stop]], FinishReason.STOP)
    check_lifecycle(events)
    assert items_of(events) == (F(ENCODING.decode(body)),)


def test_every_state_and_token_mark_has_a_step() -> None:
    assert set(STEPS) == {(state, mark) for state in State for mark in TokenMark}
    assert {rule for _, rule in STEPS.values() if rule} <= RULES.keys()


HOSTILE = {
    "starts": [MARKERS["<|start|>"]],
    "channels": [MARKERS["<|channel|>"]],
    "constrains": [MARKERS["<|constrain|>"]],
    "messages": [MARKERS["<|message|>"]],
    "ends": [MARKERS["<|end|>"]],
    "words without any header": ENCODING.encode_text(" word"),
    "recipients with repeated starts": ENCODING.encode_marked(" to=functions.f<|start|>assistant"),
    "empty messages": ENCODING.encode_marked("<|start|>assistant<|channel|>final<|message|><|end|>"),
    "gaps": ENCODING.encode_marked("<|end|>prose<|start|>"),
    "incomplete characters": [t for t in range(256) if ENCODING.decode_bytes([t])[0] >= 0xF0][:1],
}


LONG_HEADERS = {
    "white space": ("<|channel|>final", "\n", "<|channel|><|call|>"),
    "white space after a recipient": ("<|channel|>commentary to=functions.f", " \n", "<|channel|><|call|>"),
    "recipients": ("<|channel|>commentary", " to=f", "<|call|>"),
    "a long name": ("<|channel|>commentary to=functions.", "a", "<|message|>{}<|call|>"),
    "a name of many parts": ("<|channel|>commentary to=f", ".<|x|>f", "<|message|>{}<|call|>"),
    "repeated role": ("assistant", "assistant", "<|message|>{}<|call|>"),
    "words": ("<|channel|>", "word ", "<|channel|>final<|message|>ok<|return|>"),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("lead", "unit", "rest"), LONG_HEADERS.values(), ids=LONG_HEADERS)
def test_a_very_long_header_is_read_in_linear_time(lead: str, unit: str, rest: str) -> None:
    # Calls do not measure the work inside a regular expression. Quadratic work takes minutes for this length.
    tokens = [*ENCODING.encode_marked(lead), *ENCODING.encode_text(unit) * 60_000, *ENCODING.encode_marked(rest)]
    began = time.process_time()
    run([tokens], FinishReason.STOP)
    assert time.process_time() - began < 4


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_work_grows_linearly_with_the_number_of_tokens(unit: list[int]) -> None:
    small, large = (calls_of(unit * n) for n in (400, 1600))
    assert large < 5 * small


def calls_of(tokens: list[int]) -> int:
    """Return the number of calls, including C functions, for routing `tokens` one by one."""
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    router = new_router(ENCODING)
    sys.setprofile(profile)
    try:
        for token in tokens:
            router.feed([token])
        router.end(FinishReason.STOP)
    finally:
        sys.setprofile(None)
    return count


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(WORDS), st.sampled_from([*MARKERS, "<|", "|>", "<|st"])), max_size=30), st.data()
)
def test_text_is_read_the_same_for_any_chunk_boundaries(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    form = data.draw(st.sampled_from([OutputForm.TEXT, OutputForm.MARKERLESS]))
    cuts = data.draw(st.lists(st.integers(0, 10_000), max_size=6))
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    readings = []
    for ends in (edges, [0, len(text)], range(len(text) + 1)):
        decoder = decoder_for(form, ENCODING)
        tokens: list[int] = []
        for a, b in pairwise(ends):
            tokens += decoder.feed(Chunk(text=text[a:b]))
        events = run([[*tokens, *decoder.end()]], FinishReason.STOP, hidden=True)
        readings.append((items_of(events), rules_of(events)))
    assert readings[0] == readings[1] == readings[2]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from(WORDS), st.sampled_from([*MARKERS, "<|", '{"', '\\"', '"', " to="])), max_size=30
    ),
    st.data(),
)
def test_a_decoder_continues_the_tokens_of_another_decoder(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cut = data.draw(st.integers(0, len(text)))
    whole, first = decoder_for(OutputForm.TEXT, ENCODING), decoder_for(OutputForm.TEXT, ENCODING)
    expected = [*whole.feed(Chunk(text=text)), *whole.end()]
    tokens = list(first.feed(Chunk(text=text[:cut])))
    # A backend that continues the tokens of the first decoder generates its buffered text again.
    second = decoder_for(OutputForm.TEXT, ENCODING, generated=tokens)
    tokens += [*second.feed(Chunk(text=text[len(ENCODING.decode(tokens)) :])), *second.end()]
    assert ENCODING.special_ids(tokens) == ENCODING.special_ids(expected)
    assert ENCODING.decode(tokens) == ENCODING.decode(expected) == text


@settings(max_examples=examples(200), deadline=None)
@given(st.text(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_arguments_in_text_output_are_preserved_exactly(value: str, cuts: list[int]) -> None:
    value = value.encode("utf-8", "replace").decode()
    body = json.dumps({"v": value + "<|call|><|start|>assistant"}, ensure_ascii=False)
    text = f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{body}<|call|>"
    edges = sorted({0, len(text), *(cut % len(text) for cut in cuts)})
    decoder = decoder_for(OutputForm.TEXT, ENCODING)
    tokens: list[int] = []
    for a, b in pairwise(edges):
        tokens += decoder.feed(Chunk(text=text[a:b]))
    assert items_of(run([[*tokens, *decoder.end()]], FinishReason.STOP)) == (C("f", body),)


def test_the_marker_ids_match_the_encoding(encoding: Encoding) -> None:
    assert encoding.special_names >= set(MARKERS)
    for name, token in MARKERS.items():
        assert load_library().encode(name, allowed_special="all") == [token]
