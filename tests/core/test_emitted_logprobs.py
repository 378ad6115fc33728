"""Log probabilities are matched to the emitted text, whatever the gateway does to it."""

from __future__ import annotations

from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.emitted_logprobs import LogprobLog
from unisono.core.generation import TokenLogprob
from unisono.harmony.encoding import load_encoding
from unisono.harmony.item_reader import TableBodyText

ENCODING = load_encoding()


def log_of(marked: str, *, opened: bool = False) -> tuple[LogprobLog, list[int]]:
    tokens = ENCODING.encode_marked(marked)
    log = LogprobLog(lambda token: ENCODING.decode_bytes([token]))
    log.start_generation()
    log.add(tokens, [TokenLogprob(token, -1.0) for token in tokens])
    del opened
    return log, tokens


def spelled(found: list[tuple[bytes, TokenLogprob]]) -> str:
    return b"".join(content for content, _ in found).decode("utf-8", "replace")


ANSWER = "<|channel|>analysis<|message|>Hello there<|end|><|start|>assistant<|channel|>final<|message|>"


def test_only_tokens_of_the_text_count() -> None:
    log, _ = log_of(f"{ANSWER}Hello world<|return|>")
    assert spelled(log.emitted(1, "Hello world")) == "Hello world"


# case: (output with a message without `<|message|>`, text that the gateway reads from the header of this message)
HEADERS: dict[str, tuple[str, str]] = {
    "text after a channel": ("<|channel|>final Oslo is in Norway.<|return|>", "Oslo is in Norway."),
    "text after a role": (f"{ANSWER}Oslo<|end|><|start|>assistant Oslo is far.<|return|>", "Oslo is far."),
    "text instead of a channel": ("<|channel|>é<|end|>", "é"),
    "text with the first word of a body": (
        "<|channel|>analysis<|message|>Oslo<|end|><|start|>assistant<|channel|>final Oslo is far.<|return|>",
        "Oslo is far.",
    ),
    "text like the header of the next message": (
        "<|channel|>final assistant or not?<|end|><|start|>assistant<|channel|>analysis<|message|>x<|end|>",
        "assistant or not?",
    ),
}


@pytest.mark.parametrize(("marked", "text"), HEADERS.values(), ids=HEADERS)
def test_text_of_a_header_has_log_probabilities(marked: str, text: str) -> None:
    log, _ = log_of(marked)
    assert spelled(log.emitted(1, text)).lstrip() == text


def test_the_header_of_the_next_message_is_not_the_beginning_of_a_text() -> None:
    log, _ = log_of("<|channel|>final<|message|>a cat<|end|><|start|>assistant<|channel|>final")
    assert spelled(log.emitted(0, "a")) + spelled(log.emitted(0, " cat")) == "a cat"


FENCED = {
    # case: (body, emitted text, tokens of the text)
    "language": ('```json\n{"a":1}\n```', '{"a":1}', '{"a":1'),
    "no language": ('```\n{"a":1}\n```', '{"a":1}', '{"a":1'),
    "blank lines": ("\n\n```json\r\n\n  [1] \n```", "\n  [1]", "  [1]"),
    "a longer answer": ("```\nfirst\nsecond\n```", "first\nsecond", "first\nsecond"),
}


@pytest.mark.parametrize(("body", "text", "found"), FENCED.values(), ids=FENCED)
def test_text_without_its_code_fence_has_log_probabilities(body: str, text: str, found: str) -> None:
    log, _ = log_of(f"{ANSWER}{body}<|return|>")
    assert spelled(log.emitted(1, text)).rstrip("\n").endswith(found)


def test_text_of_a_header_may_begin_with_a_line_break() -> None:
    log, _ = log_of(f"{ANSWER}a<|end|><|start|>assistant\n``` hello<|return|>")
    assert spelled(log.emitted(1, "\n``` hello")) == "\n``` hello"


def test_pieces_complete_tokens() -> None:
    log, _ = log_of(f"{ANSWER}Hello world, what a day<|return|>")
    pieces = [spelled(log.emitted(1, piece)) for piece in ("Hel", "lo wor", "ld, what", " a day")]
    assert "".join(pieces) == "Hello world, what a day"
    assert pieces[0] == ""


def test_a_character_of_several_tokens() -> None:
    log, tokens = log_of(f"{ANSWER}a 🦜 b<|return|>")
    assert sum(len(log.emitted(1, letter)) for letter in "a 🦜 b") == len(ENCODING.encode_marked("a 🦜 b"))
    assert tokens


def test_text_of_the_gateway_has_none() -> None:
    log, _ = log_of(f"{ANSWER}one two<|return|>")
    assert spelled(log.emitted(1, "one, and ")) == "one"
    assert spelled(log.emitted(1, "really two")) == " two"
    assert log.emitted(2, "Something else entirely") == []


def test_a_dropped_attempt_is_skipped() -> None:
    log, _ = log_of("<|channel|>final<|message|>{wrong<|return|>")
    log.start_generation()
    more = ENCODING.encode_marked('{"a": 1}<|return|>')
    log.add(more, [TokenLogprob(token, -2.0) for token in more])
    found = log.emitted(0, '{"a": 1}')
    assert spelled(found) == '{"a": 1}'
    assert {value.logprob for _, value in found} == {-2.0}


# case: (text of the first message, text of the second message)
SAME_BEGINNING: dict[str, tuple[str, str]] = {
    "a longer text": ("a b c", "a b cd"),
    "the same text": ("a b c", "a b c"),
    "a shorter text": ("a b cd", "a b"),
    "a longer token": ("cat", "catalog cat"),
}


@pytest.mark.parametrize("is_early", [False, True], ids=["emitted after both", "emitted at once"])
@pytest.mark.parametrize(("first", "second"), SAME_BEGINNING.values(), ids=SAME_BEGINNING)
def test_a_message_with_the_same_beginning_does_not_change_the_values(first: str, second: str, is_early: bool) -> None:
    log = LogprobLog(lambda token: ENCODING.decode_bytes([token]))
    log.start_generation()
    found: list[list[tuple[bytes, TokenLogprob]]] = []
    for number, text in enumerate((first, second)):
        tokens = ENCODING.encode_marked(f"<|start|>assistant<|channel|>final<|message|>{text}<|end|>")
        log.add(tokens, [TokenLogprob(token, -1.0 - number) for token in tokens])
        log.count_read(5)
        log.open_text(number)
        log.count_read(len(tokens) - 5)
        log.close_text(number)
        found += [log.emitted(number, text)] if is_early else []
    found = found or [log.emitted(number, text) for number, text in enumerate((first, second))]
    assert [spelled(each) for each in found] == [first, second]
    assert [{value.logprob for _, value in each} for each in found] == [{-1.0}, {-2.0}]


def test_text_that_the_gateway_adds_at_the_end_has_no_values_of_the_next_message() -> None:
    log, tokens = log_of(f"{ANSWER}a b<|end|><|start|>assistant<|channel|>final<|message|> c<|return|>")
    log.count_read(len(tokens) - 6)
    log.open_text(1)
    log.close_text(1)
    assert spelled(log.emitted(1, "a b c")) == "a b"


def test_a_message_that_is_generated_again_has_the_values_of_its_last_tokens() -> None:
    log, tokens = log_of("<|channel|>final<|message|>a b cd<|return|>")
    log.count_read(len(tokens))
    log.open_text(0)
    log.close_text(0)
    log.start_generation()
    more = ENCODING.encode_marked("<|channel|>final<|message|>a b c<|return|>")
    log.add(more, [TokenLogprob(token, -2.0) for token in more])
    log.count_read(3)
    log.open_text(0)
    assert [value.logprob for _, value in log.emitted(0, "a b c")] == [-2.0] * 3


def test_tokens_without_a_value_are_left_out() -> None:
    tokens = ENCODING.encode_marked("<|channel|>final<|message|>one two three")
    log = LogprobLog(lambda token: ENCODING.decode_bytes([token]))
    log.add(tokens, [None if token == tokens[-1] else TokenLogprob(token, -1.0) for token in tokens])
    assert spelled(log.emitted(0, "one two three")) == "one two"


HI = 12194
# Bodies with invalid UTF-8: token 222 and the first token of the emoji are only a part of a character.
INVALID: dict[str, list[int]] = {
    "first": [222, HI, HI, 11],
    "in the middle": [HI, 222, HI, 11],
    "twice": [HI, 222, 222, HI],
    "last": [HI, HI, 222],
    "after a space": [HI, 220, 222, HI],
    "after a part of a character": [HI, *ENCODING.encode_text("🦜")[:1], HI, 11],
    "before a character of several tokens": [222, *ENCODING.encode_text("🦜"), HI],
}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("body", INVALID.values(), ids=INVALID)
def test_bytes_that_are_not_utf8_have_log_probabilities(body: list[int], is_streamed: bool) -> None:
    tokens = [*ENCODING.encode_marked("<|channel|>final<|message|>"), *body, *ENCODING.encode_marked("<|return|>")]
    log = LogprobLog(lambda token: ENCODING.decode_bytes([token]))
    log.start_generation()
    parser, found, emitted = TableBodyText(ENCODING), [], ""
    parser.start()
    for token in tokens if is_streamed else ():
        log.add([token], [TokenLogprob(token, -1.0)])
        if token in body and (piece := parser.text_of([token])):
            found += log.emitted(0, piece)
            emitted += piece
    if not is_streamed:
        log.add(tokens, [TokenLogprob(token, -1.0) for token in tokens])
    if rest := ENCODING.decode(body)[len(emitted) :]:
        found += log.emitted(0, rest)
    assert [value.token for _, value in found] == body
    assert b"".join(content for content, _ in found) == ENCODING.decode_bytes(body)


@given(st.text(min_size=1, max_size=40), st.lists(st.integers(1, 5), max_size=20))
def test_all_tokens_of_any_text_are_found_once(text: str, sizes: list[int]) -> None:
    content = text.encode("utf-8", "replace").decode()
    tokens = [*ENCODING.encode_marked("<|channel|>final<|message|>"), *ENCODING.encode_text(content)]
    log = LogprobLog(lambda token: ENCODING.decode_bytes([token]))
    log.add(tokens, [TokenLogprob(token, -1.0) for token in tokens])
    pieces, rest = [], content
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    found = [value.token for piece in (*pieces, rest) for _, value in log.emitted(0, piece) if piece]
    assert found == tokens[3:]


@pytest.mark.slow
def test_the_time_for_a_whole_answer_is_linear_in_its_length() -> None:
    def seconds(count: int) -> float:
        log, _ = log_of(f"{ANSWER}{' hello' * count}<|return|>")
        started = process_time()
        assert len(log.emitted(1, " hello" * count)) == count
        return process_time() - started

    # Eight times as many tokens; a quadratic match would take about 64 times as long.
    assert seconds(160_000) < 24 * max(min(seconds(20_000) for _ in range(3)), 0.01)
