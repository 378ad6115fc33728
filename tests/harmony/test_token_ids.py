"""Token ids as shared integer objects."""

from __future__ import annotations

from unisono.core.generation import VOCABULARY
from unisono.harmony.encoding import share_ids


def test_equal_ids_are_the_same_object() -> None:
    # Parsed, so that the interpreter has no reason to share them.
    first, second = ([int(text) for text in ("5000", "199999")] for _ in range(2))
    assert all(a is not b for a, b in zip(first, second, strict=True))
    shared = [share_ids(first), share_ids(second)]
    assert shared == [first, second]
    assert all(a is b for a, b in zip(*shared, strict=True))


def test_ids_outside_the_vocabulary_are_not_shared() -> None:
    for token in (int("-1"), VOCABULARY, 1 << 70):
        assert share_ids([token]) == [token]
    first, second = (share_ids([int(str(VOCABULARY + 5))])[0] for _ in range(2))
    assert first is not second
