"""The plan's tables and the small pure parts of it: nothing is missing, and nothing goes on for ever."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.planning import ENCODING
from unisono.core.recovery_rules import RULES, SWITCHABLE
from unisono.engine.interventions.policy import (
    CLOSING,
    OPENING,
    BodyAction,
    BodyFault,
    HeaderAction,
    MessageKind,
    Obligation,
)
from unisono.engine.interventions.reading_limits import (
    MAX_PERIOD_TOKENS,
    REASONING_REPEAT_TOKENS,
    REPEAT_TOKENS,
    repeats,
)
from unisono.engine.interventions.tool_names import MAX_NAME_TOKENS, ToolNaming


def test_every_message_has_its_act_whatever_is_owed() -> None:
    assert OPENING.keys() == set(product(Obligation, MessageKind))


def test_every_body_has_its_end() -> None:
    assert CLOSING.keys() == set(product(MessageKind, BodyFault))


def test_where_a_call_is_owed_nothing_but_thoughts_and_that_call_is_let_through() -> None:
    passed = {
        message
        for message in MessageKind
        if OPENING[Obligation.CALL, message] in (HeaderAction.PASS, HeaderAction.GUIDE)
    }
    assert passed == {MessageKind.THOUGHT, MessageKind.WANTED}


def test_only_what_is_wrong_is_generated_again() -> None:
    again = {pair for pair, end in CLOSING.items() if end is BodyAction.REGENERATE}
    assert not [pair for pair in again if pair[1] is BodyFault.NONE]
    assert (MessageKind.CALL, BodyFault.BROKEN) in again
    assert (MessageKind.CALL, BodyFault.UNLIKE) not in again


def test_what_can_be_switched_off_is_a_known_rule() -> None:
    assert RULES.keys() >= SWITCHABLE


NAMES: dict[str, tuple[tuple[str, ...], str, str | None]] = {
    "a whole name": (("functions.get", "functions.get_all"), ".get_all <|constrain|>json", "functions.get_all"),
    "a name that another begins with": (("functions.get", "functions.get_all"), ".get <|constrain|>", "functions.get"),
    "the same, and nothing behind it": (("functions.get", "functions.get_all"), ".get", "functions.get"),
    "the beginning of one name": (("functions.weather", "functions.add"), ".wea", "functions.weather"),
    "the beginning of two names": (("functions.weather", "functions.web"), ".we<|message|>", None),
    "a doubled prefix": (("functions.a", "functions.b"), ".functions.b<|message|>", "functions.b"),
    "a colon for the dot": (("functions.aa", "functions.bb"), ":bb<|message|>", None),
    "a glued type": (("functions.aa", "functions.bb"), ".bbjson<|message|>", "functions.bb"),
    "a trained tool": (("functions.aa", "browser.search"), "browser.search code<|message|>", "browser.search"),
    "a function beside a trained tool": (("functions.aa", "python"), "functions.aa <|message|>", "functions.aa"),
    "nothing": (("functions.a", "functions.b"), "<|return|>", None),
    "prose": (("functions.a", "functions.b"), " I think that", None),
}


@pytest.mark.parametrize(("recipients", "said", "meant"), NAMES.values(), ids=NAMES)
def test_a_name_is_read_as_the_one_tool_it_can_mean(recipients: tuple[str, ...], said: str, meant: str | None) -> None:
    naming = ToolNaming(ENCODING, recipients)
    found: str | None = None
    for token in ENCODING.encode_as_server(said):
        found, known = naming.read(token)
        if known:
            break
    else:
        found, _ = naming.found(is_complete=True)
    assert found == meant


def test_every_choice_is_a_whole_name_behind_what_the_prompt_ends_in() -> None:
    recipients = ("functions.a", "python", "browser.open")
    naming = ToolNaming(ENCODING, recipients)
    stem = ENCODING.decode(naming.header)
    assert [f"{stem}{text}" for text in naming.choices.texts] == [
        f"<|channel|>commentary to={recipient}" for recipient in recipients
    ]


@pytest.mark.parametrize("name", ["get_weather", "add", "x", "_y", "a-b", "9", "search_all"])
def test_the_prompt_ends_where_a_token_ends_whichever_tool_it_is(name: str) -> None:
    naming = ToolNaming(ENCODING, (f"functions.{name}", "functions.other"))
    whole = ENCODING.encode_marked(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")
    assert tuple(whole[: len(naming.header)]) == naming.header


def test_a_name_that_never_ends_is_given_up() -> None:
    naming = ToolNaming(ENCODING, ("functions.aa", "functions.ab"))
    read = 0
    for token in ENCODING.encode_text("z" * 4_000):
        read += 1
        if naming.read(token)[1]:
            break
    assert read <= MAX_NAME_TOKENS


ZEROS = ENCODING.encode_text("0, " * 1_000)
ROW = ENCODING.encode_text("| 2026-01-01 | nothing to report | 0.00 | - |\n")
BASE64 = ENCODING.encode_text("QUJD" * 1_000)
CODE = ENCODING.encode_text("    assert value == expected, message\n" * 150)
REPEATED: dict[str, tuple[list[int], bool]] = {
    "one token": ([7] * (REPEAT_TOKENS + 1), True),
    "one token, not often enough": ([7] * REPEAT_TOKENS, False),
    "a few tokens": ([1, 2, 3] * REPEAT_TOKENS, True),
    "a few tokens, not often enough": ([*range(1_000), *[1, 2, 3] * (REPEAT_TOKENS // 3)], False),
    "a few tokens behind others": ([*range(1_000), *[1, 2, 3] * REPEAT_TOKENS], True),
    "the longest period": (list(range(MAX_PERIOD_TOKENS)) * 65, True),
    "the longest period, not often enough": (list(range(MAX_PERIOD_TOKENS)) * 64, False),
    "a longer one": (list(range(MAX_PERIOD_TOKENS + 1)) * 80, False),
    "a period with a part that is repeated": (([7] * 60 + [8]) * 80, True),
    "one token where it was another for once": ([*[7] * 4_000, 8, *[7] * 4_000], False),
    "something else at the end": ([*[7] * 6_000, 8], False),
    "a number that counts": ([n for at in range(4_000) for n in (5, at)], False),
    "a list of a thousand zeros": (ZEROS, False),
    "a table of two hundred equal rows": (ROW * 200, False),
    "data of one letter group": (BASE64, False),
    "equal lines of code": (CODE, False),
    "a table that never ends": (ROW * 600, True),
    "nothing": ([], False),
}


@pytest.mark.parametrize(("tokens", "repeated"), REPEATED.values(), ids=REPEATED)
def test_only_a_long_repetition_of_little_is_one(tokens: list[int], repeated: bool) -> None:
    assert repeats(tokens, 0) is repeated
    # What was before the generation is no part of it.
    before = [*tokens[:MAX_PERIOD_TOKENS], *tokens]
    assert repeats(before, min(MAX_PERIOD_TOKENS, len(tokens))) is repeated


def test_less_is_enough_in_thoughts() -> None:
    assert repeats(ROW * 60, 0, REASONING_REPEAT_TOKENS)
    assert not repeats(ROW * 60, 0)


def repeats_in_any_way(tokens: Sequence[int], length: int) -> bool:
    """What it means, word by word."""
    return any(
        len(tokens) >= length + period and all(tokens[-1 - at] == tokens[-1 - at - period] for at in range(length))
        for period in range(1, MAX_PERIOD_TOKENS + 1)
    )


@given(
    st.lists(st.integers(0, 2), max_size=80),
    st.lists(st.integers(0, 1), min_size=1, max_size=MAX_PERIOD_TOKENS + 2),
    st.integers(REASONING_REPEAT_TOKENS - 4, REASONING_REPEAT_TOKENS + MAX_PERIOD_TOKENS + 4),
)
def test_whatever_the_period_is_it_is_found(before: list[int], period: list[int], size: int) -> None:
    tokens = [*before, *(period * size)[:size]]
    assert repeats(tokens, 0, REASONING_REPEAT_TOKENS) is repeats_in_any_way(tokens, REASONING_REPEAT_TOKENS)
