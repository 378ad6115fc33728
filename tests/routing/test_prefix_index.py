"""Prefix index: cached prefixes of prompts by deployment, compared with an exhaustive model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.core.route_protocol import BLOCK_TOKENS, blocks_of
from unisono.routing.prefix_index import PrefixIndex


def prompt(*parts: int) -> tuple[int, ...]:
    """Return the block hashes of a prompt with one block for each part."""
    return blocks_of([part for part in parts for _ in range(BLOCK_TOKENS)])


def test_cached_prefixes_returns_the_longest_prefix_of_each_deployment() -> None:
    index = PrefixIndex()
    a, b, c = index.join(), index.join(), index.join()
    index.record(prompt(1, 2, 3, 4), a, 0.0)
    index.record(prompt(1, 2, 9), b, 0.0)
    index.record(prompt(1), c, 0.0)
    assert index.cached_prefixes(prompt(1, 2, 3, 4, 5), 0.0) == [(a | b | c, 1), (a | b, 2), (a, 4)]
    assert index.cached_prefixes(prompt(1, 2, 9), 0.0) == [(a | b | c, 1), (a | b, 2), (b, 3)]
    assert index.cached_prefixes(prompt(7), 0.0) == []
    assert index.cached_prefixes((), 0.0) == []


def test_cached_prefixes_of_many_lengths_are_all_returned() -> None:
    index, now = PrefixIndex(), 0.0
    requested = prompt(*range(60))
    bits = [index.join() for _ in range(40)]
    for number, bit in enumerate(bits):
        index.record(requested[: 1 + number + number // 3], bit, now)
    expected = {1 + number + number // 3: sum(bits[number:]) for number in range(len(bits))}
    assert index.cached_prefixes(requested, now) == [(mask, blocks) for blocks, mask in expected.items()]


def test_a_forgotten_deployment_learns_prefixes_again() -> None:
    index = PrefixIndex()
    a, b = index.join(), index.join()
    for bit in (a, b):
        index.record(prompt(1, 2), bit, 1.0)
    index.forget(a, 2.0)
    assert index.cached_prefixes(prompt(1, 2), 2.0) == [(b, 2)]
    # A record of another deployment for the same blocks does not restore it.
    index.record(prompt(1, 2), b, 3.0)
    assert index.cached_prefixes(prompt(1, 2), 3.0) == [(b, 2)]
    index.record(prompt(1), a, 4.0)
    assert index.cached_prefixes(prompt(1, 2), 4.0) == [(a | b, 1), (b, 2)]


def test_a_reused_bit_has_no_prefixes_of_its_predecessor() -> None:
    index = PrefixIndex()
    left = index.join()
    index.record(prompt(1), left, 1.0)
    index.leave(left, 2.0)
    assert index.join() == left
    assert index.cached_prefixes(prompt(1), 3.0) == []


def test_old_prefixes_expire() -> None:
    index = PrefixIndex(kept_s=60)
    bit = index.join()
    index.record(prompt(1, 2), bit, 0.0)
    index.record(prompt(1), bit, 50.0)
    assert index.cached_prefixes(prompt(1, 2), 70.0) == [(bit, 1)]


def test_the_ends_of_old_prompts_are_evicted_first() -> None:
    index = PrefixIndex(blocks=4)
    bit = index.join()
    index.record(prompt(1, 2, 3), bit, 0.0)
    index.record(prompt(7, 8), bit, 1.0)
    assert len(index) == 4
    assert index.cached_prefixes(prompt(1, 2, 3), 1.0) == [(bit, 2)]
    assert index.cached_prefixes(prompt(7, 8), 1.0) == [(bit, 2)]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.integers(0, 4), st.lists(st.integers(0, 2), min_size=1, max_size=6)),
        st.tuples(st.just("forget"), st.integers(0, 4), st.just([])),
    ),
    max_size=30,
)


@given(steps=steps, requested=st.lists(st.integers(0, 2), max_size=7))
def test_cached_prefixes_equal_an_exhaustive_model(
    steps: list[tuple[str, int, list[int]]], requested: list[int]
) -> None:
    index = PrefixIndex()
    bits = [index.join() for _ in range(5)]
    recorded: dict[int, list[list[int]]] = {bit: [] for bit in bits}
    now = 0.0
    for action, index_of_bit, parts in steps:
        now += 1.0
        if action == "record":
            index.record(prompt(*parts), bits[index_of_bit], now)
            recorded[bits[index_of_bit]].append(parts)
        else:
            index.forget(bits[index_of_bit], now)
            recorded[bits[index_of_bit]].clear()

    def common(parts: list[int]) -> int:
        same = [one == other for one, other in zip(parts, requested, strict=False)]
        return same.index(False) if False in same else len(same)

    expected = {bit: max(map(common, prompts), default=0) for bit, prompts in recorded.items()}
    found = dict.fromkeys(bits, 0)
    rows = index.cached_prefixes(prompt(*requested), now)
    for mask, blocks in rows:
        for bit in bits:
            if mask & bit:
                found[bit] = blocks
    assert found == expected
    assert [blocks for _, blocks in rows] == sorted({blocks for _, blocks in rows})
