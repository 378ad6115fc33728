"""Sealed items come back as they were for whom they were sealed, and as nothing for anybody else."""

from __future__ import annotations

import os
import subprocess
import sys
from base64 import urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import item
from unisono.api.sealing import MAX_SEAL_LENGTH, PREFIX, Sealer
from unisono.core.conversation import (
    AssistantReasoning,
    Item,
    UserMessage,
)
from unisono.errors import InternalError

SALT = b"the salt of this gateway"
SEALER = Sealer(SALT)
THOUGHT = AssistantReasoning("Grüße, 世界 🌍 <|end|> \x00", (200006, 173781, 200005, 35644, 200008, 1, 2, 200007))

items = st.lists(item, max_size=4).map(tuple)


@given(st.text(max_size=20), items)
def test_what_is_sealed_comes_back_with_its_exact_tokens(tenant: str, sealed: tuple[Item, ...]) -> None:
    seal = SEALER.seal(tenant, sealed)
    assert seal.isascii()
    assert Sealer(SALT).open(tenant, seal) == sealed


@given(st.data())
def test_any_other_character_anywhere_gives_nothing(data: st.DataObject) -> None:
    seal = SEALER.seal("ann", [THOUGHT])
    at = data.draw(st.integers(0, len(seal) - 1))
    other = data.draw(st.characters().filter(lambda letter: letter != seal[at]))
    assert SEALER.open("ann", seal[:at] + other + seal[at + 1 :]) is None


@given(st.text(max_size=20), st.text(max_size=40))
def test_a_signature_is_for_one_text_of_one_tenant(tenant: str, text: str) -> None:
    signature = SEALER.sign(tenant, text)
    assert signature.isascii()
    assert Sealer(SALT).signed(tenant, text, signature)
    assert not SEALER.signed(f"{tenant}.", text, signature)
    assert not SEALER.signed(tenant, f"{text}.", signature)
    assert not SEALER.signed(tenant, text, signature[:-1])
    assert not Sealer(b"another salt").signed(tenant, text, signature)
    assert SEALER.open(tenant, signature) is None


def test_where_the_tenant_ends_is_part_of_the_signature() -> None:
    assert not SEALER.signed("ann", "b\0c", SEALER.sign("ann\0b", "c"))


def test_every_bit_counts_the_last_ones_too() -> None:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=+/ \n"
    for length in range(4):
        seal = SEALER.seal("ann", [UserMessage(os.urandom(length).hex())])
        opened = [letter for letter in alphabet if SEALER.open("ann", seal[:-1] + letter) is not None]
        assert opened == [seal[-1]]
        assert all(SEALER.open("ann", seal + letter) is None for letter in alphabet)
        assert all(SEALER.open("ann", seal[:cut]) is None for cut in range(len(seal)))


@given(st.text(max_size=60))
def test_anything_else_is_nothing_and_never_raises(said: str) -> None:
    assert SEALER.open("ann", said) is None
    assert SEALER.open("ann", PREFIX + said) is None


@given(st.binary(max_size=60))
def test_any_bytes_in_its_dress_are_nothing(said: bytes) -> None:
    assert SEALER.open("ann", PREFIX + urlsafe_b64encode(said).rstrip(b"=").decode()) is None


OTHERS = {"another tenant": (SALT, "bob"), "nobody": (SALT, ""), "another key": (b"an older salt", "ann")}


@pytest.mark.parametrize(("salt", "tenant"), OTHERS.values(), ids=OTHERS)
def test_nobody_else_opens_it(salt: bytes, tenant: str) -> None:
    assert Sealer(salt).open(tenant, SEALER.seal("ann", [THOUGHT])) is None


def test_equal_items_have_one_seal_for_one_tenant_and_none_shows_what_it_holds() -> None:
    one, other, theirs = (SEALER.seal(tenant, [THOUGHT]) for tenant in ("ann", "ann", "bob"))
    assert one.startswith(PREFIX)
    assert one == other
    assert one[len(PREFIX) : len(PREFIX) + 16] != theirs[len(PREFIX) : len(PREFIX) + 16]


def test_the_longest_thoughts_there_are_can_be_opened_again() -> None:
    words = " ".join(str(number) for number in range(131_072))
    long = AssistantReasoning(words, tuple(range(60_000, 60_000 + 131_072)))
    seal = SEALER.seal("ann", [long])
    assert len(seal) < MAX_SEAL_LENGTH
    assert SEALER.open("ann", seal) == (long,)


def test_what_is_too_long_is_not_even_looked_at() -> None:
    seal = SEALER.seal("ann", [AssistantReasoning(os.urandom(MAX_SEAL_LENGTH // 2).hex())])
    assert len(seal) > MAX_SEAL_LENGTH / 2
    assert SEALER.open("ann", seal + "A" * MAX_SEAL_LENGTH) is None
    assert SEALER.open("ann", SEALER.seal("ann", [AssistantReasoning(os.urandom(MAX_SEAL_LENGTH).hex())])) is None


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(InternalError):
        SEALER.seal("ann", [UserMessage("\ud800")])


def test_a_seal_of_another_process_opens() -> None:
    script = (
        "from unisono.api.sealing import Sealer; from unisono.core.conversation import UserMessage; "
        f"print(Sealer({SALT!r}).seal('ann', [UserMessage('hello')]))"
    )
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert SEALER.open("ann", made) == (UserMessage("hello"),)
