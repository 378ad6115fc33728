"""Statically frozen data classes behave as frozen ones, except that nothing refuses assignments at run time."""

from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import pytest

from unisono.core.frozen import statically_frozen


def classes(decorate: Any) -> tuple[Any, Any]:
    @decorate
    @dataclass(frozen=True, slots=True)
    class Point:
        x: int
        y: int = 0
        labels: list[str] = field(default_factory=list, compare=False)

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("x")

    @decorate
    @dataclass(frozen=True, slots=True)
    class Named(Point):
        name: str = field(default="", kw_only=True)

    return Point, Named


@pytest.mark.parametrize("decorate", [lambda cls: cls, statically_frozen], ids=["frozen", "statically frozen"])
def test_statically_frozen_classes_behave_as_frozen_ones(decorate: Any) -> None:
    point, named = classes(decorate)
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
