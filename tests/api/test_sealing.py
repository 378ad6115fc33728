"""Seals open to the exact items for their tenant, and to None for anything else."""

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
from unisono.core.conversation import AssistantReasoning, Item, UserMessage
from unisono.errors import InternalError

SALT = b"the salt of this gateway"
SEALER = Sealer(SALT)
REASONING = AssistantReasoning("Grüße, 世界 🌍 <|end|> \x00", (200006, 173781, 200005, 35644, 200008, 1, 2, 200007))

items = st.lists(item, max_size=4).map(tuple)


@given(st.text(max_size=20), items)
def test_a_seal_opens_to_the_exact_items(tenant: str, sealed_items: tuple[Item, ...]) -> None:
    seal = SEALER.seal(tenant, sealed_items)
    assert seal.isascii()
    assert Sealer(SALT).open(tenant, seal) == sealed_items


@given(st.data())
def test_a_seal_with_one_changed_character_does_not_open(data: st.DataObject) -> None:
    seal = SEALER.seal("ann", [REASONING])
    index = data.draw(st.integers(0, len(seal) - 1))
    other = data.draw(st.characters().filter(lambda letter: letter != seal[index]))
    assert SEALER.open("ann", seal[:index] + other + seal[index + 1 :]) is None


@given(st.text(max_size=20), st.text(max_size=40))
def test_a_signature_is_valid_for_one_text_of_one_tenant(tenant: str, text: str) -> None:
    signature = SEALER.sign(tenant, text)
    assert signature.isascii()
    assert Sealer(SALT).signed(tenant, text, signature)
    assert not SEALER.signed(f"{tenant}.", text, signature)
    assert not SEALER.signed(tenant, f"{text}.", signature)
    assert not SEALER.signed(tenant, text, signature[:-1])
    assert not Sealer(b"another salt").signed(tenant, text, signature)
    assert SEALER.open(tenant, signature) is None


def test_a_signature_covers_the_boundary_of_tenant_and_text() -> None:
    assert not SEALER.signed("ann", "b\0c", SEALER.sign("ann\0b", "c"))


def test_a_seal_with_a_changed_end_does_not_open() -> None:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=+/ \n"
    for length in range(4):
        seal = SEALER.seal("ann", [UserMessage(os.urandom(length).hex())])
        opened = [letter for letter in alphabet if SEALER.open("ann", seal[:-1] + letter) is not None]
        assert opened == [seal[-1]]
        assert all(SEALER.open("ann", seal + letter) is None for letter in alphabet)
        assert all(SEALER.open("ann", seal[:cut]) is None for cut in range(len(seal)))


@given(st.text(max_size=60))
def test_opening_any_other_text_returns_none(text: str) -> None:
    assert SEALER.open("ann", text) is None
    assert SEALER.open("ann", PREFIX + text) is None


@given(st.binary(max_size=60))
def test_opening_any_encoded_bytes_returns_none(content: bytes) -> None:
    assert SEALER.open("ann", PREFIX + urlsafe_b64encode(content).rstrip(b"=").decode()) is None


OTHERS = {"another tenant": (SALT, "bob"), "empty tenant": (SALT, ""), "another key": (b"an older salt", "ann")}


@pytest.mark.parametrize(("salt", "tenant"), OTHERS.values(), ids=OTHERS)
def test_a_seal_opens_only_for_its_tenant_and_key(salt: bytes, tenant: str) -> None:
    assert Sealer(salt).open(tenant, SEALER.seal("ann", [REASONING])) is None


def test_seals_are_deterministic_and_differ_between_tenants() -> None:
    first, second, other_tenants = (SEALER.seal(tenant, [REASONING]) for tenant in ("ann", "ann", "bob"))
    assert first.startswith(PREFIX)
    assert first == second
    assert first[len(PREFIX) : len(PREFIX) + 16] != other_tenants[len(PREFIX) : len(PREFIX) + 16]


def test_reasoning_of_131072_tokens_can_be_sealed_and_opened() -> None:
    words = " ".join(str(number) for number in range(131_072))
    reasoning = AssistantReasoning(words, tuple(range(60_000, 60_000 + 131_072)))
    seal = SEALER.seal("ann", [reasoning])
    assert len(seal) < MAX_SEAL_LENGTH
    assert SEALER.open("ann", seal) == (reasoning,)


def test_a_seal_over_the_maximum_length_does_not_open() -> None:
    seal = SEALER.seal("ann", [AssistantReasoning(os.urandom(MAX_SEAL_LENGTH // 2).hex())])
    assert len(seal) > MAX_SEAL_LENGTH / 2
    assert SEALER.open("ann", seal + "A" * MAX_SEAL_LENGTH) is None
    assert SEALER.open("ann", SEALER.seal("ann", [AssistantReasoning(os.urandom(MAX_SEAL_LENGTH).hex())])) is None


def test_text_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InternalError):
        SEALER.seal("ann", [UserMessage("\ud800")])


def test_a_seal_of_another_process_opens() -> None:
    script = (
        "from unisono.api.sealing import Sealer; from unisono.core.conversation import UserMessage; "
        f"print(Sealer({SALT!r}).seal('ann', [UserMessage('hello')]))"
    )
    seal = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert SEALER.open("ann", seal) == (UserMessage("hello"),)
