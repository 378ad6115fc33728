"""Wire names of hosted tools: legal, distinct, the same every time, and read back to what they stand for."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.mcp import ToolNames

PLAIN = {
    "an ordinary pair": ("docs", "search", "docs__search"),
    "dashes and digits": ("a-1", "b-2", "a-1__b-2"),
    "an underscore in each": ("my_docs", "full_search", "my_docs__full_search"),
    "a tool with the separator in it": ("docs", "a__b", "docs__a__b"),
    "64 characters": ("d" * 30, "t" * 32, f"{'d' * 30}__{'t' * 32}"),
}

ODD = {
    "65 characters": ("d" * 31, "t" * 32),
    "a dot": ("docs", "files.search"),
    "a slash": ("docs", "files/search"),
    "a space in the label": ("my docs", "search"),
    "a label with the separator in it": ("a__b", "c"),
    "a label that ends in half of it": ("a_", "b"),
    "not ASCII": ("docs", "søk"),
    "nothing but odd": ("…", "…"),
    "a surrogate": ("docs", "\ud800"),
    "empty": ("", ""),
}


@pytest.mark.parametrize(("label", "tool", "name"), PLAIN.values(), ids=PLAIN)
def test_an_ordinary_tool_is_called_after_its_label_and_itself(label: str, tool: str, name: str) -> None:
    assert ToolNames([(label, tool)]).add(label, tool) == name


@pytest.mark.parametrize(("label", "tool"), ODD.values(), ids=ODD)
def test_any_other_gets_a_legal_name_with_a_digest(label: str, tool: str) -> None:
    name = ToolNames().add(label, tool)
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name)
    assert re.search(r"_[0-9a-f]{16}$", name)
    assert "__" not in name


names = st.text(alphabet="ab_-. é", max_size=5) | st.text(alphabet="ab_", min_size=20, max_size=40)


@given(st.lists(st.tuples(names, names), max_size=12), st.sets(names, max_size=3))
def test_names_are_distinct_legal_and_read_back(pairs: list[tuple[str, str]], taken: set[str]) -> None:
    table = ToolNames(pairs, taken)
    made = [table.add(*pair) for pair in pairs]
    assert len(set(made)) == len(set(pairs)) == len(table)
    assert [table.tool(name) for name in made] == pairs
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in made)
    assert not taken & set(made)


@given(st.tuples(names, names), st.lists(st.tuples(names, names), max_size=5))
def test_a_name_follows_from_the_pair_alone(pair: tuple[str, str], others: list[tuple[str, str]]) -> None:
    assert ToolNames([*others, pair]).add(*pair) == ToolNames([pair]).add(*pair)


def test_a_tool_cannot_take_another_ones_place_by_its_name() -> None:
    table = ToolNames([("docs", "files.search")])
    stolen = next(iter(table))
    assert table.add("docs", stolen) != stolen
    assert table.add(stolen, "x") != stolen
    assert table.tool("nobody") is None
