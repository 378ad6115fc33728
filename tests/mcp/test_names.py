"""Tests of names for server tools: valid, distinct, stable and reversible."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.mcp import ToolNames

PLAIN = {
    "ordinary names": ("docs", "search", "docs__search"),
    "dashes and digits": ("a-1", "b-2", "a-1__b-2"),
    "underscores": ("my_docs", "full_search", "my_docs__full_search"),
    "tool with the separator": ("docs", "a__b", "docs__a__b"),
    "64 characters": ("d" * 30, "t" * 32, f"{'d' * 30}__{'t' * 32}"),
}

IRREGULAR = {
    "65 characters": ("d" * 31, "t" * 32),
    "dot": ("docs", "files.search"),
    "slash": ("docs", "files/search"),
    "space in the label": ("my docs", "search"),
    "label with the separator": ("a__b", "c"),
    "label that ends in an underscore": ("a_", "b"),
    "not ASCII": ("docs", "søk"),
    "only irregular characters": ("…", "…"),
    "surrogate": ("docs", "\ud800"),
    "empty": ("", ""),
}


@pytest.mark.parametrize(("label", "tool", "name"), PLAIN.values(), ids=PLAIN)
def test_regular_tool_is_named_after_its_label_and_name(label: str, tool: str, name: str) -> None:
    assert ToolNames([(label, tool)]).add(label, tool) == name


@pytest.mark.parametrize(("label", "tool"), IRREGULAR.values(), ids=IRREGULAR)
def test_irregular_tool_gets_a_valid_name_with_a_digest(label: str, tool: str) -> None:
    name = ToolNames().add(label, tool)
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name)
    assert re.search(r"_[0-9a-f]{16}$", name)
    assert "__" not in name


names = st.text(alphabet="ab_-. é", max_size=5) | st.text(alphabet="ab_", min_size=20, max_size=40)


@given(st.lists(st.tuples(names, names), max_size=12), st.sets(names, max_size=3))
def test_names_are_distinct_valid_and_reversible(pairs: list[tuple[str, str]], taken: set[str]) -> None:
    table = ToolNames(pairs, taken)
    created = [table.add(*pair) for pair in pairs]
    assert len(set(created)) == len(set(pairs)) == len(table)
    assert [table.tool(name) for name in created] == pairs
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in created)
    assert not taken & set(created)


@given(st.tuples(names, names), st.lists(st.tuples(names, names), max_size=5))
def test_name_depends_only_on_its_label_and_tool(pair: tuple[str, str], others: list[tuple[str, str]]) -> None:
    assert ToolNames([*others, pair]).add(*pair) == ToolNames([pair]).add(*pair)


def test_tool_cannot_take_the_name_of_another_tool() -> None:
    table = ToolNames([("docs", "files.search")])
    existing_name = next(iter(table))
    assert table.add("docs", existing_name) != existing_name
    assert table.add(existing_name, "x") != existing_name
    assert table.tool("nobody") is None
