"""Statically frozen data classes behave as those of the standard library, except that nothing refuses assignments."""

import dataclasses
from copy import copy, deepcopy
from dataclasses import field, replace
from inspect import signature
from pickle import dumps, loads
from typing import Any

import pytest

from unisono.core import frozen

BOTH = pytest.mark.parametrize(
    "dataclass", [dataclasses.dataclass, frozen.dataclass], ids=["standard", "statically frozen"]
)


def classes(dataclass: Any) -> tuple[Any, Any]:
    @dataclass(frozen=True, slots=True)
    class Point:
        x: int
        y: int = 0
        labels: list[str] = field(default_factory=list, compare=False)

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("x")

    @dataclass(frozen=True, slots=True)
    class Named(Point):
        name: str = field(default="", kw_only=True)

    return Point, Named


@BOTH
def test_frozen_classes_have_the_methods_of_data_classes(dataclass: Any) -> None:
    point, named = classes(dataclass)
    assert point(1) == point(1, 0) != point(1, 2)
    assert hash(point(1)) == hash(point(1, labels=["a"]))
    assert point(1).labels is not point(1).labels
    assert replace(point(1, 2), y=3) == point(1, 3)
    assert repr(named(1, name="n")).endswith("Named(x=1, y=0, labels=[], name='n')")
    assert list(signature(named).parameters) == ["x", "y", "labels", "name"]
    with pytest.raises(TypeError):
        named(1, 2, [], "n")
    with pytest.raises(TypeError):
        point()
    with pytest.raises(ValueError, match="x"):
        point(-1)


@BOTH
def test_equality_compares_objects_of_one_class_only(dataclass: Any) -> None:
    point, named = classes(dataclass)
    assert point(1) != named(1)
    assert point(1) != (1, 0)
    assert len({point(1), point(1, labels=["a"]), named(1), point(2)}) == 3


@BOTH
def test_methods_of_the_class_are_kept(dataclass: Any) -> None:
    @dataclass(frozen=True, slots=True)
    class Own:
        x: int

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"

    @dataclass(frozen=True, slots=True)
    class Hashed:
        x: int

        def __hash__(self) -> int:
            return 7

    assert Own(1) == Own(2)
    assert repr(Own(1)) == "own"
    assert hash(Own(1)) == hash(Own(1))
    assert hash(Hashed(1)) == hash(Hashed(2)) == 7
    assert Hashed(1) != Hashed(2)


@BOTH
def test_a_class_without_fields_has_equal_objects(dataclass: Any) -> None:
    @dataclass(frozen=True, slots=True)
    class Empty:
        """No fields."""

    assert Empty() == Empty()
    assert hash(Empty()) == hash(Empty())
    assert repr(Empty()).endswith("Empty()")


@BOTH
def test_fields_are_slots_and_patterns(dataclass: Any) -> None:
    point, _ = classes(dataclass)
    assert not hasattr(point(1), "__dict__")
    match point(1, 2):
        case point(x, y):
            assert (x, y) == (1, 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Standard:
    x: int
    others: tuple["Standard", ...] = ()


@frozen.dataclass(frozen=True, slots=True)
class Light:
    x: int
    others: tuple["Light", ...] = ()


@pytest.mark.parametrize("kind", [Standard, Light])
def test_objects_are_copied_and_pickled(kind: Any) -> None:
    value = kind(1, (kind(2),))
    assert copy(value) == deepcopy(value) == loads(dumps(value)) == value
    assert dataclasses.asdict(value) == {"x": 1, "others": ({"x": 2, "others": ()},)}


def test_other_options_select_the_standard_class() -> None:
    @frozen.dataclass(frozen=True, slots=True, order=True)
    class Ordered:
        x: int

    assert Ordered(1) < Ordered(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Ordered(1).x = 2  # type: ignore[misc]


def test_mutable_classes_are_standard() -> None:
    @frozen.dataclass(slots=True)
    class Mutable:
        x: int

    value = Mutable(1)
    value.x = 2
    assert value == Mutable(2)
    with pytest.raises(TypeError):
        hash(value)
