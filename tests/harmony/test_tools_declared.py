"""Mapping of tool names in both directions, and rejection of invalid tools before rendering."""

from __future__ import annotations

import gc
import re
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import examples
from unisono.core.conversation import FunctionTool
from unisono.core.lru_cache import LruCache
from unisono.errors import InvalidRequest
from unisono.harmony import tool_declarations as tools_module
from unisono.harmony.encoding import Encoding
from unisono.harmony.system_message import tools_section
from unisono.harmony.tool_declarations import ToolSet, plan_tools

ONE_LINE = st.text(st.characters(exclude_categories=("Cc", "Zl", "Zp")), min_size=1, max_size=70)
LEGAL = re.compile(r"[A-Za-z0-9_-]{1,64}")


def named(*names: str) -> ToolSet:
    return plan_tools([FunctionTool(name) for name in names])


NAMES: dict[str, tuple[list[str], list[str]]] = {
    "legal names stay": (["get_weather", "a-b", "1st", "x" * 64], ["get_weather", "a-b", "1st", "x" * 64]),
    "dots and slashes": (["srv.tool", "a/b"], ["srv_tool", "a_b"]),
    "blanks": (["my tool!"], ["my_tool_"]),
    "too long": (["x" * 65], ["x" * 64]),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_are_made_legal_and_map_back(case: str) -> None:
    names, wires = NAMES[case]
    tools = named(*names)
    assert [tools.wire(name) for name in names] == wires
    assert [tools.client(wire) for wire in wires] == names
    assert tools.declared == frozenset(wires)


@pytest.mark.parametrize("names", [["a.b", "a_b"], ["a_b", "a.b"], ["a.b", "a/b", "a b"], ["x" * 65, "x" * 66]])
def test_names_that_would_collide_stay_distinct(names: list[str]) -> None:
    tools = named(*names)
    wires = [tools.wire(name) for name in names]
    assert len(set(wires)) == len(names)
    assert all(LEGAL.fullmatch(wire) for wire in wires)
    assert [tools.client(wire) for wire in wires] == names
    if "a_b" in names:
        assert tools.wire("a_b") == "a_b"


@settings(max_examples=examples(100), deadline=None)
@given(names=st.lists(ONE_LINE, max_size=8, unique=True))
def test_any_set_of_names_maps_there_and_back(names: list[str]) -> None:
    tools = named(*names)
    wires = [tools.wire(name) for name in names]
    assert all(LEGAL.fullmatch(wire) for wire in wires)
    assert [tools.client(wire) for wire in wires] == names
    assert len(tools.declared) == len(names)
    assert [named(*names).wire(name) for name in names] == wires


def test_an_undeclared_name_becomes_legal_and_differs_from_declared_ones() -> None:
    tools = named("srv.tool")
    assert tools.client("anything") == "anything"
    assert tools.wire("gone") == "gone"
    assert tools.wire("other tool") == "other_tool"
    for name in ("srv/tool", "srv_tool", "天気", " ", ""):
        assert LEGAL.fullmatch(tools.wire(name))
        assert tools.wire(name) != tools.wire("srv.tool")


def test_the_digest_identifies_the_tool_list() -> None:
    one = plan_tools([FunctionTool("f", "d", {"properties": {"a": {"type": "string"}}})])
    same = plan_tools([FunctionTool("f", "d", {"properties": {"a": {"type": "string"}}})])
    other = plan_tools([FunctionTool("f", "d", {"properties": {"a": {"type": "number"}}})])
    assert one.digest == same.digest != other.digest


def test_requests_without_tools_share_an_empty_list() -> None:
    empty = plan_tools([])
    assert plan_tools(()) is empty
    assert (empty.declared, empty.declarations, empty.characters) == (frozenset(), (), 0)
    assert empty.digest != plan_tools([FunctionTool("a")]).digest


def test_an_identical_repeated_tool_counts_once(encoding: Encoding) -> None:
    tools = plan_tools([FunctionTool("f", "d"), FunctionTool("g"), FunctionTool("f", "d")])
    assert tools_section(tools.declarations).count("type f = ") == 1


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def deep_list(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def exponential_references() -> dict[str, Any]:
    """Return definitions that each have ten references to the next one."""
    definitions: dict[str, Any] = {
        f"d{i}": {"properties": {f"p{n}": {"$ref": f"#/$defs/d{i + 1}"} for n in range(10)}} for i in range(10)
    }
    return {"$ref": "#/$defs/d0", "$defs": definitions | {"d10": {"type": "string"}}}


def chain(length: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions | {f"d{length}": {"type": "string"}}}


def referenced_often(definition: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {f"p{i}": {"$ref": "#/$defs/D"} for i in range(4_000)}, "$defs": {"D": definition}}


def one_property(schema: object) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


REJECTED: dict[str, Callable[[], object]] = {
    "a list": list,
    "a string": lambda: "{}",
    "a number": lambda: 3,
    "a boolean": lambda: True,
    "a property that is not a schema": lambda: one_property("string"),
    "too deep": lambda: deep(60),
    "far too deep": lambda: deep(2_000),
    "a deep default": lambda: one_property({"default": deep_list(5_000)}),
    "too many properties": lambda: {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}},
    "too many alternatives": lambda: one_property({"anyOf": [{"const": i} for i in range(20_000)]}),
    "too many parts": lambda: {"allOf": [{"properties": {f"p{i}": {}}} for i in range(20_000)]},
    "an enum too long": lambda: one_property({"enum": [f"v{i}" for i in range(100_000)]}),
    "too much text": lambda: one_property({"description": "x" * 500_000}),
    "too much JSON": lambda: {"properties": {}, "x-notes": "x" * 1_100_000},
    "exponential references": exponential_references,
    "a chain of references too long": lambda: chain(200),
    "a reference too long": lambda: one_property({"$ref": "#/" + "a" * 5_000}),
    "a large definition with many references": lambda: referenced_often({f"x{i}": i for i in range(30_000)}),
    "a long list with many references": lambda: referenced_often({"required": [f"x{i}" for i in range(30_000)]}),
    "a large condition with many references": lambda: referenced_often({"not": {"const": "x" * 300_000}}),
    "a long list of definitions": lambda: {
        "properties": {f"p{i}": {"$ref": "#/$defs/39999"} for i in range(6_000)},
        "$defs": [{} for _ in range(40_000)],
    },
    "NaN": lambda: one_property({"default": float("nan")}),
    "not JSON": lambda: one_property({"default": {1, 2}}),
    "a property name too long": lambda: {"properties": {"a" * 300: {"type": "string"}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REJECTED)
def test_a_hostile_schema_is_rejected_quickly_with_its_field(case: str) -> None:
    tools = [FunctionTool("fine"), FunctionTool("f", "", REJECTED[case]())]  # type: ignore[arg-type]
    started_at = time.process_time()
    with pytest.raises(InvalidRequest) as raised:
        plan_tools(tools)
    assert time.process_time() - started_at < 3
    assert raised.value.param == "tools.1.function.parameters"
    with pytest.raises(InvalidRequest) as raised:
        plan_tools(tools, at="tools.{index}", schema_field="input_schema")
    assert raised.value.param == "tools.1.input_schema"


BAD_NAMES = {"empty": "", "a newline": "a\nb", "a control character": "a\x00", "too long": "a" * 600}


@pytest.mark.parametrize("case", BAD_NAMES)
def test_a_hostile_name_is_rejected_with_its_field(case: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        named("fine", BAD_NAMES[case])
    assert raised.value.param == "tools.1.function.name"


def test_two_different_tools_of_one_name_are_rejected() -> None:
    with pytest.raises(InvalidRequest) as raised:
        plan_tools([FunctionTool("f", "one"), FunctionTool("g"), FunctionTool("f", "two")])
    assert raised.value.param == "tools.2.function.name"


def test_too_many_tools_are_rejected() -> None:
    with pytest.raises(InvalidRequest) as raised:
        named(*(f"f{i}" for i in range(2_000)))
    assert raised.value.param == "tools"


def test_a_repeated_invalid_list_is_rejected_again() -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="longer than"):
            plan_tools([FunctionTool("f", "", {"properties": {"a" * 300: {}}})])


def alternating(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"anyOf": [{"properties": {"a": schema}}, {"type": "array", "items": {"properties": {"b": {}}}}]}
    return schema


DEEPEST = {"objects": (deep(48), "a?: {", 47), "alternatives": (alternating(23), " | {", 46)}


@pytest.mark.parametrize("case", DEEPEST)
def test_a_schema_at_the_depth_limit_is_declared(encoding: Encoding, case: str) -> None:
    schema, level, count = DEEPEST[case]
    assert tools_section(plan_tools([FunctionTool("f", "", schema)]).declarations).count(level) == count


@pytest.mark.parametrize("tools", [1, 4])
def test_the_weight_of_cached_tools_bounds_their_memory(monkeypatch: pytest.MonkeyPatch, tools: int) -> None:
    planned: LruCache[bytes, ToolSet] = LruCache(2_000_000)
    monkeypatch.setattr(tools_module, "_PLANNED", planned)
    tracemalloc.start()
    try:
        for index in range(200):
            names = [f"weight_{tools}_{index}_{place}" for place in range(tools)]
            assert plan_tools([FunctionTool(name) for name in names]).recipients == tuple(
                f"functions.{name}" for name in names
            )
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert planned.weight > 0
    assert held < 12 * planned.weight
