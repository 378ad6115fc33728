"""Who holds how much of a prompt, against an index that remembers everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.core.prefix_blocks import BLOCK_TOKENS, blocks_of
from unisono.routing.prefix_index import PrefixIndex


def prompt(*parts: int) -> tuple[int, ...]:
    """The numbers of a prompt of one block for each part."""
    return blocks_of([part for part in parts for _ in range(BLOCK_TOKENS)])


def test_the_longest_beginning_of_each_in_one_walk() -> None:
    index = PrefixIndex()
    a, b, c = index.join(), index.join(), index.join()
    index.record(prompt(1, 2, 3, 4), a, 0.0)
    index.record(prompt(1, 2, 9), b, 0.0)
    index.record(prompt(1), c, 0.0)
    assert index.cached_prefixes(prompt(1, 2, 3, 4, 5), 0.0) == [(a | b | c, 1), (a | b, 2), (a, 4)]
    assert index.cached_prefixes(prompt(1, 2, 9), 0.0) == [(a | b | c, 1), (a | b, 2), (b, 3)]
    assert index.cached_prefixes(prompt(7), 0.0) == []
    assert index.cached_prefixes((), 0.0) == []


def test_a_long_prompt_held_to_many_ends_is_told_to_each_of_them() -> None:
    index, now = PrefixIndex(), 0.0
    asked = prompt(*range(60))
    bits = [index.join() for _ in range(40)]
    for number, bit in enumerate(bits):
        index.record(asked[: 1 + number + number // 3], bit, now)
    expected = {1 + number + number // 3: sum(bits[number:]) for number in range(len(bits))}
    assert index.cached_prefixes(asked, now) == [(mask, blocks) for blocks, mask in expected.items()]


def test_what_a_deployment_held_is_forgotten_and_learnt_again() -> None:
    index = PrefixIndex()
    a, b = index.join(), index.join()
    for bit in (a, b):
        index.record(prompt(1, 2), bit, 1.0)
    index.forget(a, 2.0)
    assert index.cached_prefixes(prompt(1, 2), 2.0) == [(b, 2)]
    # Another's word for the same blocks does not bring it back.
    index.record(prompt(1, 2), b, 3.0)
    assert index.cached_prefixes(prompt(1, 2), 3.0) == [(b, 2)]
    index.record(prompt(1), a, 4.0)
    assert index.cached_prefixes(prompt(1, 2), 4.0) == [(a | b, 1), (b, 2)]


def test_who_takes_the_place_of_one_that_left_holds_nothing_of_it() -> None:
    index = PrefixIndex()
    left = index.join()
    index.record(prompt(1), left, 1.0)
    index.leave(left, 2.0)
    assert index.join() == left
    assert index.cached_prefixes(prompt(1), 3.0) == []


def test_what_is_old_is_not_believed() -> None:
    index = PrefixIndex(kept_s=60)
    bit = index.join()
    index.record(prompt(1, 2), bit, 0.0)
    index.record(prompt(1), bit, 50.0)
    assert index.cached_prefixes(prompt(1, 2), 70.0) == [(bit, 1)]


def test_of_too_many_blocks_the_ends_of_old_prompts_go_first() -> None:
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


@given(steps=steps, asked=st.lists(st.integers(0, 2), max_size=7))
def test_it_knows_what_was_recorded_and_nothing_else(steps: list[tuple[str, int, list[int]]], asked: list[int]) -> None:
    index = PrefixIndex()
    bits = [index.join() for _ in range(5)]
    told: dict[int, list[list[int]]] = {bit: [] for bit in bits}
    now = 0.0
    for what, who, parts in steps:
        now += 1.0
        if what == "record":
            index.record(prompt(*parts), bits[who], now)
            told[bits[who]].append(parts)
        else:
            index.forget(bits[who], now)
            told[bits[who]].clear()

    def common(parts: list[int]) -> int:
        same = [one == other for one, other in zip(parts, asked, strict=False)]
        return same.index(False) if False in same else len(same)

    expected = {bit: max(map(common, prompts), default=0) for bit, prompts in told.items()}
    found = dict.fromkeys(bits, 0)
    rows = index.cached_prefixes(prompt(*asked), now)
    for mask, blocks in rows:
        for bit in bits:
            if mask & bit:
                found[bit] = blocks
    assert found == expected
    assert [blocks for _, blocks in rows] == sorted({blocks for _, blocks in rows})
