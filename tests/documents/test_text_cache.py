"""The cache of texts: its size, its order, and entries that expire."""

from __future__ import annotations

from unisono.core.input_files import FileText
from unisono.documents.reader import ENTRY_CHARACTERS, TextCache


def test_the_least_recently_used_text_is_dropped() -> None:
    cache = TextCache(3 * ENTRY_CHARACTERS + 30)
    for name in (b"a", b"b", b"c"):
        cache.put(name, FileText("x" * 10))
    assert cache.get(b"a") == FileText("x" * 10)
    cache.put(b"d", FileText("y"))
    assert [cache.get(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


def test_a_text_larger_than_the_cache_is_not_kept() -> None:
    cache = TextCache(2 * ENTRY_CHARACTERS)
    cache.put(b"a", FileText("x"))
    cache.put(b"b", FileText("x" * 2 * ENTRY_CHARACTERS))
    assert cache.get(b"a") is not None
    assert cache.get(b"b") is None


def test_a_new_text_replaces_the_old_one_and_its_size() -> None:
    cache = TextCache(ENTRY_CHARACTERS + 10)
    for text in ("x" * 10, "y" * 10, "z"):
        cache.put(b"a", FileText(text))
        assert cache.get(b"a") == FileText(text)


def test_an_entry_expires() -> None:
    now = [0.0]
    cache = TextCache(clock=lambda: now[0])
    cache.put(b"a", FileText("x"), 10)
    cache.put(b"b", FileText("x"))
    now[0] = 9.9
    assert cache.get(b"a") is not None
    now[0] = 10.0
    assert cache.get(b"a") is None
    assert cache.get(b"b") is not None
