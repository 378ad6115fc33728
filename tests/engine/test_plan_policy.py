"""Tables and pure functions of the interventions: completeness, tool names and repetition."""

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
from unisono.engine.interventions.prompt_edit import MAX_NAME_TOKENS, ToolNaming
from unisono.harmony.repetition import MAX_PERIOD_TOKENS, REASONING_REPEAT_TOKENS, REPEAT_TOKENS, repeats


def test_every_obligation_and_message_kind_has_a_header_action() -> None:
    assert OPENING.keys() == set(product(Obligation, MessageKind))


def test_every_message_kind_and_body_fault_has_a_body_action() -> None:
    assert CLOSING.keys() == set(product(MessageKind, BodyFault))


def test_only_reasoning_and_the_call_pass_while_a_call_is_owed() -> None:
    passed = {
        message
        for message in MessageKind
        if OPENING[Obligation.CALL, message] in (HeaderAction.PASS, HeaderAction.GUIDE)
    }
    assert passed == {MessageKind.THOUGHT, MessageKind.WANTED}


def test_only_faulty_bodies_are_regenerated() -> None:
    again = {pair for pair, end in CLOSING.items() if end is BodyAction.REGENERATE}
    assert not [pair for pair in again if pair[1] is BodyFault.NONE]
    assert (MessageKind.CALL, BodyFault.BROKEN) in again
    assert (MessageKind.CALL, BodyFault.UNLIKE) not in again


def test_every_switchable_rule_is_known() -> None:
    assert RULES.keys() >= SWITCHABLE


NAMES: dict[str, tuple[tuple[str, ...], str, str | None]] = {
    "a whole name": (("functions.get", "functions.get_all"), ".get_all <|constrain|>json", "functions.get_all"),
    "prefix of another name": (("functions.get", "functions.get_all"), ".get <|constrain|>", "functions.get"),
    "prefix of another name, nothing after it": (("functions.get", "functions.get_all"), ".get", "functions.get"),
    "beginning of one name": (("functions.weather", "functions.add"), ".wea", "functions.weather"),
    "beginning of two names": (("functions.weather", "functions.web"), ".we<|message|>", None),
    "a doubled prefix": (("functions.a", "functions.b"), ".functions.b<|message|>", "functions.b"),
    "colon instead of the dot": (("functions.aa", "functions.bb"), ":bb<|message|>", None),
    "content type without a separator": (("functions.aa", "functions.bb"), ".bbjson<|message|>", "functions.bb"),
    "built-in tool": (("functions.aa", "browser.search"), "browser.search code<|message|>", "browser.search"),
    "function beside a built-in tool": (("functions.aa", "python"), "functions.aa <|message|>", "functions.aa"),
    "nothing": (("functions.a", "functions.b"), "<|return|>", None),
    "prose": (("functions.a", "functions.b"), " I think that", None),
}


@pytest.mark.parametrize(("recipients", "output", "expected"), NAMES.values(), ids=NAMES)
def test_a_name_is_read_as_the_only_matching_tool(
    recipients: tuple[str, ...], output: str, expected: str | None
) -> None:
    naming = ToolNaming(ENCODING, recipients)
    found: str | None = None
    for token in ENCODING.encode_as_server(output):
        found, known = naming.read(token)
        if known:
            break
    else:
        found, _ = naming.found(is_complete=True)
    assert found == expected


def test_prompt_end_and_choice_give_the_full_recipient() -> None:
    recipients = ("functions.a", "python", "browser.open")
    naming = ToolNaming(ENCODING, recipients)
    stem = ENCODING.decode(naming.header)
    assert [f"{stem}{text}" for text in naming.choices.texts] == [
        f"<|channel|>commentary to={recipient}" for recipient in recipients
    ]


@pytest.mark.parametrize("name", ["get_weather", "add", "x", "_y", "a-b", "9", "search_all"])
def test_the_prompt_ends_at_a_token_boundary_for_every_tool(name: str) -> None:
    naming = ToolNaming(ENCODING, (f"functions.{name}", "functions.other"))
    whole = ENCODING.encode_marked(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")
    assert tuple(whole[: len(naming.header)]) == naming.header


def test_an_endless_name_is_abandoned() -> None:
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
    "a few tokens after others": ([*range(1_000), *[1, 2, 3] * REPEAT_TOKENS], True),
    "longest period": (list(range(MAX_PERIOD_TOKENS)) * 65, True),
    "longest period, not often enough": (list(range(MAX_PERIOD_TOKENS)) * 64, False),
    "period above the maximum": (list(range(MAX_PERIOD_TOKENS + 1)) * 80, False),
    "period with a repeated part": (([7] * 60 + [8]) * 80, True),
    "one token, interrupted once": ([*[7] * 4_000, 8, *[7] * 4_000], False),
    "something else at the end": ([*[7] * 6_000, 8], False),
    "increasing numbers": ([n for at in range(4_000) for n in (5, at)], False),
    "a list of a thousand zeros": (ZEROS, False),
    "a table of two hundred equal rows": (ROW * 200, False),
    "data of one letter group": (BASE64, False),
    "equal lines of code": (CODE, False),
    "a table that never ends": (ROW * 600, True),
    "nothing": ([], False),
}


@pytest.mark.parametrize(("tokens", "repeated"), REPEATED.values(), ids=REPEATED)
def test_only_long_repetitions_of_short_periods_are_detected(tokens: list[int], repeated: bool) -> None:
    assert repeats(tokens, 0) is repeated
    # Tokens before the generation do not count.
    before = [*tokens[:MAX_PERIOD_TOKENS], *tokens]
    assert repeats(before, min(MAX_PERIOD_TOKENS, len(tokens))) is repeated


def test_reasoning_has_a_lower_repetition_limit() -> None:
    assert repeats(ROW * 60, 0, REASONING_REPEAT_TOKENS)
    assert not repeats(ROW * 60, 0)


def repeats_by_definition(tokens: Sequence[int], length: int) -> bool:
    """Return whether the tokens end in a repetition, by its definition."""
    return any(
        len(tokens) >= length + period and all(tokens[-1 - at] == tokens[-1 - at - period] for at in range(length))
        for period in range(1, MAX_PERIOD_TOKENS + 1)
    )


@given(
    st.lists(st.integers(0, 2), max_size=80),
    st.lists(st.integers(0, 1), min_size=1, max_size=MAX_PERIOD_TOKENS + 2),
    st.integers(REASONING_REPEAT_TOKENS - 4, REASONING_REPEAT_TOKENS + MAX_PERIOD_TOKENS + 4),
)
def test_repetitions_of_any_period_are_detected(before: list[int], period: list[int], size: int) -> None:
    tokens = [*before, *(period * size)[:size]]
    assert repeats(tokens, 0, REASONING_REPEAT_TOKENS) is repeats_by_definition(tokens, REASONING_REPEAT_TOKENS)
