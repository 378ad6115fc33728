"""Detection and removal of blanks outside of strings, for any split of the body into tokens."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import examples
from unisono.harmony.blanks import BLANKS, MAX_BLANKS, BlankFilter
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
STRING_OR_RUN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|[ \t\r\n]+', re.DOTALL)
SPLIT_CHARACTER = next(token for token in range(199_998) if ENCODING.decode_bytes([token]) == b"\x95\n\n")

blanks = st.builds(
    lambda text, times: text * times, st.sampled_from([" ", "\n", "\t", "\r\n", "  \n"]), st.integers(1, 90)
)
strings = st.builds(
    lambda parts: '"' + "".join(parts) + '"',
    st.lists(st.one_of(blanks, st.sampled_from(["a", "é", "\N{OK HAND SIGN}", '\\"', "\\\\", "{", "]", "\u2028"]))),
)
bodies = st.lists(st.one_of(blanks, strings, st.sampled_from([*'{}[],:1"', "null", "╕"]))).map("".join)


def removed_run(text: str) -> tuple[int, int] | None:
    """Return start and detection position of the first long run of blanks outside of strings."""
    for found in STRING_OR_RUN.finditer(text):
        if found[0][0] in BLANKS and len(found[0]) > MAX_BLANKS:
            return found.start(), found.start() + MAX_BLANKS + 1
    return None


@settings(max_examples=examples(300), deadline=None)
@given(bodies, st.lists(st.integers(0, 10_000)))
def test_blanks_are_removed_for_any_split_into_tokens(text: str, cuts: list[int]) -> None:
    raw = text.encode()
    edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    # Tokens of parts of the text; a part may begin or end inside a character.
    tokens = [token for a, b in pairwise(edges) for token in tokens_of(raw[a:b])]
    assert ENCODING.decode_bytes(tokens) == raw
    found, filter_ = removed_run(text), BlankFilter()
    emitted, previous_length = "", 0
    for position in range(len(tokens)):
        read = ENCODING.decode_bytes(tokens[: position + 1]).decode("utf-8", "ignore")
        new, previous_length = read[previous_length:], len(read)
        if new:
            emitted += filter_.feed(new, position)
        assert text.startswith(emitted)
        if filter_.is_too_long:
            break
    assert filter_.is_too_long is (found is not None)
    if found is not None:
        assert emitted == text[: found[0]]
        assert ENCODING.decode(filter_.trimmed(ENCODING, tokens[: position + 1])) == emitted


def tokens_of(raw: bytes) -> list[int]:
    try:
        return list(ENCODING.encode_text(raw.decode()))
    except UnicodeDecodeError:
        return [SINGLE_BYTES[byte] for byte in raw]


SINGLE_BYTES = {raw[0]: token for token in range(256) if len(raw := ENCODING.decode_bytes([token])) == 1}


def test_a_character_that_ends_in_the_first_blank_token_stays_whole() -> None:
    start_tokens = [*ENCODING.encode_text("{}"), SINGLE_BYTES[0xE2], SINGLE_BYTES[0x95]]
    assert ENCODING.decode_bytes([*start_tokens, SPLIT_CHARACTER]).decode() == "{}╕\n\n"
    body, filter_ = [*start_tokens, SPLIT_CHARACTER, *ENCODING.encode_text("\n" * MAX_BLANKS)], BlankFilter()
    assert filter_.feed("{}", 0) + filter_.feed("╕\n\n", len(start_tokens)) == "{}╕"
    filter_.feed("\n" * MAX_BLANKS, len(body) - 1)
    assert filter_.is_too_long
    assert ENCODING.decode(filter_.trimmed(ENCODING, body)) == "{}╕"
